"""`gradwire inspect`: where every rank of a job is now, whatever has started it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.host import ProcessState
from gradwire.observe.hang_report import described, report_lines, stall_lines
from gradwire.observe.hang_watch import HangWatch
from gradwire.observe.progress import RankProgress
from gradwire.observe.run_follower import RunFollower
from gradwire.observe.run_warnings import merge_warnings
from gradwire.observe.runs import find_run
from gradwire.observe.stacks import Stack, user_frames
from gradwire.observe.stragglers import describe, slow_ranks


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
    ranks = RunFollower(_directory(args.run))
    watch = HangWatch(ranks, deadline=0.0)
    try:
        ranks.look()
        if not ranks.ranks:
            raise UsageError(f"gradwire inspect {args.run or ''}: no flight recorder has written there.")
        stacks = ranks.stacks(ranks.ranks.values())
        for _, rank in sorted(ranks.ranks.items()):
            _show(ranks, rank, stacks.get(rank.rank, ()), whole=args.stacks)
        for warning in merge_warnings((r.rank, r.header, r.warnings) for r in ranks.ranks.values()):
            print(f"warning: {warning}")
        for line in describe(slow_ranks({rank.rank: rank.folder.steps for rank in ranks.local_ranks})):
            print(line)
        waiting = watch.waiting
        if waiting is not None:
            print("\n" + "\n".join(report_lines(waiting, watch.suspects(waiting))))
        elif (found := watch.stall()) is not None:
            print("\n" + "\n".join(stall_lines(*found)))
    finally:
        ranks.close()
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


def _show(ranks: RunFollower, rank: RankProgress, stacks: Sequence[Stack], *, whole: bool) -> None:
    state = ranks.state(rank)
    waiting = rank.waiting_in()
    own = user_frames(stacks[0].frames, rank.header) if stacks else []
    here = rank in ranks.local_ranks
    where = "" if here else f" on {rank.header['host']}"
    parts = [f"rank {rank.rank} (process {rank.header['pid']}{where}): {state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if own:
        parts.append(f"at {own[0]}")
    print(", ".join(parts))
    if waiting is not None:
        record, since = waiting
        how_long = f"for {(ranks.now - since) / 1e9:.1f} s in" if here else "in"
        print(f"    {'at its end in' if state is ProcessState.GONE else how_long} {described(record)}")
    for number, stack in enumerate(stacks if whole else []):
        print(f"    {'main thread' if number == 0 else 'another thread'}:")
        for frame in stack.frames:
            print(f"      {frame}")
