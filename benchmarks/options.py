"""The options of every benchmark. This module imports nothing heavy, so that `--help` answers at once: where a list of choices
is defined next to code that needs torch, it is repeated here, and a test holds that both are equal."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.cli.arguments import at_least, positive

Parser = argparse.ArgumentParser

HOOKS = (
    *("mean", "bf16", "fp16", "quantize8", "quantize4", "quantize2", "quantize1", "sign", "power_sgd", "power_sgd16"),
    *("power_sgd_batched", "top_k", "dgc"),
)
"""Hooks that act on gradients, by name: see gradwire.hooks.named."""
LOCAL_HOOKS = ("diloco", "local4")
"""Those with which replicas diverge between exchanges."""
TORCH_HOOKS = ("torch-allreduce", "torch-fp16", "torch-bf16", "torch-powersgd")
NCCL_HOOKS = ("torch-quantize", "torch-quantize-channels")
SIZES = ("small", "10m", "tiny")
LEARNER_SIZES = ("tiny", "small", "1m", "10m")
FORMS = ("bare", "inside", "outside", "blocks", "one bucket", "torch")
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
STEP, DEMO = "step", "demo"
"""Parts of oversubscribed in addition to the operations."""
TASKS = {"digits": 2000, "text": 4500, "text-short": 400}
"""Tasks of parity, and their number of steps."""
PEERS = ("torchft", "torchft-1s", "restart")
"""What survives the death of a rank too: torchft, also with a heartbeat timeout of one second, and a restart from checkpoints."""
OVERLAP_HOOKS = ("mean", "bf16", "quantize8", "power_sgd", "top_k")
HOST_HOOKS = ("quantize8", "power_sgd", "top_k", "sign")
PARITY_HOOKS = ("quantize8", "quantize4", "quantize1", "power_sgd", "top_k", "diloco")
REFERENCE = "torch"
"""torch's DDP without a hook, in slowlink."""
CONTENDERS = ("torch-fp16", "torch-powersgd", *HOOKS, *LOCAL_HOOKS)
_SIZES = "4,256,4KiB,64KiB,1MiB,4MiB,25MiB,64MiB"
_TIMEOUT = 120
_LONG_TIMEOUT = 600


