"""How far each rank has come: a rank's records, folded into what a hang report, a live view and a person need to know. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gradwire.flight_recorder import RecordKind
from gradwire.observe.ring import Record
from gradwire.observe.step_times import StepFolder

_KEPT_DURATIONS = 100
_KEPT_RECORDS = 20
_KEPT_WARNINGS = 20


@dataclass
class RankProgress:
    """What is known of one rank."""

    rank: int
    header: Mapping[str, Any]
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the name of a group: this rank's number in it, and its size, or 0 if that is not known."""
    reached: dict[str, Record] = field(default_factory=dict)
    """By group: the last collective that was submitted, or finished without having been seen before."""
    pending: dict[tuple[str, int, int], Record] = field(default_factory=dict)
    """By group, rank in it (threads of one process may be several) and sequence number: operations that were submitted and have
    not finished."""
    durations: dict[tuple[str, str], deque[int]] = field(default_factory=dict)
    """By group and operation: how long the last ones took."""
    last: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_RECORDS))
    """The last records."""
    warnings: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_WARNINGS))
    """The last warnings."""
    step: int = -1
    """The step that it is in, or was in last."""
    folder: StepFolder = field(default_factory=StepFolder)
    """The times of its last steps."""

    def update(self, records: Iterable[Record]) -> None:
        """Take new records into account."""
        for record in records:
            self.last.append(record)
            self.folder.add(record)
            self.step = max(self.step, record.step)
            kind, key = record.kind, (record.group, record.rank, record.seq)
            if kind is RecordKind.GROUP:
                self._forget(record.group)  # one of the same name was closed: the new one counts from 1 again
                self.groups[record.group] = record.rank, record.nbytes
            elif record.group:  # in a long run the record of the group itself was overwritten
                self.groups.setdefault(record.group, (record.rank, 0))
            if kind is RecordKind.WARNING:
                self.warnings.append(record)
            if kind is RecordKind.GROUP:
                continue
            if kind is RecordKind.COLLECTIVE_SUBMITTED:
                self.pending[key] = record
                self._reach(record)
            elif kind in (RecordKind.COLLECTIVE_FINISHED, RecordKind.COLLECTIVE_FAILED):
                self.pending.pop(key, None)
                self._reach(record)
                if kind is RecordKind.COLLECTIVE_FINISHED:
                    of_this = self.durations.setdefault((record.group, record.op), deque(maxlen=_KEPT_DURATIONS))
                    of_this.append(record.duration)

    def _forget(self, group: str) -> None:
        self.reached.pop(group, None)
        for key in [key for key in self.pending if key[0] == group]:
            del self.pending[key]

    def _reach(self, record: Record) -> None:
        known = self.reached.get(record.group)
        if record.ordinal and (known is None or record.ordinal > known.ordinal):
            self.reached[record.group] = record

    def usual_duration(self, record: Record) -> float:
        """The median of what operations like this one took here lately, in seconds; 0 if there were none."""
        durations = self.durations.get((record.group, record.op))
        return median(durations) / 1e9 if durations else 0.0

    def oldest_pending(self) -> Record | None:
        """The operation that has been under way for longest."""
        return min(self.pending.values(), key=lambda record: record.time, default=None)
