"""`gradwire inspect`: where every rank of a job is now, whatever has started it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.host import ProcessState
from gradwire.observe.hang_watch import HangWatch
from gradwire.observe.hangs import described, report_lines
from gradwire.observe.progress import RankProgress
from gradwire.observe.run_warnings import merge_warnings
from gradwire.observe.runs import find_run
from gradwire.observe.stacks import user_frames


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire inspect` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        description="Show where every rank of a job is: the state of its process, its step, the collective that it waits in, and "
        "the line of its code. If ranks wait for others, these are named, with their stacks. The job is not disturbed, and "
        "need not have been started by gradwire run: its ranks must be recorded, on this host.",
    )
    add = parser.add_argument
    add(
        "run",
        nargs="?",
        metavar="RUN",
        help="the directory of a run, or the process id of a rank (default: the latest run)",
    )
    add("--stacks", action="store_true", help="show the whole stack of every rank")
    return parser


def run(args: argparse.Namespace) -> int:
    """Look once, and print."""
    watch = HangWatch(_directory(args.run))
    try:
        watch.look()
        if not watch.ranks:
            raise UsageError(f"gradwire inspect {args.run or ''}: no flight recorder has written there.")
        for _, rank in sorted(watch.ranks.items()):
            _show(watch, rank, whole=args.stacks)
        for warning in merge_warnings((r.rank, r.header, r.warnings) for r in watch.ranks.values()):
            print(f"warning: {warning}")
        waiting = watch.waiting(0.0)
        if waiting is not None:
            print("\n" + "\n".join(report_lines(waiting, watch.suspects(waiting))))
    finally:
        watch.close()
    return 0


def _directory(given: str | None) -> Path:
    if given is None or not given.isdigit() or Path(given).is_dir():
        return find_run(given, os.environ)
    try:
        maps = Path(f"/proc/{given}/maps").read_text()
    except OSError as error:
        raise UsageError(f"gradwire inspect {given}: process {given}: {error.strerror}.") from None
    rings = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if line.endswith(".ring")]
    if not rings:
        raise UsageError(f"gradwire inspect {given}: process {given} is not recorded.")
    return Path(rings[0]).parent


def _show(watch: HangWatch, rank: RankProgress, *, whole: bool) -> None:
    state = watch.state(rank)
    pending = rank.oldest_pending()
    stacks = watch.stacks(rank)
    own = user_frames(stacks[0].frames, rank.header) if stacks else []
    here = rank in watch.local_ranks
    where = "" if here else f" on {rank.header['host']}"
    parts = [f"rank {rank.rank} (process {rank.header['pid']}{where}): {state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if own:
        parts.append(f"at {own[0]}")
    print(", ".join(parts))
    if pending is not None:
        seconds = (time.monotonic_ns() - pending.time) / 1e9
        how_long = f"for {seconds:.1f} s in" if here else "in"
        print(f"    {'at its end in' if state is ProcessState.GONE else how_long} {described(pending)}")
    for number, stack in enumerate(stacks if whole else []):
        print(f"    {'main thread' if number == 0 else 'another thread'}:")
        for frame in stack.frames:
            print(f"      {frame}")
