"""Where the time of a step went: data, forward, backward, waiting for averages, optimizer. From the records of one rank. Pure.

Note [Own time]
A slow rank makes the steps of all ranks long. To find it, time that a rank waits must not count as its own. After its last
gradient a rank only waits. Before that it waits in collectives of buffers and of user code, from the record of the wait, or from
the submission if the collective was over when it returned; and in collectives of buckets only if they finish while the bucket is
being launched. Waits of other threads, such as those that run hooks, do not keep the rank from computing.

Note [torch's DDP]
It waits for averages at the end of its backward, and nothing records when the last gradient was there, unless its buckets go
through a hook of ours. So a step ends with the optimizer's step, its backward includes the wait, and what is known of when the rank
was ready is when its forward had ended.
"""

from __future__ import annotations

from collections import deque
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

    __hash__ = object.__hash__  # Enum's own is written in Python, and reports look phases up by the million


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
    """The phases of one rank, record by record. Time after the averages are there counts as data until an optimizer begins."""

    def __init__(self) -> None:
        self.phase: Phase | None = None
        """The phase that the rank is in; None before its first record."""
        self.start = 0
        self._step, self._averaged = 0, -1

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
    begins = sorted((record for record in records if record.kind in _AFTER), key=lambda record: record.time)
    return [span for record in begins if (span := tracker.add(record)) is not None]


_MOST_WAITS = 1024
MANY_LOST = 16
"""So many records in a row have been overwritten unread; fewer were never written, which happens: see recorder/writer.py."""
COMPUTE = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""The phases in which a rank works on its own."""


@dataclass(slots=True)
class StepTimes:
    """One step of one rank, from the end of the step before to its own end. Times are in nanoseconds on the rank's clock."""

    step: int
    start: int
    end: int
    phases: dict[Phase, int]
    """How long each phase took. Waiting counts as exposed communication, whatever the phase: see Note [Own time]."""
    ready: dict[int, int]
    """By bucket: when all its gradients were there."""
    nbytes: int = 0
    """Bytes of the collectives that finished."""
    group_id: int = 0
    """The group whose ranks took part."""
    samples: int = 0
    """What the script has counted with `observe.samples`."""
    backward_waits: bool = False
    """Whether its backward includes the wait for averages: see Note [torch's DDP]."""

    def spend(self, phase: Phase, time: int) -> None:
        """Count time of a phase."""
        self.phases[phase] = self.phases.get(phase, 0) + time

    def join(self, before: StepTimes) -> None:
        """Add what was done for another model in the same step, before this one."""
        self.start, self.ready = before.start, {**before.ready, **self.ready}
        for phase, time in before.phases.items():
            self.spend(phase, time)
        self.nbytes += before.nbytes
        self.samples += before.samples
        self.backward_waits |= before.backward_waits

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return (self.end - self.start) / 1e9

    @property
    def last_ready(self) -> int:
        """When this rank's last bucket was ready: other ranks may have waited for it until then."""
        return max(self.ready.values(), default=self.end)

    def share(self, phase: Phase) -> float:
        """Seconds in a phase."""
        return self.phases.get(phase, 0) / 1e9

    @property
    def exposed(self) -> float:
        """Seconds in which the rank only waited."""
        return self.share(Phase.EXPOSED)

    @property
    def compute(self) -> float:
        """Seconds in which the rank did not wait."""
        return sum(self.phases.get(phase, 0) for phase in COMPUTE) / 1e9


