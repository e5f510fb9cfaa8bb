"""The figures of `gradwire bench collectives`: times and ratios over sizes, as tables, sentences and plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gradwire.cli.bench.contenders import GLOO, HEAP, MEMCPY, MPI, ORDINARY
from gradwire.cli.bench.measure import Key
from gradwire.cli.experiment.report import new_table
from gradwire.cli.experiment.timing import Ratio, Series, compare

RATIOS = ((GLOO, HEAP), (MPI, HEAP), (HEAP, MEMCPY), (GLOO, ORDINARY), (MPI, ORDINARY))
"""What is divided by what."""
_TOLD = 25 << 20
"""The size whose ratios are stated as sentences: torch DDP's default bucket."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """All times of a world of `ranks` ranks."""

    ranks: int
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    series: Mapping[Key, Series]
    blocks: Mapping[Key, int]

    @property
    def ratios(self) -> list[tuple[str, str]]:
        """Those of `RATIOS` whose two sides took part."""
        return [(a, b) for a, b in RATIOS if a in self.names and b in self.names]

    def ratio(self, a: str, b: str, nbytes: int) -> Ratio:
        """`a` as a fraction of `b` at one size."""
        return compare(self.series[a, nbytes], self.series[b, nbytes])


def size_words(nbytes: int) -> str:
    """
    >>> size_words(26214400), size_words(4), size_words(1536)
    ('25 MiB', '4 B', '1536 B')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def time_words(seconds: float, *, like: float | None = None) -> str:
    """Three digits and a unit; with `like`, in the unit of `like` and without the unit.

    >>> time_words(0.00431), time_words(0.00431, like=1.0), time_words(24.4e-6)
    ('4.31 ms', '0.00431', '24.4 µs')
    """
    unit, name = _unit(seconds if like is None else like)
    value = seconds / unit
    digits = f"{value:.0f}" if value >= 100 else f"{value:#.3g}" if value >= 0.1 else f"{value:.3g}"
    return digits if like is not None else f"{digits} {name}"


def _unit(seconds: float) -> tuple[float, str]:
    return next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))


def time_table(sweep: Sweep, op: str) -> Table:
    """One row per size, one column per contender."""
    heads = [_stacked(name) for name in sweep.names]
    caption = "Time per call: median, and quartiles below it."
    table = new_table("size", *heads, title=f"{op}, {sweep.ranks} ranks", caption=caption)
    table.columns[0].justify = "right"
    for nbytes in sweep.sizes:
        cells = []
        for name in sweep.names:
            series = sweep.series[name, nbytes]
            low, high = (time_words(q, like=series.median) for q in series.quartiles)
            cells.append(f"{time_words(series.median)}\n[dim]{low}…{high}[/dim]")
        table.add_row(size_words(nbytes), *cells)
    return table


def ratio_table(sweep: Sweep) -> Table:
    """One row per size, one column per ratio."""
    caption = (
        "Ratio of medians, and below it the median of the ratios of single rounds. Above 1, gradwire is faster; for "
        "heap / memcpy, below."
    )
    heads = [f"{_short(a)} /\n{_short(b)}" for a, b in sweep.ratios]
    table = new_table("size", *heads, title=f"ratios, {sweep.ranks} ranks", caption=caption)
    table.columns[0].justify = "right"
    for nbytes in sweep.sizes:
        table.add_row(size_words(nbytes), *(sweep.ratio(a, b, nbytes).cell(2) for a, b in sweep.ratios))
    return table


def notable(sweeps: Sequence[Sweep]) -> list[str]:
    """The ratios at the size of a bucket, as sentences."""
    lines = []
    for sweep in sweeps:
        if _TOLD not in sweep.sizes:
            continue
        said = []
        for a, b in sweep.ratios:
            said.append(f"{_short(a)} takes {sweep.ratio(a, b, _TOLD).of_medians:.2f} times as long as {_short(b)}")
        lines.append(f"{size_words(_TOLD)}, {sweep.ranks} ranks: {'; '.join(said)}.")
    return lines


def _short(name: str) -> str:
    return name.removeprefix("gradwire ")


def _stacked(name: str) -> str:
    return name.replace("gradwire ", "gradwire\n").replace("Open MPI", "Open\nMPI")


def as_json(
    op: str, machine: Mapping[str, str], settings: Mapping[str, str], sweeps: Sequence[Sweep]
) -> dict[str, Any]:
    """All figures as plain data, in microseconds, with every round."""
    return {
        "benchmark": "collectives",
        "operation": op,
        "machine": dict(machine),
        "settings": dict(settings),
        "worlds": [_sweep_as_json(sweep) for sweep in sweeps],
    }


def _sweep_as_json(sweep: Sweep) -> dict[str, Any]:
    rows = []
    for nbytes in sweep.sizes:
        times = {
            name: {**sweep.series[name, nbytes].as_json("us", 1e6), "calls_a_turn": sweep.blocks[name, nbytes]}
            for name in sweep.names
        }
        ratios = {f"{_short(a)} / {_short(b)}": sweep.ratio(a, b, nbytes).as_json() for a, b in sweep.ratios}
        rows.append({"bytes": nbytes, "times": times, "ratios": ratios})
    return {"ranks": sweep.ranks, "sizes": rows}
