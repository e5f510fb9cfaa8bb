"""Where the time of a step went: data, forward, backward, waiting for averages, optimizer. From the records of one rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gradwire.flight_recorder import RecordKind
from gradwire.observe.ring import Record


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


_AFTER: dict[RecordKind, Phase | None] = {
    RecordKind.FORWARD_BEGAN: Phase.FORWARD,
    RecordKind.FORWARD_ENDED: Phase.BACKWARD,
    RecordKind.BACKWARD_ENDED: Phase.EXPOSED,
    RecordKind.STEP_ENDED: Phase.DATA,
    RecordKind.STEP_FAILED: Phase.DATA,
    RecordKind.OPTIMIZER_BEGAN: Phase.OPTIMIZER,
    RecordKind.OPTIMIZER_ENDED: Phase.DATA,
}
"""What a rank does from a record of this kind on, until the next."""


def spans(records: Iterable[Record]) -> list[Span]:
    """The phases of the steps in `records`, which are of one rank, in order. Before its first record nothing is known.

    Time after the averages are there counts as data until an optimizer begins, because nothing says what else it is.
    """
    found: list[Span] = []
    phase: Phase | None = None
    start, step, averaged = 0, 0, -1
    for record in sorted(records, key=lambda record: record.time):
        if record.kind not in _AFTER:
            continue
        if phase is not None and record.time > start:
            found.append(Span(phase, step, start, record.time))
        phase, start = _AFTER[record.kind], record.time
        if record.step >= 0:
            step = averaged = record.step
        elif record.kind is RecordKind.OPTIMIZER_ENDED:
            step = averaged + 1  # data for the next step
    return found
