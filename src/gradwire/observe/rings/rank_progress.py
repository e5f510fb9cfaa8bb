"""How far each rank has come: a rank's records, folded into what a hang report, a live view and a person need to know. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from gradwire.observe.rings.ring import COLLECTIVES, Record
from gradwire.observe.stragglers.steps import MANY_LOST, Phase, StepFolder
from gradwire.recorder.format import RecordKind

_KEPT_DURATIONS = 100
_KEPT_RECORDS = 20
_KEPT_WARNINGS = 20
_KEPT_FAILED = 20
_KEPT_SUBMITTED = 100
_KEPT_MESSAGES = 1000
_KEPT_FORWARDS = 20

Operation = tuple[int, int, int]
"""Identity of the group, rank in it (threads of one process may be several), and sequence number."""


@dataclass
class RankProgress:
    """What is known of one rank."""

    rank: int
    header: Mapping[str, Any]
    groups: dict[int, dict[int, int]] = field(default_factory=dict)
    """By the identity of a group: this rank's number in it, or those of the threads of this process, and its size; 0 if that is not
    known."""
    reached: dict[tuple[int, int], Record] = field(default_factory=dict)
    """By group and rank in it: the last collective that was submitted, or finished without having been seen before."""
    submitted: dict[tuple[int, int], deque[Record]] = field(default_factory=dict)
    """By group and rank in it: the submissions of the last collectives."""
    messages: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_MESSAGES))
    """The last sends and receives that were submitted, or finished without having been seen before."""
    pending: dict[Operation, Record] = field(default_factory=dict)
    """Operations that were submitted and have not finished."""
    waited: dict[Operation, int] = field(default_factory=dict)
    """Since when a caller waits for a pending operation. Others run in the background."""
    failed: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_FAILED))
    """The submissions of operations that have failed."""
    full: dict[tuple[int, int, int], Record] = field(default_factory=dict)
    """By group, model and bucket: when it was full last."""
    durations: dict[tuple[int, str], deque[int]] = field(default_factory=dict)
    """By group and operation: how long the last ones took."""
    last: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_RECORDS))
    """The last records."""
    warnings: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_WARNINGS))
    """The last warnings."""
    step: int = -1
    """The step that it is in, or was in last."""
    folder: StepFolder = field(default_factory=StepFolder)
    """The times of its last steps."""
    forwards: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_FORWARDS))
    """When its last forwards began."""
    last_collective: Record | None = None
    """The last record of a collective."""
    descriptions: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """What records refer to: see `FlightRecorder.describe`."""

    def update(self, records: Iterable[Record], before: Iterable[Record] = ()) -> None:
        """Take new records into account. `before` is what matters of others before them: see `unfinished_rows`."""
        skipped = False
        for record in before:
            skipped = True
            self._add(record)
        if skipped:
            self.folder.forget_unfinished()
        for record in records:
            if self.last and not skipped and record.number - self.last[-1].number > MANY_LOST:
                self._forget_unfinished()
            skipped = False
            self.last.append(record)
            self.folder.add(record)
            self._add(record)

    def _add(self, record: Record) -> None:
        kind = record.kind
        if record.step > self.step and kind is not RecordKind.WARNING:  # which may be about another step
            self.step = record.step
        if kind is RecordKind.GROUP:
            self.groups.setdefault(record.group_id, {})[record.rank] = record.nbytes
            return
        if record.group_id and record.rank not in self.groups.get(record.group_id, ()):
            # In a long run the record of the group itself was overwritten.
            self.groups.setdefault(record.group_id, {})[record.rank] = 0
        if kind in COLLECTIVES:
            self._update_collective(record)
        elif kind is RecordKind.BUCKET_FULL:
            self.full[record.group_id, record.model, record.bucket] = record
        elif kind is RecordKind.FORWARD_BEGAN:
            self.forwards.append(record.time)
        elif kind is RecordKind.WARNING:
            self.warnings.append(record)

    @property
    def usual_step(self) -> float:
        """The median time between two forwards, in seconds; 0 if that is not known."""
        times = list(self.forwards)
        return median(b - a for a, b in pairwise(times)) / 1e9 if len(times) > 1 else 0.0

    @property
    def phase(self) -> Phase | None:
        """What it does in the step, if it trains a model."""
        return self.folder.tracker.phase

    @property
    def phase_since(self) -> int:
        """When the phase began."""
        return self.folder.tracker.start

    def _update_collective(self, record: Record) -> None:
        kind, key = record.kind, (record.group_id, record.rank, record.seq)
        self.last_collective = record
        if kind is RecordKind.COLLECTIVE_SUBMITTED:
            self.pending[key] = record
            self._reach(record)
        elif kind is RecordKind.COLLECTIVE_WAITED:
            self.waited.setdefault(key, record.time)
        elif kind in (RecordKind.COLLECTIVE_FINISHED, RecordKind.COLLECTIVE_FAILED):
            submitted = self.pending.pop(key, record)
            self.waited.pop(key, None)
            if submitted is record:
                self._reach(record)
            if kind is RecordKind.COLLECTIVE_FAILED:
                self.failed.append(submitted)
            else:
                of_this = self.durations.setdefault((record.group_id, record.op), deque(maxlen=_KEPT_DURATIONS))
                of_this.append(record.duration)

    def _forget_unfinished(self) -> None:
        """Records were overwritten before they were read: of what was in flight, nobody knows whether it has finished."""
        self.pending.clear()
        self.waited.clear()
        self.folder.forget_unfinished()

    def _reach(self, record: Record) -> None:
        member = record.group_id, record.rank
        if record.peer >= 0:
            self.messages.append(record)
        known = self.reached.get(member)
        if record.ordinal and (known is None or record.ordinal > known.ordinal):
            self.reached[member] = record
            self.submitted.setdefault(member, deque(maxlen=_KEPT_SUBMITTED)).append(record)

    def usual_duration(self, record: Record) -> float:
        """The median of what operations like this one took here lately, in seconds; 0 if there were none."""
        durations = self.durations.get((record.group_id, record.op))
        return median(durations) / 1e9 if durations else 0.0

    def waiting_in(self, number: int | None = None) -> tuple[Record, int] | None:
        """The operation that a caller has waited for longest, and since when; of threads, that of rank `number`."""
        alone = number is None or all(len(numbers) < 2 for numbers in self.groups.values())
        found = min(
            ((since, key) for key, since in self.waited.items() if key in self.pending and (alone or key[1] == number)),
            default=None,
        )
        return None if found is None else (self.pending[found[1]], found[0])

    def missing_bucket(self, group_id: int, model: int) -> int:
        """The first bucket of a model's step that is not full here; -1 where nothing is known of its buckets."""
        buckets = sorted(key[2] for key in self.full if key[:2] == (group_id, model))
        began = self.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.EXPOSED)
        for bucket in buckets:
            step = self.full[group_id, model, bucket].step
            if step < self.step or (step == self.step and not began):
                return bucket
        return -1
