"""Where a run is now: figures, stragglers, the last warning. For `--stats`, `--watch` and `gradwire top`; without torch."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, median
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.hangs.analysis import find_waiting
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.views import changed, read_faults
from gradwire.observe.run_warnings import find_nonfinite, merge_warnings
from gradwire.observe.stragglers.detect import StragglerWatch, describe, medians_of_others, ready_times, slow_ranks
from gradwire.observe.stragglers.steps import Phase, StepTimes
from gradwire.observe.units import milliseconds, plural, ranks as ranks_text, size as size_text
from gradwire.runtime.host import ProcessState

_STEPS = 20
"""The number of steps that figures are means of, unless an interval is given."""
_IDLE = 5.0
"""Seconds without a step."""
_NOTICEABLE = 0.01
"""Share of a step."""
_FIGURES = ("seconds", "compute", "exposed", "nbytes")
PERIOD = 1.0
"""Seconds between two looks."""
PLAIN_INTERVAL = 10.0
"""Seconds between lines of figures instead of a live view, where there is no terminal."""
_LONG_WAIT = 1.0
"""Seconds after which a wait is worth showing."""


class Condition(Enum):
    """How a rank is. The value is the name people read."""

    ABSENT = "not recorded yet"
    """Before `gw.init()` or `observe.start()`."""
    STARTING = "no step yet"
    RUNS = "runs"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Seconds per step, and bytes of collectives per step; 0 if there were no steps."""

    step: int = -1
    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    nbytes: float = 0.0
    has_communication: bool = True
    """Whether `exposed` and `nbytes` are recorded; not of torch's own DDP."""


@dataclass(frozen=True, slots=True)
class RankStatus(StepFigures):
    """One rank: means over the last steps."""

    rank: int
    condition: Condition = Condition.ABSENT
    late: float = 0.0
    """How much later than those of the other ranks its last bucket is ready."""
    doing: str = ""
    """What it does now."""
    is_slow: bool = False
    """Whether it is a straggler."""


@dataclass(frozen=True, slots=True)
class RunStatus(StepFigures):
    """All ranks, and the run as a whole: medians over the ranks."""

    ranks: tuple[RankStatus, ...]
    samples_per_second: float = 0.0
    """0: the script does not call `observe.samples`."""
    idle: float = 0.0
    """Seconds since any rank has finished a step."""
    missing: tuple[int, ...] = ()
    """Ranks that others have waited for, for long, in a collective."""
    slowest: RankStatus | None = None
    """The rank that is last in most steps, if one is, by a noticeable time."""
    warning: str = ""
    """The last one."""
    view: str = ""
    """Of an elastic run: the present view, and what has changed with it."""
    members: str = ""
    """Of an elastic run: which process each rank is."""
    ending: str = ""
    """How the run has ended, as its launcher has saved it; empty before, and with other launchers."""

    @property
    def is_idle(self) -> bool:
        """Whether it is under way, but there was no step for so long that figures of the last ones say nothing."""
        under_way = any(rank.condition is Condition.RUNS for rank in self.ranks)
        return under_way and self.idle > max(_IDLE, 3 * self.seconds)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self.ranks) and all(rank.condition is Condition.ENDED for rank in self.ranks)

    @property
    def steps_per_second(self) -> float:
        """0: there was no step."""
        return 1 / self.seconds if self.seconds else 0.0

    @property
    def begun(self) -> int:
        """How many ranks are recorded."""
        return sum(rank.condition is not Condition.ABSENT for rank in self.ranks)


def run_status(
    known: Iterable[RankStatus],
    steps: Mapping[int, Sequence[StepTimes]],
    *,
    size: int,
    now: int,
    since: int | None = None,
) -> RunStatus:
    """The status of a run of `size` ranks at `now`: what is `known` of ranks, with figures from their `steps` that ended after
    `since`, or from the last 20. Times are in nanoseconds on the clock of the ranks."""
    recorded = {one.rank: one for one in known}
    chosen = {
        rank: list(row)[-_STEPS:] if since is None else [step for step in row if step.end > since]
        for rank, row in steps.items()
    }
    chosen = {rank: row for rank, row in chosen.items() if row}
    late, last = _lateness(chosen)
    ranks = tuple(
        replace(recorded.get(rank, RankStatus(rank)), late=late.get(rank, 0.0), **_means(chosen.get(rank, ())))
        for rank in range(max([size, *(rank + 1 for rank in recorded)]))
    )
    timed = [rank for rank in ranks if rank.seconds]
    medians: dict[str, Any] = {name: median(getattr(rank, name) for rank in timed) for name in _FIGURES if timed}
    ends = [row[-1].end for row in steps.values() if row]
    seconds = {rank: sum(one.seconds for one in row) for rank, row in chosen.items()}
    return RunStatus(
        ranks,
        step=max((rank.step for rank in ranks), default=-1),
        **medians,
        has_communication=all(rank.has_communication for rank in timed),
        samples_per_second=sum(sum(one.samples for one in chosen[rank]) / time for rank, time in seconds.items()),
        idle=(now - max(ends)) / 1e9 if ends else 0.0,
        slowest=None if last is None or ranks[last].late < _NOTICEABLE * ranks[last].seconds else ranks[last],
    )


