"""What a report needs to know of one rank: a ring of 65,536 records, reduced to a few thousand numbers. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from gradwire.observe.rings.intervals import Operation, operations
from gradwire.observe.rings.ring import Record, Ring
from gradwire.observe.run_warnings import warning_records
from gradwire.observe.stragglers.steps import StepTimes, step_times
from gradwire.recorder.format import RecordKind
from gradwire.runtime.host import ProcessState

_KEPT_DURATIONS = 10_000
_KEPT_EVENTS = 50


class TrafficKey(NamedTuple):
    """What is added up: operations of one kind in one group, for one hook."""

    hook: str
    """"" for operations that no hook has submitted."""
    op: str
    group: str


@dataclass(slots=True)
class Traffic:
    """Operations that finished."""

    calls: int = 0
    nbytes: int = 0
    durations: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_DURATIONS))
    """Of the last ones."""

    def add(self, calls: int, nbytes: int, durations: Iterable[int]) -> None:
        """Count operations."""
        self.calls += calls
        self.nbytes += nbytes
        self.durations.extend(durations)

    @property
    def usual(self) -> float:
        """The median duration in seconds."""
        return median(self.durations) / 1e9 if self.durations else 0.0


@dataclass(slots=True)
class RankSummary:
    """One rank. Times are in nanoseconds on its host's clock."""

    rank: int
    header: dict[str, Any]
    descriptions: dict[str, list[dict[str, Any]]]
    state: ProcessState
    records: int
    lost: int
    first: int
    """The time of its first record; 0 without records."""
    last: int
    steps: list[StepTimes]
    last_step: int
    """The last step that any record names, -1 if none does."""
    traffic: dict[TrafficKey, Traffic]
    failures: list[Record]
    """Collectives and steps that failed, the last 50."""
    warnings: list[Record]
    """What checks have found, the first and the last."""
    pending: list[Operation]
    """Operations that have not finished."""

    @property
    def ended(self) -> bool:
        """Whether the rank has stopped its recorder, as programs do that end by themselves."""
        return bool(self.descriptions.get("end"))

    def wall_time(self, time: int) -> float:
        """A time of this rank as seconds since 1970."""
        return float(self.header["started_wall"] + time - self.header["started"]) / 1e9


def summarize(ring: Ring) -> RankSummary:
    """Reduce a ring to what a report shows."""
    records = ring.records
    hooks = {(r.step, r.bucket): r.label for r in ring.of_kind(RecordKind.BUCKET_LAUNCHED)}
    traffic: dict[TrafficKey, Traffic] = {}
    pending = []
    for operation in operations(records):
        if operation.ended is None:
            pending.append(operation)
        elif not operation.error:
            record, duration = operation.record, operation.ended - operation.submitted
            hook = hooks.get((record.step, record.bucket), "") if record.bucket >= 0 else ""
            traffic.setdefault(TrafficKey(hook, record.op, record.group), Traffic()).add(1, record.nbytes, [duration])
    return RankSummary(
        rank=ring.rank,
        header=ring.header,
        descriptions=ring.descriptions,
        state=ring.state,
        records=len(records),
        lost=ring.lost,
        first=min((r.time for r in records), default=0),
        last=max((r.time for r in records), default=0),
        steps=step_times(records),
        last_step=max((r.step for r in records), default=-1),
        traffic=traffic,
        failures=list(ring.of_kind(RecordKind.COLLECTIVE_FAILED, RecordKind.STEP_FAILED))[-_KEPT_EVENTS:],
        warnings=warning_records(ring),
        pending=pending,
    )


def total_traffic(ranks: Sequence[RankSummary]) -> dict[TrafficKey, Traffic]:
    """The operations of all ranks, added up."""
    total: dict[TrafficKey, Traffic] = {}
    for rank in ranks:
        for key, one in rank.traffic.items():
            total.setdefault(key, Traffic()).add(one.calls, one.nbytes, one.durations)
    return total
