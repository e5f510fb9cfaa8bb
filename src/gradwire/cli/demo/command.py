"""`gradwire demo`: its options, the world it starts, and its exit code."""

from __future__ import annotations

import argparse
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text

from gradwire import observe
from gradwire.cli.arguments import at_least, positive
from gradwire.cli.demo.compare import Comparison, compare
from gradwire.cli.demo.progress import progress
from gradwire.cli.demo.summary import summary, verdict
from gradwire.cli.demo.train import Job, Report, train
from gradwire.cli.demo.transformer import SIZES
from gradwire.cli.terminal_svg import terminal_svg
from gradwire.errors import UsageError
from gradwire.groups import Deadline, Group
from gradwire.groups.kinds import Ranks, find_kind
from gradwire.observe.report.load import load_report
from gradwire.observe.report.render import render_page
from gradwire.observe.rings.runs import new_run, runs_directory
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
        "ranks compare their parameters bit for bit; the exit code is 1 if they differ. Then the same model is trained for a few "
        "steps with torch's DDP and with gradwire, on this machine and over a simulated slow link, and the times are compared.",
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
    add("--steps", type=at_least(1), default=400, help="optimizer steps (default: %(default)s)")
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
        "--mbit",
        type=positive,
        default=100.0,
        help="megabits per second of the simulated link of the comparison (default: %(default)g)",
    )
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="only train")
    add("--svg", type=Path, metavar="FILE", help="also write what is printed at the end as a picture")
    add(
        "--timeout",
        type=at_least(1),
        default=3600,
        metavar="SECONDS",
        help="give up after this long (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, compare, show the results, and return the exit code."""
    if args.svg is not None and (args.svg.is_dir() or not os.access(args.svg.absolute().parent, os.W_OK)):
        raise UsageError(f"gradwire demo --svg {args.svg}: no file can be written there. Name another.")
    ranks = args.ranks or _cores()
    job = Job(size=args.size, steps=args.steps, batch_size=args.batch_size, seed=args.seed)
    directory = _new_run() if find_kind(args.kind, who="gradwire demo").ranks is not Ranks.THREADS else None
    # Rank processes take seconds to import torch; show what is happening.
    print(f"starting {ranks} ranks ({args.kind}): {job.size} model, {job.steps} steps", flush=True)
    reports = _run_world(job, ranks, kind=args.kind, timeout=args.timeout, directory=directory)
    console = Console(highlight=False)
    shown: list[RenderableType] = [summary(job, reports, kind=args.kind)]
    console.print(shown[-1])
    if args.compare:
        shown.append(compare(Comparison(job, args.mbit), max(2, ranks), console, timeout=args.timeout))
        console.print(shown[-1])
    lines = [verdict(reports)]
    if directory is not None:
        lines.insert(0, _write_report(directory))
    if args.svg is not None:
        args.svg.write_text(terminal_svg(*shown, *lines, title="gradwire demo"), encoding="utf-8")
    for line in lines:
        console.print(line, soft_wrap=True)  # one line, whatever the width: scripts parse it
    return 0 if reports[0].replicas_equal else 1


def _new_run() -> Path | None:
    """Where the ranks are recorded; None if that cannot be made: the demo does not depend on it."""
    try:
        return new_run(runs_directory(os.environ), "demo")
    except OSError:
        return None


def _write_report(directory: Path) -> Text:
    page = directory / "report.html"
    page.write_text(render_page(load_report(directory)), encoding="utf-8")
    home = os.path.expanduser("~")
    shown = f"~/{page.relative_to(home)}" if page.is_relative_to(home) else str(page)
    return Text(f"A page about this run, where its time went and what to look at: {shown}")


def _run_world(job: Job, ranks: int, *, kind: str, timeout: float, directory: Path | None) -> list[Report]:
    others, threads = set(threading.enumerate()), torch.get_num_threads()
    share = max(1, _cores() // ranks)
    rank_main = functools.update_wrapper(functools.partial(_rank_main, job, share, directory), train)  # errors name it
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


def _rank_main(job: Job, threads: int, directory: Path | None, group: Group) -> Report:
    # oneDNN writes every kernel that it makes to /tmp/perf-PID.map, for profilers, and leaves the file there.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    torch.set_num_threads(threads)  # ranks share the cores; torch would use all of them in each
    with progress(group.rank, group.size, job.steps) as watch, _recorded(directory, group):
        return train(job, group, watch)


@contextmanager
def _recorded(directory: Path | None, group: Group) -> Iterator[None]:
    if directory is None:
        yield
        return
    observe.start(directory, rank=group.rank, size=group.size)
    try:
        yield
    finally:
        observe.stop()


def _cores() -> int:
    """The number of cores that this process may use; in a container often fewer than the machine has."""
    return len(os.sched_getaffinity(0))
