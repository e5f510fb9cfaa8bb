"""How the demo shows its progress: a bar for every rank on a terminal, a few lines elsewhere. Only rank 0 draws: it knows all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradwire.cli.demo.train import Watch

_LINES = 10
_BARS = 16
"""The most ranks that are shown."""


@contextmanager
def progress(rank: int, ranks: int, steps: int) -> Iterator[Watch]:
    """A progress display of all ranks, drawn by rank 0 itself: its standard output is the caller's."""
    console = Console()
    if rank != 0:
        yield _Silent()
    elif not console.is_terminal:
        yield _Lines(steps)
    else:
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]:>7} tok/s"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            refresh_per_second=5,
        )
        with bars:
            yield _Bars(bars, ranks, steps)


class _Silent:
    def step(self, done: int, losses: Sequence[float], tokens_per_second: float) -> None:
        """Nothing."""


class _Bars:
    def __init__(self, bars: Progress, ranks: int, steps: int) -> None:
        self._bars = bars
        self._tasks = [
            bars.add_task(f"rank {rank}", total=steps, loss="-.---", rate="-") for rank in range(min(ranks, _BARS))
        ]

    def step(self, done: int, losses: Sequence[float], tokens_per_second: float) -> None:
        """Move the bars."""
        rate = f"{tokens_per_second / len(losses):,.0f}"
        for task, loss in zip(self._tasks, losses):
            self._bars.update(task, completed=done, loss=f"{loss:.3f}", rate=rate)


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // _LINES)

    def step(self, done: int, losses: Sequence[float], tokens_per_second: float) -> None:
        """Print the first, the last and some in between."""
        if done == 1 or done == self._steps or done % self._every == 0:
            width = len(str(self._steps))
            line = f"step {done:>{width}}/{self._steps}  loss {mean(losses):.3f}  {tokens_per_second:,.0f} tokens/s"
            print(line)
            sys.stdout.flush()