class StepFolder:
    """Folds the records of one rank, in the order in which they were written, into the times of its steps. The first step is
    left out, since nothing tells when it began, and so are steps that failed and those that follow them."""

    def __init__(self, kept: int = 256) -> None:
        self.steps: deque[StepTimes] = deque(maxlen=kept)
        """The last steps, oldest first."""
        self.tracker = PhaseTracker()
        """The phase that the rank is in."""
        self._number = 0
        """Of the last record."""
        self._waits: list[tuple[int, int]] = []
        self._pending: dict[tuple[int, int, int], int | None] = {}
        """By collective in flight: since when the rank has waited for it. None: it does not wait."""
        self._threads: set[int] = set()
        """Those that compute, by the records of phases."""
        self._ranks: dict[int, int] = {}
        self.is_shared = False
        """Whether several ranks write this ring, as threads of one process: their phases cannot be separated."""
        self._launch_start: int | None = None
        self._torch_forward: Record | None = None
        """The forward of torch's DDP in this step."""
        self._begin(None)

    def add(self, record: Record) -> None:
        """Take the next record of a ring into account."""
        if record.number - self._number > MANY_LOST:
            self._forget_unfinished()
        self._number = record.number
        self.fold(record)

    def fold(self, record: Record) -> None:
        """Take a record into account, also if those before it in the ring are of other threads."""
        kind, time = record.kind, record.time
        if kind is RecordKind.COLLECTIVE_SUBMITTED:
            self._pending[record.operation] = None
        elif kind is RecordKind.COLLECTIVE_WAITED:
            if record.bucket < 0 and record.thread in self._threads:
                self._pending[record.operation] = time
        elif kind is RecordKind.COLLECTIVE_FINISHED:
            self._now.nbytes += record.nbytes
            self._collective_finished(record)
        elif kind is RecordKind.COLLECTIVE_FAILED:
            self._pending.pop(record.operation, None)
        elif kind is RecordKind.BUCKET_FULL:
            self._now.ready[record.bucket] = self._launch_start = time
        elif kind is RecordKind.SAMPLES:
            self._now.samples += record.nbytes
        elif kind is RecordKind.BUCKET_LAUNCHED:
            self._launch_start = None
        else:
            self._phase_record(record)

    def _forget_unfinished(self) -> None:
        """Records are missing from here on: leave out the step that they belong to."""
        self._pending.clear()
        self._waits.clear()
        self.tracker = PhaseTracker()
        self._begin(None)

    def _collective_finished(self, record: Record) -> None:
        """Note the time in which a collective has blocked the rank: see Note [Own time]."""
        submitted = record.time - record.duration
        since = self._pending.pop(record.operation, submitted)  # without a record of its submission it was over at once
        if self._launch_start is not None and submitted >= self._launch_start:
            since = submitted
        elif record.bucket >= 0:
            since = None
        if since is not None:
            self._waits.append((max(since, self.tracker.start), record.time))
            if len(self._waits) >= _MOST_WAITS:  # a phase may last forever, e.g. in a program that trains no model
                self._waits = [(record.time - covered(self._waits), record.time)]

    def _phase_record(self, record: Record) -> None:
        kind, time = record.kind, record.time
        if kind not in _AFTER:
            return
        self._threads.add(record.thread)
        if record.group_id and self._ranks.setdefault(record.group_id, record.rank) != record.rank:
            self.is_shared = True
        span = self.tracker.add(record)
        if span is not None:
            end = self._end_of_gradients(span) if kind is RecordKind.OPTIMIZER_BEGAN else span.end
            own = max(0, end - span.start - covered(self._waits))
            self._now.spend(span.phase, own)
            self._now.spend(Phase.EXPOSED, span.end - span.start - own)
        self._waits.clear()
        if kind is RecordKind.STEP_ENDED:
            self._step_ended(record, time)
        elif kind is RecordKind.STEP_FAILED:
            self._begin(None)
        elif kind is RecordKind.FORWARD_ENDED and not record.group_id:
            self._torch_forward = record
        elif kind is RecordKind.OPTIMIZER_ENDED and self._torch_forward is not None:
            self._step_ended(self._torch_forward, time)

    def _end_of_gradients(self, span: Span) -> int:
        """When the last gradient of a backward was there, whose end was not recorded: see Note [torch's DDP]."""
        if span.phase is not Phase.BACKWARD or self._torch_forward is None:
            return span.end
        if self._now.ready:
            return min(span.end, self._now.last_ready)
        self._now.ready, self._now.backward_waits = {0: span.start}, True
        return span.end

    def _step_ended(self, record: Record, end: int) -> None:
        if self._is_timed and not self.is_shared:
            now = self._now
            now.step, now.end, now.group_id = record.step, end, record.group_id
            if self.steps and self.steps[-1].step == now.step:  # two models are trained in turns
                now.join(self.steps.pop())
            self.steps.append(now)
        self._begin(end)

    def _begin(self, start: int | None) -> None:
        """A step begins; without a `start` it is left out."""
        self._is_timed = start is not None
        self._now = StepTimes(-1, start or 0, 0, {}, {})
        self._torch_forward = self._launch_start = None


def step_times(records: Iterable[Record]) -> list[StepTimes]:
    """The times of all steps in `records`, which are of one rank, in the order in which they were written."""
    folder = StepFolder(kept=1 << 20)
    for record in records:
        folder.fold(record)
    return list(folder.steps)


def covered(intervals: list[tuple[int, int]]) -> int:
    """The length of the union of intervals.

    >>> covered([(5, 9), (0, 2), (6, 7), (8, 10)])
    7
    """
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
