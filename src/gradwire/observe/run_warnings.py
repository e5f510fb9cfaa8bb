"""The warnings of a run: what checks have found, from the records of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.flight_recorder import RecordKind
from gradwire.observe.ring import Record, Ring

RankWarnings = tuple[int, Mapping[str, Any], Iterable[Record]]
"""A rank, the header of its ring, and its records, or the warnings among them."""


@dataclass(frozen=True, slots=True)
class RunWarning:
    """What a check has found."""

    text: str
    ranks: tuple[int, ...]
    """The ranks that have recorded it, in the world."""
    step: int
    """-1: none."""
    time: float
    """When the first of them did, in seconds since 1970."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        step = f"step {self.step}, " if self.step >= 0 else ""
        return f"{self.text} ({step}recorded by rank{'s' if len(self.ranks) > 1 else ''} {ranks})"


def read_warnings(rings: Sequence[Ring]) -> list[RunWarning]:
    """The warnings in these rings, oldest first. What several ranks have recorded in the same step is one warning."""
    return merge_warnings((ring.rank, ring.header, ring.records) for ring in rings)


def merge_warnings(ranks: Iterable[RankWarnings]) -> list[RunWarning]:
    """As `read_warnings`, from the records of each rank."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for rank, header, records in ranks:
        for record in records:
            if record.kind is RecordKind.WARNING:
                time = (header["started_wall"] + record.time - header["started"]) / 1e9
                times = found.setdefault((record.label, record.step), {})
                times[rank] = min(time, times.get(rank, time))
    merged = [
        RunWarning(text, tuple(sorted(times)), step, min(times.values())) for (text, step), times in found.items()
    ]
    return sorted(merged, key=lambda warning: warning.time)
