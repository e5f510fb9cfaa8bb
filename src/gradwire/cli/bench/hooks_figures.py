"""The figures of `gradwire bench hooks`: as tables, as text, and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gradwire.cli.bench.splits import Outcome
from gradwire.cli.bench.sweep import size_words
from gradwire.cli.experiment.report import new_table
from gradwire.cli.experiment.timing import Ratio, Series, compare

PEERS = {
    "mean": "torch-allreduce",
    "bf16": "torch-bf16",
    "fp16": "torch-fp16",
    "quantize8": "torch-quantize",
    "power_sgd": "torch-powersgd",
}
"""The torch hook that corresponds to one of ours."""
PARTS = ("compress", "middle", "decompress")


@dataclass(frozen=True, slots=True)
class Figures:
    """Time, bytes and error of one hook at one size."""

    parts: Mapping[str, Series]
    total: Series
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Measured:
    """All hooks at one size."""

    nbytes: int
    hooks: Mapping[str, Figures]

    def ratio(self, name: str) -> Ratio | None:
        """A hook's computing time, as a fraction of that of torch's corresponding hook."""
        peer = PEERS.get(name)
        return (
            compare(self.hooks[name].total, self.hooks[peer].total) if peer in self.hooks and peer is not None else None
        )


def table(measured: Measured) -> Table:
    """One row per hook."""
    caption = (
        "ms: medians, and the quartiles of the total below it. Wire: bytes that a rank sends, below it the error of the "
        "first step, relative to the true mean. Of torch's: our total divided by that of torch's corresponding hook, of medians "
        "and below it the median over rounds."
    )
    heads = ("com-\npress", "middle", "decom-\npress", "total", "wire\nerror", "of\ntorch's")
    made = new_table("hook", *heads, title=f"a bucket of {size_words(measured.nbytes)}", caption=caption)
    for name, one in measured.hooks.items():
        low, high = one.total.quartiles
        ratio = measured.ratio(name)
        made.add_row(
            name,
            *(_ms(one.parts[part].median) if one.parts[part].median else "" for part in PARTS),
            f"{_ms(one.total.median)}\n[dim]{_ms(low)}…{_ms(high)}[/dim]",
            f"{_bytes(one.outcome.wire_bytes)}\n[dim]{one.outcome.error:.1e}[/dim]",
            "" if ratio is None else ratio.cell(2),
        )
    return made


def _ms(seconds: float) -> str:
    """
    >>> _ms(0.0123456), _ms(0.1234), _ms(12e-6)
    ('12.3', '123', '0.012')
    """
    value = seconds * 1e3
    return f"{value:.{3 - sum(value >= limit for limit in (1, 10, 100))}f}"


def _bytes(count: float) -> str:
    """
    >>> _bytes(26214400), _bytes(2104)
    ('26.2 MB', '2.1 kB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def lines(measured: Sequence[Measured]) -> list[str]:
    """The ratios to torch's hooks, as sentences."""
    said = []
    for one in measured:
        for name, peer in PEERS.items():
            ratio = one.ratio(name) if name in one.hooks else None
            if ratio is not None:
                said.append(
                    f"{size_words(one.nbytes)}: {name} computes {ratio.of_medians:.2f} times as long as {peer}."
                )
    return said


def as_json(facts: Mapping[str, str], measured: Sequence[Measured]) -> dict[str, Any]:
    """All figures as plain data, in microseconds, with every round."""
    return {
        "benchmark": "hooks",
        "facts": dict(facts),
        "sizes": [
            {"bytes": one.nbytes, "hooks": {name: _as_json(one, name) for name in one.hooks}} for one in measured
        ],
    }


def _as_json(measured: Measured, name: str) -> dict[str, Any]:
    one, ratio = measured.hooks[name], measured.ratio(name)
    times = {**one.parts, "total": one.total}
    return {
        **{part: series.as_json("us", 1e6) for part, series in times.items()},
        "wire_bytes": one.outcome.wire_bytes,
        "error": one.outcome.error,
        "ratio_to_torch": None if ratio is None else ratio.as_json(),
    }
