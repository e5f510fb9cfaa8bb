"""How far each rank has come: a rank's records, folded into what a hang report, a live view and a person need to know. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from gradwire.observe.rings.ring import COLLECTIVES, Record
from gradwire.observe.stragglers.steps import MANY_LOST, Phase, StepFolder
from gradwire.recorder.format import RecordKind

Operation = tuple[int, int, int]
"""Identity of the group, rank in it (threads of one process may be several), and sequence number."""


class RankProgress:
    """What is known of one rank."""

    def __init__(
        self,
        rank: int,
        header: Mapping[str, Any],
        descriptions: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        self.rank, self.header = rank, header
        self.descriptions = {} if descriptions is None else descriptions
        """What records refer to, as far as it was read: see `FlightRecorder.describe`."""
        self.groups: dict[int, dict[int, int]] = {}
        """By group: this rank's number in it, or those of the threads of this process, and its size; 0: not known."""
        self.submitted: dict[tuple[int, int], deque[Record]] = {}
        """By group and rank in it: the last collectives that were submitted, or finished without having been seen before."""
        self.messages: deque[Record] = deque(maxlen=1000)
        """The last sends and receives that were submitted, or finished without having been seen before."""
        self.pending: dict[Operation, Record] = {}
        """Operations that were submitted and have not finished."""
        self.waited: dict[Operation, int] = {}
        """Since when a caller waits for a pending operation. Others run in the background."""
        self.failed: deque[Record] = deque(maxlen=20)
        """The submissions of operations that have failed."""
        self.full: dict[tuple[int, int, int], Record] = {}
        """By group, model and bucket: when it was full last."""
        self.durations: dict[tuple[int, str], deque[int]] = {}
        """By group and operation: how long the last ones took."""
        self.last: deque[Record] = deque(maxlen=20)
        self.warnings: deque[Record] = deque(maxlen=20)
        self.step = -1
        """The step that it is in, or was in last."""
        self.folder = StepFolder()
        """The times of its last steps."""
        self.forwards: deque[int] = deque(maxlen=20)
        self.last_collective: Record | None = None

    @property
    def member(self) -> str:
        """The id of the process in an elastic run; empty in others."""
        return str(self.header.get("member", ""))

    @property
    def ended(self) -> bool:
        """Whether the rank has stopped its recorder, as programs do that end by themselves."""
        return bool(self.descriptions.get("end"))

    def update(self, records: Iterable[Record], before: Sequence[Record] = ()) -> None:
        """Take new records into account. `before` is what matters of others before them: see `unfinished_rows`."""
        for record in before:
            self._add(record)
        if before:
            self.last.clear()
        for record in records:
            if self.last and record.number - self.last[-1].number > MANY_LOST:
                self.pending.clear()  # records were overwritten unread: it is not known whether these have finished
                self.waited.clear()
            self.last.append(record)
            self.folder.add(record)
            self._add(record)

    def _add(self, record: Record) -> None:
        kind = record.kind
        if record.step > self.step and kind is not RecordKind.WARNING:  # which may be about another step
            self.step = record.step
        if kind in (RecordKind.GROUP, RecordKind.VIEW):
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

    def _update_collective(self, record: Record) -> None:
        kind, key = record.kind, record.operation
        self.last_collective = record
        if kind is RecordKind.COLLECTIVE_SUBMITTED:
            self.pending[key] = record
            self._reach(record)
        elif kind is RecordKind.COLLECTIVE_WAITED:
            self.waited.setdefault(key, record.time)
        elif kind is not RecordKind.COLLECTIVE_STARTED:
            submitted = self.pending.pop(key, record)
            self.waited.pop(key, None)
            if submitted is record:
                self._reach(record)
            if kind is RecordKind.COLLECTIVE_FAILED:
                self.failed.append(submitted)
            else:
                of_this = self.durations.setdefault((record.group_id, record.op), deque(maxlen=100))
                of_this.append(record.duration)

    def _reach(self, record: Record) -> None:
        if record.peer >= 0:
            self.messages.append(record)
        if record.ordinal > self.reached(record.group_id, record.rank):
            self.submitted.setdefault((record.group_id, record.rank), deque(maxlen=100)).append(record)

    def reached(self, group_id: int, number: int) -> int:
        """The ordinal of the last collective that was submitted by a rank of a group; 0 if there was none."""
        submitted = self.submitted.get((group_id, number))
        return submitted[-1].ordinal if submitted else 0

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
