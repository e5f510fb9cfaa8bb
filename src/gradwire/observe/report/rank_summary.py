"""What a report needs to know of one rank: a ring of 65,536 records, reduced to a few thousand numbers. Pure.

Note [One failure]
A collective fails with the same group and ordinal on several ranks. It lets the step fail, and other collectives of the group that
were in flight; ranks that were elsewhere fail when the group is aborted. All of that is one failure. A script that catches an error
may go on: what was submitted later has failed on its own. So has every send and receive, since each has its own peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from gradwire.observe.rings.intervals import Operation, operations
from gradwire.observe.rings.ring import Record, Ring
from gradwire.observe.run_warnings import warning_records
from gradwire.observe.stragglers.steps import covered, step_times
from gradwire.observe.units import plural
from gradwire.recorder.format import RecordKind

_KEPT_DURATIONS = 10_000
_KEPT_EVENTS = 50
_ABORTED = "GroupAborted"
"""What has failed because something else has."""


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


def sent_bytes_of(op: str, nbytes: int, size: int) -> float:
    """What a rank of `size` sends in an operation of `nbytes` on average, as `collectives.op.sent_bytes` counts.

    >>> sent_bytes_of("all_reduce", 400, 4)
    600.0
    """
    others = (size - 1) / size
    factors = {
        "all_reduce": 2 * others,
        "all_gather": size - 1,
        "all_gather_into_tensor": size - 1,
        "send": 1,
        "recv": 0,
    }
    return nbytes * factors.get(op, others)


class StepWire(NamedTuple):
    """The collectives of the buckets of one step."""

    busy: int
    """Nanoseconds in which at least one was in flight."""
    nbytes: int
    calls: int


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
        self.failures = list(ring.of_kind(RecordKind.COLLECTIVE_FAILED, RecordKind.STEP_FAILED))[-_KEPT_EVENTS:]
        self.warnings = warning_records(ring)
        """What checks have found, the first and the last."""
        self.member = str(ring.header.get("member", ""))
        """The id of the process in an elastic run."""
        self.marks = list(ring.of_kind(RecordKind.VIEW, RecordKind.STEP_COMMITTED))
        """When it has entered views of such a run, and committed steps."""
        self.pending: list[Operation] = []
        """Operations that have not finished."""
        self.traffic: dict[TrafficKey, Traffic] = {}
        self.sent = 0.0
        """Bytes that were sent in `steps`."""
        sizes = {one["id"]: one["size"] for one in ring.descriptions.get("group", [])}
        in_step: dict[int, list[Operation]] = {}
        hooks = {(r.step, r.bucket): r.label for r in ring.of_kind(RecordKind.BUCKET_LAUNCHED)}
        for operation in operations(records):
            if operation.ended is None:
                self.pending.append(operation)
            elif not operation.error:
                record, duration = operation.record, operation.ended - operation.submitted
                hook = hooks.get((record.step, record.bucket), "") if record.bucket >= 0 else ""
                group = "all views" if self.member and record.group.startswith("view ") else record.group
                key = TrafficKey(hook, record.op, group)
                self.traffic.setdefault(key, Traffic()).add(1, record.nbytes, [duration])
                if self.steps and self.steps[0].start < operation.ended <= self.steps[-1].end:
                    self.sent += sent_bytes_of(
                        record.op, record.nbytes, sizes.get(record.group_id, self.header["size"])
                    )
                if hook:
                    in_step.setdefault(record.step, []).append(operation)
        self.wire = {step: _wire(found) for step, found in in_step.items()}
        """By step: what was sent for its buckets."""

    @property
    def ended(self) -> bool:
        """Whether the rank has stopped its recorder, as programs do that end by themselves."""
        return bool(self.descriptions.get("end"))

    def wall_time(self, time: int) -> float:
        """A time of this rank as seconds since 1970."""
        return float(self.header["started_wall"] + time - self.header["started"]) / 1e9


def _wire(found: Sequence[Operation]) -> StepWire:
    busy = covered([(one.submitted, one.ended or one.submitted) for one in found])
    return StepWire(busy, sum(one.record.nbytes for one in found), len(found))


def total_traffic(ranks: Sequence[RankSummary]) -> dict[TrafficKey, Traffic]:
    """The operations of all ranks, added up."""
    total: dict[TrafficKey, Traffic] = {}
    for rank in ranks:
        for key, one in rank.traffic.items():
            total.setdefault(key, Traffic()).add(one.calls, one.nbytes, one.durations)
    return total


class FailedRecord(NamedTuple):
    """Where something has failed, and when, in seconds since 1970."""

    time: float
    rank: int
    record: Record


@dataclass(slots=True)
class RunFailure:
    """Something that has failed on one rank or on several."""

    places: list[FailedRecord] = field(default_factory=list)
    others: int = 0
    """How many other operations have failed with it."""

    @property
    def first(self) -> FailedRecord:
        """The first, and of these one that is not just about an abort by another rank."""
        return min(self.places, key=lambda place: (error_name(place.record) == _ABORTED, place.time))

    @property
    def ranks(self) -> list[int]:
        """Where it has failed."""
        return sorted({place.rank for place in self.places})

    @property
    def steps(self) -> list[int]:
        """In which steps, as far as it is known."""
        return sorted({place.record.step for place in self.places if place.record.step >= 0})

    @property
    def detail(self) -> str:
        """The text of the error, and what else has failed with it."""
        others = f" {plural(self.others, 'other operation')} in flight failed with it." if self.others else ""
        return f"{self.first.record.label}{others}"


def error_name(record: Record) -> str:
    """The class of the error that a record of a failure holds."""
    return record.label.partition(":")[0]


def find_failures(ranks: Iterable[RankSummary], *, left_out: Container[str] = ()) -> list[RunFailure]:
    """What has failed, in the order of time, except errors of the classes `left_out`. See Note [One failure]."""
    found: dict[object, RunFailure] = {}
    for rank in ranks:
        own: dict[tuple[int, int], tuple[Record, RunFailure]] = {}
        """By group and rank in it: the last collective that has failed by itself."""
        for record in rank.failures:
            if error_name(record) in left_out:
                continue
            place = FailedRecord(rank.wall_time(record.time), rank.rank, record)
            known = own.get((record.group_id, record.rank))
            if known is not None and _has_failed_with(record, known[0]):
                if record.kind is RecordKind.STEP_FAILED:
                    known[1].places.append(place)
                else:
                    known[1].others += 1
                continue
            failure = found.setdefault(_identity(rank.rank, record), RunFailure())
            failure.places.append(place)
            if record.kind is RecordKind.COLLECTIVE_FAILED:
                own[record.group_id, record.rank] = record, failure
    return _with_aborted(sorted(found.values(), key=lambda failure: failure.first.time))


def _identity(rank: int, record: Record) -> object:
    """What the records of one failure have in common on all ranks."""
    if record.kind is RecordKind.STEP_FAILED:
        return error_name(record), record.group_id, record.model, record.step
    return (record.group_id, record.ordinal) if record.ordinal else (rank, record.group_id, record.rank, record.seq)


def _has_failed_with(record: Record, first: Record) -> bool:
    """Whether it was in flight when the first failed on the same rank, or is the step in which that was."""
    if record.kind is RecordKind.STEP_FAILED:
        return record.label == first.label
    alone = not record.ordinal and error_name(record) != _ABORTED  # a send or a receive
    return not alone and record.time - record.duration < first.time


def _with_aborted(failures: list[RunFailure]) -> list[RunFailure]:
    """With those that are only about an abort added to the failure before them in the same group, which has caused it."""
    causes = [one for one in failures if error_name(one.first.record) != _ABORTED]
    kept = list(causes)
    for failure in failures:
        if failure not in causes:
            group = failure.first.record.group_id
            cause = [one for one in causes if any(place.record.group_id == group for place in one.places)]
            if cause:
                cause[-1].places += failure.places
                cause[-1].others += failure.others
            else:
                kept.append(failure)
    return sorted(kept, key=lambda failure: failure.first.time)
