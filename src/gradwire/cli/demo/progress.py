"""How the demo shows its progress: a bar on a terminal, a few lines elsewhere. Only rank 0 shows any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradwire.cli.demo.train import Watch

_LINES = 10


@contextmanager
def progress(rank: int, steps: int) -> Iterator[Watch]:
    """A progress display of this rank, drawn by the rank itself: its standard output is the caller's."""
    console = Console()
    if rank != 0:
        yield _Silent()
    elif not console.is_terminal:
        yield _Lines(steps)
    else:
        bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]:>7} tok/s"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            refresh_per_second=5,
        )
        with bar:
            yield _Bar(bar, steps)


class _Silent:
    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """Nothing."""


class _Bar:
    def __init__(self, bar: Progress, steps: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=steps, loss="-.---", rate="-")

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, loss=f"{loss:.3f}", rate=f"{tokens_per_second:,.0f}")


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // _LINES)

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """Print the first, the last and some in between."""
        if done == 1 or done == self._steps or done % self._every == 0:
            width = len(str(self._steps))
            print(f"step {done:>{width}}/{self._steps}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")
            sys.stdout.flush()
