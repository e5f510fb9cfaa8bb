"""`gradwire demo`: its options, the world it starts, and its exit code."""

from __future__ import annotations

import argparse
import functools
import os
import threading
from typing import Any

import torch

from gradwire.cli.arguments import at_least
from gradwire.cli.demo.progress import progress
from gradwire.cli.demo.summary import show
from gradwire.cli.demo.train import Job, Report, train
from gradwire.cli.demo.transformer import SIZES
from gradwire.groups import Deadline, Group
from gradwire.testing import kinds, run_ranks

_OPERATION_LIMIT = 120.0
"""Seconds that one collective may take before it times out and names the missing ranks."""
_END_LIMIT = 5.0
"""Seconds that ranks that are threads get to end after Ctrl-C."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire demo` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        description="Train a small character-level transformer data-parallel on the source code of the Python standard "
        "library. Every rank reads its own part of the text and gradients are averaged each step. At the end all "
        "ranks compare their parameters bit for bit; the exit code is 1 if they differ.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add("--ranks", type=at_least(1), help="number of ranks (default: one per core)")
    add(
        "--kind",
        choices=kinds(),
        default="shared_memory",
        metavar="KIND",
        help="kind of group: %(choices)s (default: %(default)s)",
    )
    add("--steps", type=at_least(1), default=800, help="optimizer steps (default: %(default)s)")
    add("--batch-size", type=at_least(1), default=16, help="sequences per rank and step (default: %(default)s)")
    add(
        "--size",
        choices=tuple(SIZES),
        default="small",
        metavar="SIZE",
        help="size of the model: %(choices)s (default: %(default)s)",
    )
    add("--seed", type=at_least(0), default=0, help="seed of weights, batches and sample (default: %(default)s)")
    add(
        "--timeout",
        type=at_least(1),
        default=3600,
        metavar="SECONDS",
        help="give up after this long (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, show the results, and return the exit code."""
    ranks = args.ranks or _cores()
    job = Job(size=args.size, steps=args.steps, batch_size=args.batch_size, seed=args.seed)
    # Rank processes take seconds to import torch; show what is happening.
    print(f"starting {ranks} ranks ({args.kind}): {job.size} model, {job.steps} steps", flush=True)
    reports = _run_world(job, ranks, kind=args.kind, timeout=args.timeout)
    show(job, reports, kind=args.kind)
    return 0 if reports[0].replicas_equal else 1


def _run_world(job: Job, ranks: int, *, kind: str, timeout: float) -> list[Report]:
    others, threads = set(threading.enumerate()), torch.get_num_threads()
    share = max(1, _cores() // ranks)
    rank_main = functools.update_wrapper(functools.partial(_rank_main, job, share), train)  # errors name it
    torch.set_num_threads(share)  # for ranks that are threads of this process
    try:
        return run_ranks(
            rank_main,
            ranks,
            kind=kind,
            timeout=timeout,
            wrap=functools.partial(Deadline, seconds=min(_OPERATION_LIMIT, timeout)),
        )
    except KeyboardInterrupt:
        # A thread that is inside torch when the interpreter shuts down can crash the process.
        for thread in set(threading.enumerate()) - others:
            thread.join(_END_LIMIT)
        raise
    finally:
        torch.set_num_threads(threads)


def _rank_main(job: Job, threads: int, group: Group) -> Report:
    # oneDNN writes every kernel that it makes to /tmp/perf-PID.map, for profilers, and leaves the file there.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    torch.set_num_threads(threads)  # ranks share the cores; torch would use all of them in each
    with progress(group.rank, job.steps) as watch:
        return train(job, group, watch)


def _cores() -> int:
    """The number of cores that this process may use; in a container often fewer than the machine has."""
    return len(os.sched_getaffinity(0))