def _means(steps: Sequence[StepTimes]) -> dict[str, Any]:
    means: dict[str, Any] = {name: fmean(getattr(one, name) for one in steps) for name in _FIGURES if steps}
    return {**means, "has_communication": not any(one.backward_waits for one in steps)}


def _lateness(chosen: Mapping[int, Sequence[StepTimes]]) -> tuple[dict[int, float], int | None]:
    """By rank: the median of how much later than the median of the others it was ready; and who was last in most steps."""
    import numpy as np  # not before: the launcher starts without it

    ready = ready_times(chosen)
    common = next(iter(ready.values()), {})
    if len(ready) < 2 or not common:
        return {}, None
    begin = min(at for row in ready.values() for at in row.values())
    table = np.array([[at - begin for at in row.values()] for row in ready.values()], np.float64)
    late = dict(zip(ready, (np.median(table - medians_of_others(table), axis=1) / 1e9).tolist(), strict=True))
    rank, times = Counter(max(ready, key=lambda rank: ready[rank][step]) for step in common).most_common(1)[0]
    return late, rank if times > len(common) / 2 else None


def stats_line(status: RunStatus) -> str:
    """The status in one line, for log files."""
    parts = _figures(status) if status.seconds else [without_figures(status)]
    ended = [rank.rank for rank in status.ranks if rank.condition in (Condition.ENDED, Condition.STOPPED)]
    if status.ending:
        parts.append(status.ending)
    elif ended and status.seconds:
        parts.append(f"{plural(len(ended), 'rank')} ended or stopped")
    if status.view:
        parts.append(status.view)
    return ", ".join(parts) + (f"; last warning: {status.warning}" if status.warning else "")


def _figures(status: RunStatus) -> list[str]:
    whole, compute, exposed = map(milliseconds, (status.seconds, status.compute, status.exposed))
    parts = [f"step {status.step}", f"{status.steps_per_second:.3g} steps/s"]
    if status.samples_per_second:
        parts.append(f"{status.samples_per_second:,.0f} samples/s")
    if status.has_communication:
        parts += [f"{whole} ms a step (compute {compute}, exposed {exposed})", f"{size_text(status.nbytes)} a step"]
    else:
        parts.append(f"{whole} ms a step")
    if status.slowest is not None:
        parts.append(f"slowest rank {status.slowest.rank} ({milliseconds(status.slowest.late)} ms late)")
    if status.begun < len(status.ranks):
        parts.append(_recorded(status))
    return parts


def without_figures(status: RunStatus) -> str:
    """Where a run is of which no step was timed lately. Of ranks that share a ring, steps are known and their times are not."""
    if status.begun < len(status.ranks) and not status.seconds:
        return _recorded(status)
    if status.idle:
        missing = f", waiting for {ranks_text(status.missing)}" if status.missing else ""
        return f"step {status.step}, no step for {status.idle:.0f} s{missing}"
    return f"step {status.step}, without step times" if status.step > 0 else "no step yet"


def _recorded(status: RunStatus) -> str:
    return f"{status.begun} of {plural(len(status.ranks), 'rank')} recorded{'' if status.ending else ' so far'}"


