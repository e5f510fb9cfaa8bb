"""How far a benchmark whose ranks are processes has come: a bar, or lines where nobody sees a bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, what: str, rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar that is moved by calling what it gives with the number of rounds done; it vanishes at the end.

    It is drawn when a round is over, and not by a thread all the time: the ranks need the cores. Where the console is no terminal
    there are lines on standard error instead, about ten of them.
    """
    if not console.is_terminal:
        print(f"{what}: starting", file=sys.stderr, flush=True)
        yield lambda done: _line(what, done, rounds)
        return
    progress = Progress(
        TextColumn(f"{what}: {{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with progress:
        task = progress.add_task("starting", total=rounds)
        progress.refresh()
        yield lambda done: progress.update(task, description="rounds", completed=done, refresh=True)


def _line(what: str, done: int, rounds: int) -> None:
    if done * 10 // rounds > (done - 1) * 10 // rounds:
        print(f"{what}: {done} of {rounds} rounds", file=sys.stderr, flush=True)


def warn_if_crowded(ranks: int) -> None:
    """Say at once that there are more ranks than cores: the first figures then take long, and mean little."""
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        print(
            f"gradwire bench: {ranks} ranks on {cores} cores take turns on them. Starting may take minutes, and times say more "
            "about the scheduler than about communication.",
            file=sys.stderr,
            flush=True,
        )