def list_of(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Comma-separated values, sorted and without duplicates.

    >>> list_of(at_least(1))("4,2,2")
    [2, 4]
    """
    return lambda text: sorted({parse(item.strip()) for item in text.split(",")})


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument type: comma-separated names out of `known`, in the given order, without duplicates.

    >>> names_of(["a", "b"])("b, a,b")
    ['b', 'a']
    >>> names_of(["a", "b"])("c")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: unknown name 'c'; known names: a, b
    """

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(item.strip() for item in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; known names: {', '.join(known)}")
        return names

    return parse


_UNITS = {"": 1, "b": 1, "kib": 2**10, "k": 2**10, "mib": 2**20, "m": 2**20, "gib": 2**30, "g": 2**30}


def byte_size(text: str) -> int:
    """A number of bytes, such as 4096, 4KiB or 25MiB; K, M and G are powers of 1024 too.

    >>> byte_size("25 MiB")
    26214400
    >>> byte_size("a lot")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'a lot' is not a number of bytes, such as 4096, 4KiB or 25MiB
    """
    digits = text.rstrip("bBiIkKmMgG ")
    unit = _UNITS.get(text[len(digits) :].strip().lower())
    if unit is None or not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 4096, 4KiB or 25MiB")
    return int(digits) * unit


def _choice(parser: Parser, option: str, choices: tuple[str, ...], default: str | None, text: str) -> None:
    name = option.lstrip("-").upper()
    note = f" (default: {default})" if default is not None else ""
    parser.add_argument(
        option, choices=choices, default=default, metavar=name, help=f"{text}: {', '.join(choices)}{note}"
    )


def _names(parser: Parser, option: str, known: tuple[str, ...], default: tuple[str, ...] | None, text: str) -> None:
    shown = "all" if default is None or default == known else ", ".join(default)
    parser.add_argument(
        option,
        type=names_of(known),
        default=list(default) if default is not None else None,
        metavar="A,B",
        help=f"{text}: {', '.join(known)} (default: {shown})",
    )


def _files(parser: Parser, *, plot: str = "") -> None:
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help=f"also draw {plot} (.png, .svg or .pdf)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="also write all figures to FILE")


def _new_file(text: str) -> Path:
    if (path := Path(text)).parent.is_dir():
        return path
    raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")


def _device(parser: Parser) -> None:
    _choice(parser, "--device", ("cpu", "cuda"), "cpu", "device")


def _timeout(parser: Parser, seconds: int = _TIMEOUT) -> None:
    text = "give up when no rank has reported progress for this long (default: %(default)s)"
    parser.add_argument("--timeout", type=at_least(1), default=seconds, metavar="SECONDS", help=text)


def overhead(parser: Parser) -> None:
    """A step at world size 1."""
    add = functools.partial(parser.add_argument, metavar="N")
    _device(parser)
    add("--parameters", type=at_least(1), help="number of small parameters (default: 400, on the CPU)")
    _choice(parser, "--size", SIZES, None, "train a model of GPT-2's shape instead, the default on cuda")
    add(
        "--batch",
        type=list_of(at_least(1)),
        metavar="N,N",
        help="sequences per step (default: 8; with --against on cuda: 1,32), or rows for small parameters (4)",
    )
    add("--steps", type=at_least(1), help="timed steps of each variant (default: 300, on cuda 100)")
    add("--block", type=at_least(1), help="timed steps of a variant per round (default: 3, on cuda 5)")
    clock = "wall time (the default), or processor time, more reliable on a busy machine (the default with --against)"
    _choice(parser, "--clock", ("wall", "cpu"), None, clock)
    parser.add_argument(
        "--adamw", action="store_true", help="include an AdamW step, fused on cuda; always with --nonfinite on cuda"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--record", action="store_true", help="also measure gradwire with the flight recorder on")
    instead.add_argument(
        "--nonfinite", action="store_true", help="instead: gradwire with nonfinite=NonFinite.RAISE, and without"
    )
    instead.add_argument(
        "--against", type=Path, metavar="PATH", help="instead: this checkout and the one at PATH, in turns"
    )
    add("--processes", type=at_least(1), default=4, help="with --against: pairs of processes (default: %(default)s)")
    _files(parser)


def host(parser: Parser) -> None:
    """Host time of hooks at world size 1."""
    add = functools.partial(parser.add_argument, metavar="N")
    _device(parser)
    _choice(parser, "--size", SIZES, None, "size of the model, of GPT-2's shape; on cuda small unless given, else tiny")
    batches = "sequences per step (default: %(default)s)"
    add("--batch", type=list_of(at_least(1)), default="8,32", metavar="N,N", help=batches)
    _names(parser, "--hooks", HOOKS, HOST_HOOKS, "hooks, after mean")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile around every variant, and inside the DDPs"
    )
    add("--rounds", type=at_least(2), default=7, help="turns of each variant (default: %(default)s)")
    _files(parser)


def collectives(parser: Parser) -> None:
    """One collective, by every implementation."""
    add = functools.partial(parser.add_argument, metavar="N")
    _choice(parser, "--op", OPERATIONS, "all_reduce", "operation")
    add("--ranks", type=list_of(at_least(2)), default="2,4", metavar="N,N", help="world sizes (default: %(default)s)")
    add(
        "--sizes",
        type=list_of(byte_size),
        default=_SIZES,
        metavar="B,B",
        help="bytes of the operation's larger tensor on a rank; if it is split, rounded up to one element per part "
        "(default: %(default)s)",
    )
    add("--rounds", type=at_least(2), default=20, help="turns of each at each size (default: %(default)s)")
    _choice(parser, "--mpi", ("auto", "none"), "auto", "start ranks under mpirun if Open MPI is installed, or omit it")
    _timeout(parser)
    _files(parser, plot="all times")


def training(parser: Parser) -> None:
    """Steps of a transformer on several ranks."""
    add = functools.partial(parser.add_argument, metavar="N")
    _choice(parser, "--size", SIZES, "10m", "size of the model, of GPT-2's shape")
    add("--ranks", type=at_least(2), default=2, help="number of ranks (default: %(default)s)")
    add("--batch", type=at_least(1), default=1, help="sequences per rank and step (default: %(default)s)")
    # Few tokens, as when many ranks share a batch: communication is then significant compared with computation.
    add("--tokens", type=at_least(1), default=16, help="tokens per sequence (default: %(default)s)")
    add("--steps", type=at_least(4), default=30, help="timed steps of each variant (default: %(default)s)")
    _timeout(parser)
    _files(parser)


def oversubscribed(parser: Parser) -> None:
    """Shared memory and gloo on few cores."""
    add = functools.partial(parser.add_argument, metavar="N,N")
    add("--ranks", type=list_of(at_least(2)), default="2,8", help="world sizes (default: %(default)s)")
    busy = "numbers of processes that compute all the time meanwhile (default: %(default)s)"
    add("--busy", type=list_of(at_least(0)), default="0,2", help=busy)
    _names(parser, "--parts", (*OPERATIONS, STEP, DEMO), (*OPERATIONS, STEP, DEMO), "what is measured")
    sizes = "bytes of an operation's larger tensor on a rank (default: %(default)s)"
    add("--sizes", type=list_of(byte_size), default="4KiB,256KiB,4MiB,25MiB", metavar="B,B", help=sizes)
    rounds = "turns of each (default: %(default)s)"
    add("--rounds", type=at_least(2), default=5, metavar="N", help=rounds)
    _timeout(parser)
    _files(parser)


def balance(parser: Parser) -> None:
    """Ranks of different speed."""
    add = functools.partial(parser.add_argument, metavar="N")
    _names(parser, "--groups", ("shared_memory", "gloo"), ("shared_memory", "gloo"), "kinds of group")
    busy = "numbers of processes that compute all the time meanwhile (default: %(default)s)"
    add("--busy", type=list_of(at_least(0)), default="0,2", metavar="N,N", help=busy)
    add("--total", type=at_least(2), default=32, help="samples of all ranks in a step (default: %(default)s)")
    add("--ms", type=positive, default=5.0, metavar="MS", help="sleep for a sample on rank 0 (default: %(default)g)")
    add("--steps", type=at_least(2), default=40, help="timed steps (default: %(default)s)")
    _timeout(parser)
    _files(parser)


def startup(parser: Parser) -> None:
    """Whole commands that start ranks."""
    add = functools.partial(parser.add_argument, metavar="N")
    add("--ranks", type=at_least(1), default=4, help="number of ranks (default: %(default)s)")
    add("--rounds", type=at_least(2), default=7, help="runs of each command (default: %(default)s)")
    _timeout(parser)
    _files(parser)


def faults(parser: Parser) -> None:
    """An elastic run whose members are killed."""
    add = functools.partial(parser.add_argument, metavar="N")
    add("--faults", type=at_least(1), default=100, help="end after so many faults (default: %(default)s)")
    add("--ranks", type=at_least(3), default=8, help="number of members (default: %(default)s)")
    add("--slots", type=at_least(1), default=8, help="micro-batches of a step (default: %(default)s)")
    add("--width", type=at_least(1), default=512, help="of the model's layers (default: %(default)s, 0.3 M parameters)")
    add("--seed", type=int, default=0, help="decides where members die (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="times as many faults per step (default: 1)"
    )
    parser.add_argument(
        "--no-plain", dest="plain", action="store_false", help="no goodput: do not train without faults"
    )
    _names(parser, "--peer", PEERS, None, "instead: kills at random times, and contenders under the same ones")
    mean = "with --peer: mean time between kills (default: %(default)g)"
    parser.add_argument("--interval", type=positive, default=10.0, metavar="SECONDS", help=mean)
    length = "with --peer: length of each run (default: %(default)g)"
    parser.add_argument("--duration", type=positive, default=60.0, metavar="SECONDS", help=length)
    every = "with --peer restart: time between checkpoints (default: %(default)g)"
    parser.add_argument("--checkpoint", type=positive, default=1.0, metavar="SECONDS", help=every)
    python = "with --peer torchft: the Python that has torchft and torch (default: this one)"
    parser.add_argument("--python", metavar="FILE", help=python)
    _timeout(parser, 1500)
    _files(parser, plot="steps, members and faults over time")


def elastic(parser: Parser) -> None:
    """An elastic run without faults."""
    add = functools.partial(parser.add_argument, metavar="N")
    _device(parser)
    _choice(parser, "--size", SIZES, "10m", "size of the model, of GPT-2's shape; small on cuda")
    add("--ranks", type=at_least(2), default=2, help="number of members (default: %(default)s); one on cuda")
    batch = "sequences per member and step (default: 1; on cuda 8 and then 32)"
    parser.add_argument("--batch", type=list_of(at_least(1)), metavar="N,N", help=batch)
    add("--tokens", type=at_least(1), default=64, help="tokens per sequence (default: %(default)s)")
    add("--steps", type=at_least(4), default=120, help="timed steps of each variant (default: %(default)s)")
    add("--block", type=at_least(1), default=4, help="steps in a turn (default: %(default)s)")
    _names(parser, "--hooks", ("mean", "quantize8"), ("mean", "quantize8"), "hooks of both variants")
    _timeout(parser)
    _files(parser)


def compile_(parser: Parser) -> None:
    """A compiled model in every form."""
    add = functools.partial(parser.add_argument, metavar="N")
    add("--blocks", type=at_least(1), default=12, help="blocks of the model (default: %(default)s)")
    add("--width", type=at_least(1), default=256, help="its width (default: %(default)s)")
    add("--tokens", type=at_least(1), default=128, help="tokens per sequence (default: %(default)s)")
    add("--batch", type=at_least(1), default=4, help="sequences per rank and step (default: %(default)s)")
    add("--ranks", type=at_least(1), default=2, help="number of ranks (default: %(default)s)")
    link = parser.add_mutually_exclusive_group()
    link.add_argument(
        "--link", type=positive, default=1000.0, metavar="MBIT", help="megabits per second (default: %(default)g)"
    )
    link.add_argument("--no-link", action="store_true", help="as fast as shared memory, or NCCL on cuda, allows")
    add("--latency-ms", type=positive, default=0.2, metavar="MS", help="of the link (default: %(default)g)")
    _choice(parser, "--hook", HOOKS, "mean", "hook")
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of every block")
    _names(parser, "--forms", FORMS, FORMS, "forms of the model")
    parser.add_argument("--backend", default="inductor", metavar="NAME", help="of torch.compile (default: %(default)s)")
    add("--bucket-mb", type=positive, default=4.0, metavar="MB", help="size of buckets (default: %(default)g)")
    parser.add_argument("--bucket-views", action="store_true", help="gradient_as_bucket_view=True for every DDP")
    add("--steps", type=at_least(2), default=8, help="timed steps of each form (default: %(default)s)")
    _device(parser)
    _timeout(parser, _LONG_TIMEOUT)
    _files(parser)


def hooks(parser: Parser) -> None:
    """Computing time, bytes and error of hooks."""
    add = functools.partial(parser.add_argument, metavar="N")
    _device(parser)
    sizes = "bucket sizes (default: %(default)s)"
    add("--sizes", type=list_of(byte_size), default="1MiB,25MiB", metavar="B,B", help=sizes)
    add("--ranks", type=at_least(1), default=2, help="number of simulated ranks (default: %(default)s)")
    known = (*HOOKS, *TORCH_HOOKS, *NCCL_HOOKS)
    _names(parser, "--hooks", known, None, f"hooks, of which {' and '.join(NCCL_HOOKS)} need cuda")
    add("--rounds", type=at_least(2), default=15, help="timed reductions of each (default: %(default)s)")
    _files(parser, plot="the times")


def overlap(parser: Parser) -> None:
    """Streams of a GPU."""
    _choice(parser, "--size", SIZES, "small", "size of the model, of GPT-2's shape")
    text = "sequences per step (default: %(default)s)"
    parser.add_argument("--batch", type=at_least(1), default=16, metavar="N", help=text)
    _names(parser, "--hooks", HOOKS, OVERLAP_HOOKS, "hooks")
    _files(parser, plot="the timeline")


def parity(parser: Parser) -> None:
    """Final losses with and without hooks."""
    add = functools.partial(parser.add_argument, metavar="N")
    text = "an MLP on scikit-learn's digits; a transformer on some source text, until convergence; a larger one, far from it"
    _choice(parser, "--task", tuple(TASKS), "digits", text)
    _choice(parser, "--over", ("replicas", "shards"), "replicas", "DDP, or FSDP2 over gloo, there without outer steps")
    add("--seeds", type=at_least(2), default=3, help="number of seeds (default: %(default)s)")
    add("--ranks", type=at_least(1), default=4, help="processes on this machine (default: %(default)s)")
    steps = ", ".join(f"{task} {steps}" for task, steps in TASKS.items())
    add("--steps", type=at_least(1), help=f"optimizer steps (default: {steps})")
    _names(parser, "--hooks", (*HOOKS, *LOCAL_HOOKS), PARITY_HOOKS, "in addition to dense averaging")
    _timeout(parser, _LONG_TIMEOUT)
    _files(parser)


def slowlink(parser: Parser) -> None:
    """Time to a loss over a slow link."""
    add = functools.partial(parser.add_argument, metavar="N")
    add("--mbit", type=positive, default=100.0, help="megabits per second of each host (default: %(default)g)")
    add("--hosts", type=at_least(2), default=2, help="number of hosts, one rank on each (default: %(default)s)")
    add(
        "--hooks",
        type=names_of((REFERENCE, *CONTENDERS)),
        metavar="A,B",
        help=f"contenders after torch's DDP: {', '.join(CONTENDERS)} (default: all but bf16, fp16, quantize2, sign, dgc, "
        "power_sgd16 and power_sgd_batched)",
    )
    length = parser.add_mutually_exclusive_group()
    steps = "steps of torch's DDP (default: %(default)s)"
    length.add_argument("--steps", type=at_least(1), default=50, metavar="N", help=steps)
    length.add_argument("--seconds", type=positive, metavar="S", help="or train torch's DDP for this long")
    _choice(parser, "--size", LEARNER_SIZES, "10m", "size of the model")
    sequences = "sequences of 64 characters per rank and step (default: %(default)s)"
    add("--batch", type=at_least(1), default=1, help=sequences)
    add("--rate", type=positive, default=3e-4, metavar="R", help="learning rate of AdamW (default: %(default)g)")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data (default: %(default)s)")
    add("--exam-every", type=at_least(1), default=5, help="steps between two evaluations (default: %(default)s)")
    patience = "others end after X times the seconds or steps of torch's DDP (default: %(default)g)"
    add("--patience", type=positive, default=3.0, metavar="X", help=patience)
    parser.add_argument(
        "--throttled",
        action="store_true",
        help="no hosts: ranks of this machine share memory, and a simulated link makes them wait. Does not need root",
    )
    latency = "latency of the simulated link (default: %(default)g)"
    add("--latency-ms", type=positive, default=0.5, metavar="MS", help=latency)
    _timeout(parser)
    _files(parser, plot="loss against seconds and bytes")


BENCHMARKS: Mapping[str, tuple[Callable[[Parser], Any], str, str]] = {
    "collectives": (
        collectives,
        "an all-reduce by gradwire, gloo, Open MPI, and a memcpy",
        "One collective on ranks of this machine, by gradwire's shared memory (on tensors of group.allocate, the heap, and on "
        "ordinary ones), by gloo through torch.distributed, by Open MPI through mpi4py if that is installed, and for comparison "
        "a memcpy of the same number of bytes by all ranks at once. One thread per rank, float32.",
    ),
    "compile": (
        compile_,
        "a compiled model over a link: step, exposed communication, graph breaks",
        "Steps of a transformer compiled by torch.compile, on ranks of this machine joined by a simulated link, in each form: "
        "compiled inside gradwire's DDP, around it, and block by block, each with fullgraph=True; torch's DDP, compiled; and for "
        "comparison the uncompiled model, a compiled one whose gradients are reduced after backward, and one without DDP. "
        "Compiling takes minutes at first.",
    ),
    "hooks": (
        hooks,
        "computing time, bytes and error of each communication hook",
        "For each communication hook and bucket size: the time it computes before its first collective (compress), between "
        "collectives (middle) and after the last (decompress), the bytes that a rank sends, and how far the first step's result "
        "is from the true mean, next to torch's own hooks. Collectives themselves are not timed. Ranks are simulated in this "
        "process; gradients are normal random numbers in matrices of 1024 columns.",
    ),
    "host": (
        host,
        "host time and step time with each hook, on one rank",
        "The time until backward() returns and the time of a step at world size 1, where communication is free (NCCL on cuda), "
        "for the bare model, torch's DistributedDataParallel and gradwire's with mean() and with other hooks, of a model of "
        "GPT-2's shape, under bfloat16 autocast on cuda. Differences and ratios are to torch's DDP without a hook.",
    ),
    "overhead": (
        overhead,
        "a step of the bare model, torch's DDP and gradwire's, on one rank",
        "What data parallelism adds to a step at world size 1, where nothing has to be communicated: the bare model, torch's "
        "DistributedDataParallel and gradwire's, with default flags and with gradient_as_bucket_view. On the CPU, a model of many "
        "small parameters in float32 on one thread; on CUDA, a model of GPT-2's shape under bfloat16 autocast.",
    ),
    "overlap": (
        overlap,
        "whether hooks overlap with backward on a GPU",
        "One step of a model of GPT-2's shape on one GPU, with each hook: which kernels ran on the model's stream, which on the "
        "hook's, and how much of the hook's time overlapped with the model's. Profiling slows down kernel launches; with small "
        "batches the model's stream then waits for the host. Needs CUDA.",
    ),
    "balance": (
        balance,
        "a batch shared by speed among ranks of which one is half as fast",
        "Two ranks, of which the second sleeps twice as long for each sample: steps with equal shares of the batch, with those of "
        "gw.Balance, and ideal ones, where both end at the same time. All gradients are compared with those of the whole batch. "
        "And the time of a call of agree_to_skip.",
    ),
    "oversubscribed": (
        oversubscribed,
        "shared memory against gloo with more ranks than cores, or on busy cores",
        "Collectives, a training step and the comparison of `gradwire demo` over gradwire's shared memory and over gloo, in turns, "
        "on ranks that outnumber the cores or share them with processes that never sleep. One thread per rank, float32. It takes "
        "ten minutes; choose --parts and --sizes for less.",
    ),
    "parity": (
        parity,
        "the final loss with each hook, compared with dense averaging",
        "Train a small model with dense averaging and with each hook, from several seeds, with the same number of steps, and "
        "compare the losses on held-out data. A hook is within noise if its mean loss is no further above the dense one than two "
        "means of dense runs would be apart: 2 s sqrt(2 / seeds), s being the standard deviation of the dense runs.",
    ),
    "slowlink": (
        slowlink,
        "time to a given loss over a slow link, for each hook",
        "Train a transformer on the source of the Python standard library over a slow link: first with torch's "
        "DistributedDataParallel over gloo, then with others until each has reached the final loss of that one. Ranks are on "
        "separate hosts, which are network namespaces joined by a link of limited rate; that needs root. Same seed, same order of "
        "data and same optimizer for all.",
    ),
    "faults": (
        faults,
        "an elastic run whose members die at random places",
        "Members of `gradwire run --elastic` kill themselves at random places, drawn from the seed: in forward, with a bucket in "
        "flight, before a vote, in the optimizer, while members change, while they join, and while they write to the hub, which is "
        "killed too. How long after a fault the next step is committed, and whether all members had the same parameters after "
        "every step. The limits that this machine must hold, two idle cores: no difference, median 0.3 s, 99 of 100 within 2 s. "
        "With --peer, ranks are killed at random times, and torchft or a run that is started again from its last checkpoint are "
        "measured under the same kills, all relative to DistributedDataParallel without faults.",
    ),
    "elastic": (
        elastic,
        "what an elastic run adds to a step in which nothing fails",
        "Steps of a transformer over shared memory, in turns: with gradwire's DistributedDataParallel, and in a run of "
        "gw.elastic, in which all members vote before the optimizer's step and a step can be dropped. On cuda over NCCL, where "
        "the device votes.",
    ),
    "startup": (
        startup,
        "gradwire run of a script that only imports torch, against python",
        "How long `gradwire run` takes for a script that imports torch and gradwire and writes a line, how far its ranks are "
        "apart, and the same with --no-preload, where every rank imports torch; next to one `python script.py`. The limits that "
        "this machine must hold, two idle cores and 4 ranks: 1.2 x python, ranks 0.6 s apart.",
    ),
    "training": (
        training,
        "a training step: gradwire over shared memory, torch over gloo",
        "Steps of a transformer on ranks of this machine, one thread each, float32: gradwire's DistributedDataParallel over "
        "shared memory and torch's over gloo, with default flags and with gradient_as_bucket_view, and each of them also without "
        "communication, under no_sync.",
    ),
}
"""By name: what declares its options, a line for the list, and a description. Its module has `run(args) -> Result`."""
