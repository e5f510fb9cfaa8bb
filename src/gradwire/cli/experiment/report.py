"""How benchmarks present their figures: a table on the screen, and the same with every single round in a JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.cli.experiment.timing import Ratio, Series

MS = 1e3


@dataclass(frozen=True, slots=True)
class Row:
    """One variant: its times, its overhead, and how that compares."""

    series: Series
    more: float | None = None
    ratio: Ratio | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a benchmark. `ratio_of` describes the ratios in the rows."""

    benchmark: str
    machine: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    ratio_of: str
    lines: Sequence[str] = field(default=())
    """What the figures mean, as sentences."""
    more_than: str = "bare"
    """The variant whose time `Row.more` is in addition to."""


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--json FILE`, which every benchmark has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")


def show(result: Result, *, json_file: Path | None = None, console: Console | None = None) -> None:
    """Print the result; write it to `json_file` too."""
    present(
        {**result.machine, **result.settings},
        [_table(result)],
        result.lines,
        data=as_json(result),
        json_file=json_file,
        console=console,
    )


def present(
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    lines: Sequence[str],
    *,
    data: Mapping[str, Any],
    json_file: Path | None = None,
    console: Console | None = None,
) -> None:
    """Print the settings, the tables, and what they mean; write `data` to `json_file`."""
    console = console or Console(highlight=False)
    listed = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        listed.add_row(Text(name, style="dim"), Text(str(value)))
    console.print(listed)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(Text(line))
    if json_file is not None:
        json_file.write_text(json.dumps(data, indent=1) + "\n")
        console.print(Text(f"All figures are in {json_file}.", style="dim"))


def new_table(first: str, *heads: str, caption: str, title: str | None = None) -> Table:
    """An empty table: a column of names, and columns of figures."""
    table = Table(title=title, caption=caption)
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _table(result: Result) -> Table:
    heads = ("step", f"over {result.more_than}", "ratio of\nmedians", "median of\nround ratios")
    caption = f"ms per step: median, and quartiles below it. Ratios are of {result.ratio_of}."
    table = new_table("variant", *heads, caption=caption)
    for row in result.rows:
        low, high = row.series.quartiles
        cells = [f"{row.series.median * MS:.3f}\n[dim]{low * MS:.2f} … {high * MS:.2f}[/dim]"]
        cells.append("" if row.more is None else f"{row.more * MS:+.3f}")
        if row.ratio is None:
            cells += ["", ""]
        else:
            low, high = row.ratio.quartiles
            cells.append(f"{row.ratio.of_medians:.3f}")
            cells.append(f"{row.ratio.median_of_rounds:.3f}\n[dim]{low:.2f} … {high:.2f}[/dim]")
        table.add_row(row.series.name, *cells)
    return table


def as_json(result: Result) -> dict[str, Any]:
    """The result as plain data, in milliseconds, with every round."""
    return {
        "benchmark": result.benchmark,
        "machine": dict(result.machine),
        "settings": dict(result.settings),
        "ratio_of": result.ratio_of,
        "variants": {row.series.name: _row_as_json(row, result.more_than) for row in result.rows},
    }


def _row_as_json(row: Row, more_than: str) -> dict[str, Any]:
    data = row.series.as_json("ms", MS)
    if row.more is not None:
        data[f"over_{more_than}_ms"] = row.more * MS
    if row.ratio is not None:
        data["ratio_of_medians"] = row.ratio.of_medians
        data["median_of_round_ratios"] = row.ratio.median_of_rounds
        data["quartiles_of_round_ratios"] = list(row.ratio.quartiles)
        data["confidence_of_median"] = row.ratio.confidence
        data["rounds_compared"] = row.ratio.rounds
    return data
