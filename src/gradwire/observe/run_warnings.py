"""The warnings of a run: what checks have found, from the records of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.flight_recorder import RecordKind
from gradwire.observe.ring import Record, Ring

Finding = tuple[str, int, int]
"""The text, the step, and the time on the rank's clock."""
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
    """The warnings of a run, oldest first. What several ranks have recorded in the same step is one warning.

    The first ones of a rank are kept apart from its records, so they are there also if their records were overwritten.
    """
    return _merge((ring.rank, ring.header, [*_described(ring), *_recorded(ring.records)]) for ring in rings)


def merge_warnings(ranks: Iterable[RankWarnings]) -> list[RunWarning]:
    """As `read_warnings`, from the records of each rank."""
    return _merge((rank, header, _recorded(records)) for rank, header, records in ranks)


def _recorded(records: Iterable[Record]) -> list[Finding]:
    return [(r.label, r.step, r.time) for r in records if r.kind is RecordKind.WARNING]


def _described(ring: Ring) -> list[Finding]:
    found = ring.descriptions.get("warning", [])
    return [(str(f["text"]), int(f["step"]), int(f["time"])) for f in found if f.keys() >= {"text", "step", "time"}]


def _merge(ranks: Iterable[tuple[int, Mapping[str, Any], Iterable[Finding]]]) -> list[RunWarning]:
    found: dict[tuple[str, int], dict[int, float]] = {}
    for rank, header, findings in ranks:
        for text, step, time in findings:
            seconds = (header["started_wall"] + time - header["started"]) / 1e9
            times = found.setdefault((text, step), {})
            times[rank] = min(seconds, times.get(rank, seconds))
    merged = [
        RunWarning(text, tuple(sorted(times)), step, min(times.values())) for (text, step), times in found.items()
    ]
    return sorted(merged, key=lambda warning: warning.time)
