"""`Result`: what a benchmark has measured, as rows of values, printed as tables and written as JSON from the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.timing import Ratio, Series
from gradwire.errors import GroupError

Row = Mapping[str, Any]
"""Values by key: a Series or Ratio, a number, text, plain data that is only written to JSON, or None."""


def fixed(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    """A format with so many digits after the point.

    >>> fixed(1, 1e3)(0.01234)
    '12.3'
    """
    return lambda value: f"{value * scale:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Column:
    """One value of every row: its key and heading, and how a number is shown. Of a Series the median is shown, and its quartiles
    below it; of a Ratio that of the medians, and the median of the ratios of single rounds below it."""

    key: str
    head: str
    show: Callable[[Any], str] = str
    below: str = ""
    """The key of another value, which is shown below."""
    show_below: Callable[[Any], str] = str

    def cell(self, row: Row) -> str:
        """What the table shows of `row`."""
        value, second = row.get(self.key), ""
        if isinstance(value, Series):
            unit = self.show(value.median).lstrip("+-.0123456789")  # shown once, unless a quartile has another
            second = "…".join(self.show(quartile).removesuffix(unit) for quartile in value.quartiles)
            value = value.median
        elif isinstance(value, Ratio):
            second = self.show(value.median_of_rounds)
            value = value.of_medians
        if self.below and row.get(self.below) is not None:
            second = self.show_below(row[self.below])
        if value is None:
            return ""
        first = value if isinstance(value, str) else self.show(value)
        return f"{first}\n[dim]{second}[/dim]" if second else first


@dataclass(frozen=True, slots=True)
class Figures:
    """A table: rows by name, under `columns`. Values of a row that no column shows are in the JSON file only."""

    rows: Mapping[str, Row]
    columns: Sequence[Column]
    caption: str
    title: str = ""
    first: str = "variant"
    """The heading of the names."""
    best: str = ""
    """The name of a row to emphasize."""

    def table(self) -> Table:
        """For the screen."""
        table = Table(title=self.title or None, caption=self.caption, caption_justify="left")
        table.add_column(self.first)
        for column in self.columns:
            table.add_column(column.head, justify="right", no_wrap=True)
        for name, row in self.rows.items():
            style = "bold" if name == self.best else ""
            table.add_row(str(row.get("name", name)), *(column.cell(row) for column in self.columns), style=style)
        return table


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a benchmark: where and how it was measured, its tables, and what they mean as sentences."""

    benchmark: str
    machine: Mapping[str, str]
    settings: Mapping[str, str]
    figures: Sequence[Figures]
    lines: Sequence[str] = field(default=())
    error: GroupError | None = None
    """What ended the benchmark early."""

    def as_json(self) -> dict[str, Any]:
        """Plain data, with every round; times in seconds."""
        return {
            "benchmark": self.benchmark,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "figures": [
                {"title": one.title, "rows": {name: _plain(row) for name, row in one.rows.items()}}
                for one in self.figures
            ],
            "lines": list(self.lines),
        }

    def show(self, console: Console, *, json_file: Path | None = None, plot: Path | None = None) -> None:
        """Print it, write it to `json_file`, and name the file of the plot."""
        facts = Table.grid(padding=(0, 2))
        for name, value in {**self.machine, **self.settings}.items():
            facts.add_row(Text(name, style="dim"), Text(str(value)))
        console.print(facts)
        for one in self.figures:
            console.print(one.table())
        for line in self.lines:
            console.print(Text(line))
        if json_file is not None:
            json_file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
            console.print(Text(f"All figures are in {json_file}.", style="dim"))
        if plot is not None:
            console.print(Text(f"The plot is in {plot}.", style="dim"))


def _plain(value: Any) -> Any:
    if isinstance(value, Series | Ratio):
        return value.as_json()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value


_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size_words(nbytes: int) -> str:
    """
    >>> size_words(26214400), size_words(4), size_words(1536)
    ('25 MiB', '4 B', '1536 B')
    """
    return next((f"{nbytes // unit} {name}" for unit, name in _SIZES if nbytes % unit == 0), f"{nbytes} B")


def time_words(seconds: float) -> str:
    """Three digits and a unit.

    >>> time_words(0.00431), time_words(24.4e-6), time_words(2.0)
    ('4.31 ms', '24.4 µs', '2.00 s')
    """
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))
    value = seconds / unit
    return f"{value:.0f} {name}" if value >= 100 else f"{value:#.3g} {name}"
