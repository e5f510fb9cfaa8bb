"""What a report needs to know of one rank: a ring of 65,536 records, reduced to a few thousand numbers. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from gradwire.observe.rings.intervals import Operation, operations
from gradwire.observe.rings.ring import Ring
from gradwire.observe.run_warnings import warning_records
from gradwire.observe.stragglers.steps import step_times
from gradwire.recorder.format import RecordKind

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


class RankSummary:
    """What a report shows of one rank. Times are in nanoseconds on its host's clock."""

    def __init__(self, ring: Ring) -> None:
        records = ring.records
        self.rank = ring.rank
        self.header, self.descriptions = ring.header, ring.descriptions
        self.state = ring.state
        self.records, self.lost = len(records), ring.lost
        self.first = min((record.time for record in records), default=0)
        self.last = max((record.time for record in records), default=0)
        self.steps = step_times(records)
        self.last_step = max((record.step for record in records), default=-1)
        """The last step that any record names, -1 if none does."""
        failed = RecordKind.COLLECTIVE_FAILED, RecordKind.STEP_FAILED
        self.failures = list(ring.of_kind(*failed))[-_KEPT_EVENTS:]
        self.warnings = warning_records(ring)
        """What checks have found, the first and the last."""
        self.pending: list[Operation] = []
        """Operations that have not finished."""
        self.traffic: dict[TrafficKey, Traffic] = {}
        hooks = {(r.step, r.bucket): r.label for r in ring.of_kind(RecordKind.BUCKET_LAUNCHED)}
        for operation in operations(records):
            if operation.ended is None:
                self.pending.append(operation)
            elif not operation.error:
                record, duration = operation.record, operation.ended - operation.submitted
                hook = hooks.get((record.step, record.bucket), "") if record.bucket >= 0 else ""
                key = TrafficKey(hook, record.op, record.group)
                self.traffic.setdefault(key, Traffic()).add(1, record.nbytes, [duration])

    @property
    def ended(self) -> bool:
        """Whether the rank has stopped its recorder, as programs do that end by themselves."""
        return bool(self.descriptions.get("end"))

    def wall_time(self, time: int) -> float:
        """A time of this rank as seconds since 1970."""
        return float(self.header["started_wall"] + time - self.header["started"]) / 1e9


def total_traffic(ranks: Sequence[RankSummary]) -> dict[TrafficKey, Traffic]:
    """The operations of all ranks, added up."""
    total: dict[TrafficKey, Traffic] = {}
    for rank in ranks:
        for key, one in rank.traffic.items():
            total.setdefault(key, Traffic()).add(one.calls, one.nbytes, one.durations)
    return total
