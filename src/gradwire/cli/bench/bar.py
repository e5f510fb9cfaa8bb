"""The progress bar of benchmarks whose ranks are processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, what: str, rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar that is moved by calling what it gives with the number of rounds done; it vanishes at the end.

    It is drawn when a round is over, and not by a thread all the time: the ranks need the cores.
    """
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
