"""`gradwire bench hooks`: computing time, bytes and error of each communication hook, over bucket sizes, next to torch's own.

`splits.py` measures one hook; this module declares the command and puts it together.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gradwire.cli.arguments import at_least, byte_size, list_of
from gradwire.cli.bench import hooks_plot
from gradwire.cli.bench.hooks_figures import PARTS, Figures, Measured, as_json, lines, table
from gradwire.cli.bench.splits import Ours, Outcome, Split, Torchs, bucket, gradients
from gradwire.cli.bench.sweep import size_words
from gradwire.cli.experiment import peers
from gradwire.cli.experiment.bar import bar
from gradwire.cli.experiment.bench_device import add_device_option, find_device, settled
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.plot_file import check
from gradwire.cli.experiment.recipes import RECIPES, names_of
from gradwire.cli.experiment.report import add_json_option, present
from gradwire.cli.experiment.timing import Rounds, Series, interleave
from gradwire.cli.experiment.torch_hooks import DENSE_STEPS, LEFT_OUT, NCCL_HOOKS, TORCH_HOOKS
from gradwire.errors import UsageError

_WARM_UP = 3


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench hooks` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "hooks",
        help="computing time, bytes and error of each communication hook",
        description="For each communication hook and bucket size: the time it computes before its first collective "
        "(compress), between collectives (middle) and after the last (decompress), the bytes that a rank sends, and how far the "
        "first step's result is from the true mean, next to torch's own hooks. Collectives themselves are not "
        "timed. Ranks are simulated in this process; gradients are normal random numbers in matrices of 1024 columns.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add_device_option(parser)
    add(
        "--sizes",
        type=list_of(byte_size),
        default="1MiB,25MiB",
        metavar="B,B",
        help="bucket sizes (default: %(default)s)",
    )
    add("--ranks", type=at_least(1), default=2, help="number of simulated ranks (default: %(default)s)")
    add(
        "--hooks",
        type=names_of(_known()),
        metavar="A,B",
        help=f"{', '.join(_known())} (default: all; on the CPU without torch-quantize and torch-quantize-channels)",
    )
    add("--rounds", type=at_least(2), default=15, help="timed reductions of each (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="also draw the times into FILE (.png, .svg or .pdf)")
    add_json_option(parser)
    return parser


def _measurable() -> list[str]:
    """Hooks that process gradients; those that act on parameters have nothing to measure here."""
    return [name for name, recipe in RECIPES.items() if not recipe.steps_on_its_own]


def _known() -> list[str]:
    return [*_measurable(), *TORCH_HOOKS, *NCCL_HOOKS]


def run(args: argparse.Namespace) -> int:
    """Measure, and show the results."""
    device = find_device("bench hooks", args.device)
    odd = [size for size in args.sizes if size % 4]
    if odd:
        raise UsageError(
            f"bench hooks --sizes: {odd[0]} bytes are not a whole number of float32 elements. Use multiples of 4."
        )
    if args.plot is not None:
        check("--plot", args.plot)
    names = _names(args.hooks, args.device)
    machine, console = describe(device), Console(highlight=False)
    world = peers.world_of_one(device) if set(names) & set(NCCL_HOOKS) else nullcontext()
    with settled(one_thread=True), world:
        measured = [_measure(size, names, args.ranks, args.rounds, device, console) for size in args.sizes]
    settings = {
        "bucket": "float32 matrices of 1024 columns, normal random numbers; one CPU thread",
        "ranks": f"{args.ranks} simulated, the first is timed; torch's hooks on one rank, bytes as for {args.ranks}",
        "measured": f"{args.rounds} interleaved rounds after {_WARM_UP} of warm-up; medians; "
        + ("events on the stream" if device.type == "cuda" else "wall time"),
    }
    if args.plot is not None:
        hooks_plot.draw(args.plot, measured, {**machine, **settings})
    present(
        {**machine, **settings},
        [table(one) for one in measured],
        [*lines(measured), *([] if args.device == "cuda" else [LEFT_OUT])],
        data=as_json({**machine, **settings}, measured),
        json_file=args.json,
        console=console,
    )
    if args.plot is not None:
        console.print(f"The plot is in {args.plot}.", style="dim")
    return 0


def _names(asked: Sequence[str] | None, device: str) -> list[str]:
    names = _known() if asked is None else list(asked)
    if device == "cpu":
        if asked is not None and set(names) & set(NCCL_HOOKS):
            raise UsageError(f"bench hooks --hooks {','.join(asked)}: {LEFT_OUT} Pass --device cuda, or omit them.")
        names = [name for name in names if name not in NCCL_HOOKS]
    return names


def _measure(
    nbytes: int, names: Sequence[str], ranks: int, rounds: int, device: torch.device, console: Console
) -> Measured:
    spec = bucket(nbytes, device)
    brought = gradients(spec, ranks)
    with ExitStack() as stack, bar(console, size_words(nbytes), rounds) as on_report:
        runs: dict[str, Ours | Torchs] = {}
        for name in names:
            if name in RECIPES:
                runs[name] = Ours(RECIPES[name].build(), spec, brought)
                continue
            if name in NCCL_HOOKS:
                register, sent = NCCL_HOOKS[name]
                run = Torchs(register, spec, brought, nccl_bytes=(ranks - 1) * sent(spec.numel))
            else:
                late = DENSE_STEPS if name == "torch-powersgd" else 0
                run = Torchs(TORCH_HOOKS[name], spec, brought, lossy_after=late)
            stack.callback(run.close)
            runs[name] = run
        interleave(runs, Rounds(rounds, warm_up=_WARM_UP), after_round=on_report)
        return Measured(nbytes, {name: _figures(name, run.splits[-rounds:], run.outcome) for name, run in runs.items()})


def _figures(name: str, splits: Sequence[Split], outcome: Outcome | None) -> Figures:
    assert outcome is not None  # every run has made at least `_WARM_UP` reductions
    parts = {part: Series(name, tuple(getattr(split, part) for split in splits)) for part in PARTS}
    return Figures(parts, Series(name, tuple(split.total for split in splits)), outcome)
