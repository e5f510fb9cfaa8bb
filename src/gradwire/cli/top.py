"""`gradwire top`: a live view of a job that something else has started.

Show all ranks of a job while it runs: their steps, how a step is divided into computing and waiting for communication, the rank
that the others wait for, and the last warning. The job is not disturbed, and need not have been started by gradwire run: its
ranks must be recorded, on this host. Without a terminal, a line every 10 seconds is printed. It ends with the job, or with
Ctrl-C.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from contextlib import closing, suppress

from rich.console import Console

from gradwire.cli.arguments import add_run, positive, run_directory
from gradwire.cli.live_view import picture
from gradwire.errors import UsageError
from gradwire.launch.display import Panel, find_terminal
from gradwire.launch.screen import Screen
from gradwire.observe.rings.ring import nothing_recorded
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.run_status import PLAIN_INTERVAL, Condition, RunMonitor, RunStatus

_TAIL = 16384
"""Records of each rank with which it begins: 20 steps, also with many buckets."""

_MOMENT = 0.5
"""Seconds after the end of all ranks within which their launcher saves how the run has ended."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    add("--once", action="store_true", help="show the view once, and end")
    every = f"how often the view is updated (default: 1, without a terminal {PLAIN_INTERVAL:g})"
    add("--every", type=positive, metavar="SECONDS", help=every)


def run(args: argparse.Namespace) -> int:
    monitor = RunMonitor(RunFollower(run_directory(args.run_dir), tail=_TAIL))
    with closing(monitor.run), suppress(KeyboardInterrupt):
        monitor.look_back()
        damage = monitor.run.damage
        if not monitor.run.ranks:
            raise nothing_recorded(monitor.run.directory, *damage.values())
        for name, what in damage.items():
            print(f"warning: {monitor.run.directory / name}: {what}", file=sys.stderr)
        if not monitor.run.local_ranks:
            raise UsageError(f"{monitor.run.directory}: its ranks are or were on other hosts. Run gradwire top there.")
        terminal = os.isatty(1) and find_terminal(os.environ) is not None
        if args.once:
            console = Console(width=None if terminal else 80, highlight=False)
            console.print(picture(monitor.status(), console.width, 1000))
        else:
            _follow(monitor, terminal=terminal, every=args.every)
    return 0


def _follow(monitor: RunMonitor, *, terminal: bool, every: float | None) -> None:
    screen = Screen(1, os.environ)
    panel = Panel(screen)
    was_under_way = False
    while screen.error is None:
        status = monitor.status()
        if was_under_way and _is_over(status) and not status.ending:
            time.sleep(_MOMENT)
            status = monitor.status()
        if terminal:
            panel.draw(functools.partial(picture, status))
        else:
            for line in monitor.figures(status):
                print(line, flush=True)
        if _is_over(status):
            return
        was_under_way = True
        time.sleep(every or (1.0 if terminal else PLAIN_INTERVAL))
        if lines := monitor.check():
            panel.above("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


def _is_over(status: RunStatus) -> bool:
    return all(rank.condition is Condition.ENDED for rank in status.ranks if rank.condition is not Condition.ABSENT)
