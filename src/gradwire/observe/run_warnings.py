"""The warnings of a run: what checks have found, from the records of all ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradwire.observe.rings.ring import Record, Ring
from gradwire.observe.units import ranks as ranks_text
from gradwire.recorder.format import RecordKind

_STEP = re.compile(r"\bstep \d+")
RankWarnings = tuple[int, Mapping[str, Any], Iterable[Record]]
"""A rank, the header of its ring, and its records of warnings."""


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
    again: int = 0
    """How many times more it was recorded, in later steps."""
    last_step: int = -1
    """The last of these."""

    @property
    def repeats(self) -> str:
        """In words: in which steps it was recorded again; empty if it was not."""
        if self.again > 1:
            return f"and {self.again} times more, up to step {self.last_step}"
        return f"and in step {self.last_step}" if self.again else ""

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step >= 0 else ""
        repeats = f"{self.repeats}, " if self.again else ""
        return f"{self.text} ({step}{repeats}recorded by {ranks_text(self.ranks)})"


def read_warnings(rings: Sequence[Ring]) -> list[RunWarning]:
    """The warnings of a run, oldest first. What several ranks have recorded in the same step is one warning."""
    return merge_warnings((ring.rank, ring.header, warning_records(ring)) for ring in rings)


def warning_records(ring: Ring) -> list[Record]:
    """The warnings of a rank, oldest first: those in its ring, and its first ones, which outlive their records."""
    recorded = list(ring.of_kind(RecordKind.WARNING))
    known = {(record.label, record.step) for record in recorded}
    lost = [
        Record(-1, facts["time"], RecordKind.WARNING, "", 0, 0, "", facts["text"], 0, 0, 0, 0, facts["step"], -1)
        for facts in ring.descriptions.get("warning", [])
        if (facts["text"], facts["step"]) not in known
    ]
    return sorted([*lost, *recorded], key=lambda record: record.time)


def merge_warnings(ranks: Iterable[RankWarnings]) -> list[RunWarning]:
    """As `read_warnings`, from the records of each rank."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for rank, header, records in ranks:
        for record in records:
            time = (header["started_wall"] + record.time - header["started"]) / 1e9
            times = found.setdefault((record.label, record.step), {})
            times[rank] = min(time, times.get(rank, time))
    merged = [
        RunWarning(text, tuple(sorted(times)), step, min(times.values())) for (text, step), times in found.items()
    ]
    return sorted(merged, key=lambda warning: warning.time)


def fold_repeated(warnings: Iterable[RunWarning]) -> list[RunWarning]:
    """Those that differ in the step alone as one: once a parameter is NaN, every step's gradients are."""
    found: dict[object, RunWarning] = {}
    for warning in warnings:
        what = warning if warning.step < 0 else (_STEP.sub("", warning.text), warning.ranks)
        first = found.setdefault(what, warning)
        if first is not warning:
            found[what] = replace(first, again=first.again + 1, last_step=warning.step)
    return list(found.values())


class FirstNonFinite(NamedTuple):
    """The first gradient of a run that was not finite."""

    step: int
    ranks: tuple[int, ...]
    """Those on which it was so in that step."""
    parameter: str
    """Of the first of these ranks."""
    nan: bool

    def __str__(self) -> str:
        what = "NaN" if self.nan else "infinite"
        return f"In step {self.step} the gradient of {self.parameter} was {what} on rank {self.ranks[0]}"


def find_nonfinite(descriptions: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> FirstNonFinite | None:
    """The first gradient that was not finite, from the `descriptions` of all ranks."""
    facts = [facts for of_rank in descriptions for facts in of_rank.get("nonfinite", [])]
    rows = sorted((one["step"], one["rank"], one["parameter"], one["nan"]) for one in facts)
    if not rows:
        return None
    step, _, parameter, nan = rows[0]
    return FirstNonFinite(step, tuple(rank for at, rank, *_ in rows if at == step), parameter, nan)