class RunMonitor:
    """The state of a run of `size` ranks. `stats` is the interval of lines of figures, in seconds; None: no such lines."""

    def __init__(self, run: RunFollower, *, size: int = 0, stats: float | None = None) -> None:
        self.run = run
        self.stragglers = StragglerWatch()
        self._size = size
        self._stats = stats
        self._since = time.monotonic()
        self.next_look = self._since
        """When `check_if_due` looks again, on the monotonic clock."""
        self._epoch = -1
        self._warning: tuple[float, str] = (0.0, "")
        self._last_line = self._warned = ""

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self.next_look

    def check_if_due(self) -> list[str]:
        """The lines to print now. An error ends the monitor and not the run."""
        if not self.is_due():
            return []
        try:
            return self.check()
        except Exception as error:
            self.next_look = math.inf
            return [f"the run is not watched any more: {type(error).__name__}: {error}"]

    def check(self) -> list[str]:
        """Look, and return the lines to print: stragglers, and figures if their interval is over."""
        now = time.monotonic()
        self.run.look()
        if (epoch := max((view.epoch for view in self.run.views), default=-1)) != self._epoch:
            self._epoch, self.stragglers = epoch, StragglerWatch()  # ranks have other numbers
        lines = self.stragglers.check(self.run.steps, now)
        self.note(lines)
        if self._stats is not None and now >= self._since + self._stats:
            status = self.status(since=int(self._since * 1e9))
            if status.seconds or not self._is_ending():
                lines = [*lines, *self.figures(status)]
            self._since = now
        self.next_look = min(now + PERIOD, self._since + (self._stats or math.inf))
        return lines

    def at_end(self) -> list[str]:
        """The line to print when the run has ended, if a gradient was not finite and there was no policy for that."""
        with contextlib.suppress(OSError, UsageError):  # as of a directory that was removed
            self.run.look()
        if (first := find_nonfinite(rank.descriptions for rank in self.run.ranks.values())) is None:
            return []
        return [f"{first}. --nonfinite raise ends the run there, --nonfinite skip omits such steps."]

    def _is_ending(self) -> bool:
        """Whether all ranks have stopped their recorders, as programs do at their end: there are no more steps to wait for."""
        return self.run.ranks != {} and all(rank.ended for rank in self.run.ranks.values())

    def figures(self, status: RunStatus) -> list[str]:
        """The line of figures, with the last warning if the one before did not have it; nothing if nothing has changed."""
        line = stats_line(status if status.warning != self._warned else replace(status, warning=""))
        changed = line != self._last_line
        self._warned, self._last_line = status.warning, line
        return [line] if changed else []

    def look_back(self) -> None:
        """Look once at a run that was not watched so far: what its last steps show need not be confirmed."""
        self.run.look()
        self.stragglers.current = slow_ranks(self.run.steps)
        self.note(describe(self.stragglers.current))

    def note(self, lines: Sequence[str]) -> None:
        """Lines that were shown as a warning: the first is the last warning from now on."""
        if lines:
            self._warning = time.time(), lines[0]

    def status(self, *, since: int | None = None) -> RunStatus:
        """As of the last look; from the steps that ended after `since`, in nanoseconds on the monotonic clock, or the last 20."""
        now = time.monotonic_ns()
        states = {rank: self.run.state(rank) for rank in self.run.local_ranks}
        if ProcessState.GONE in states.values():
            self.run.look()  # whether it has stopped its recorder; in an elastic run there may be another view
        local, slow = self.run.local_ranks, {one.rank for one in self.stragglers.current}
        known = [_rank_status(rank, states.get(rank) or self.run.state(rank), now, slow) for rank in local]
        size, views = max([self._size, *(int(rank.header["size"]) for rank in local)]), self.run.views
        if views:
            size = len(views[-1].members)
        waiting = find_waiting(local, now, deadline=_LONG_WAIT)
        status = run_status(known, self.run.steps, size=size, now=now, since=since)
        status = replace(status, warning=self._last_warning(), missing=waiting.missing if waiting is not None else ())
        if views:
            change = changed(views[0] if len(views) > 1 else None, views[-1], read_faults(self.run.directory))
            view = f"view {views[-1].epoch} of {plural(size, 'rank')} since step {views[-1].step}"
            pids = {rank.member: f" (process {rank.header['pid']})" for rank in local}
            members = ", ".join(f"rank {n} {one}{pids.get(one, '')}" for n, one in enumerate(views[-1].members))
            status = replace(status, view=f"{view}{f' ({change})' if change else ''}", members=members)
        outcome = self.run.outcome
        return status if outcome is None else replace(status, ending=outcome.text or "ended without an error")

    def _last_warning(self) -> str:
        recorded = merge_warnings((rank.rank, rank.header, rank.warnings) for rank in self.run.ranks.values())
        found = [self._warning, *((one.time, one.text) for one in recorded[-1:])]
        return max(found)[1]


def _rank_status(rank: RankProgress, state: ProcessState, now: int, slow: Container[int]) -> RankStatus:
    """What is known of a rank, before it is compared with the others."""
    ended = {ProcessState.GONE: Condition.ENDED, ProcessState.STOPPED: Condition.STOPPED}
    condition = ended.get(state, Condition.RUNS if rank.folder.steps else Condition.STARTING)
    return RankStatus(rank.rank, condition, 0.0, _doing(rank, state, now), rank.rank in slow, step=rank.step)


def _doing(rank: RankProgress, state: ProcessState, now: int) -> str:
    """What a rank does, for people: the phase of its step, or the collective it has waited in for long; or that it was killed."""
    if state is ProcessState.GONE:
        return "" if rank.ended else state.value
    waiting = rank.waiting_in()
    if waiting is not None and now - waiting[1] > _LONG_WAIT * 1e9:
        return f"{(now - waiting[1]) / 1e9:.0f} s in {waiting[0].op}"
    if rank.phase is Phase.EXPOSED:
        return "waits"
    return "" if rank.phase is None else rank.phase.value
