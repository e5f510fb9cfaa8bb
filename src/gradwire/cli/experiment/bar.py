"""The progress of a benchmark whose ranks are processes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, what: str, rounds: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; call the yielded function with the number of finished rounds. It disappears at the end.

    It is drawn when a round ends, not continuously by a thread: the ranks need the cores. If the console is not a terminal,
    about ten lines are printed to standard error instead.
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
    """Warn early if there are more ranks than cores: the figures then take long, and mean little."""
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        print(
            f"gradwire bench: {ranks} ranks share {cores} cores. Starting may take minutes, and times reflect the scheduler more "
            "than communication.",
            file=sys.stderr,
            flush=True,
        )
