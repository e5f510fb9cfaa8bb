"""Where the time of a step went: data, forward, backward, waiting for averages, optimizer. From the records of one rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gradwire.observe.rings.ring import Record
from gradwire.recorder.format import RecordKind


class Phase(Enum):
    """What a rank does between two points of a step. The value is the name people read."""

    DATA = "data"
    """From the end of the optimizer's step, or of the step before, to the next forward: loading data, logging, saving."""
    FORWARD = "forward"
    BACKWARD = "backward"
    """From the end of forward to the last gradient: the loss and its backward, while buckets are reduced."""
    EXPOSED = "exposed communication"
    """After the last gradient: nothing is left to do but wait for averages."""
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a step, in nanoseconds on the rank's clock."""

    phase: Phase
    step: int
    start: int
    end: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


_AFTER: dict[RecordKind, Phase] = {
    RecordKind.FORWARD_BEGAN: Phase.FORWARD,
    RecordKind.FORWARD_ENDED: Phase.BACKWARD,
    RecordKind.BACKWARD_ENDED: Phase.EXPOSED,
    RecordKind.STEP_ENDED: Phase.DATA,
    RecordKind.STEP_FAILED: Phase.DATA,
    RecordKind.OPTIMIZER_BEGAN: Phase.OPTIMIZER,
    RecordKind.OPTIMIZER_ENDED: Phase.DATA,
}
"""What a rank does from a record of this kind on, until the next."""


class PhaseTracker:
    """The phases of one rank, record by record. Before its first record nothing is known.

    Time after the averages are there counts as data until an optimizer begins, since nothing is recorded of it.
    """

    def __init__(self) -> None:
        self.phase: Phase | None = None
        """The phase that the rank is in."""
        self.start = 0
        """When it began."""
        self._step, self._averaged = 0, -1

    @staticmethod
    def handles(kind: RecordKind) -> bool:
        """Whether records of this kind begin a phase."""
        return kind in _AFTER

    def add(self, record: Record) -> Span | None:
        """Take a record into account that begins a phase; returns the phase that it has ended, if that took any time."""
        span = None
        if self.phase is not None and record.time > self.start:
            span = Span(self.phase, self._step, self.start, record.time)
        self.phase, self.start = _AFTER[record.kind], record.time
        if record.step >= 0:
            self._step = self._averaged = record.step
        elif record.kind is RecordKind.OPTIMIZER_ENDED:
            self._step = self._averaged + 1  # data for the next step
        return span


def spans(records: Iterable[Record]) -> list[Span]:
    """The phases of the steps in `records`, which are of one rank, in order."""
    tracker = PhaseTracker()
    ended = (
        tracker.add(record)
        for record in sorted(records, key=lambda record: record.time)
        if tracker.handles(record.kind)
    )
    return [span for span in ended if span is not None]
