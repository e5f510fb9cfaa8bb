"""Where a run is now, in figures: for `--stats`, `--watch` and `gradwire top`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

from gradwire.observe.stragglers.detect import median_without
from gradwire.observe.stragglers.steps import Phase, StepTimes
from gradwire.observe.units import milliseconds
from gradwire.observe.units import ranks as ranks_text
from gradwire.observe.units import size as size_text
from gradwire.runtime.host import ProcessState

_STEPS = 20
"""The number of steps that figures are means of, unless an interval is given."""
_IDLE = 5.0
"""Seconds without a step."""
_NOTICEABLE = 0.01
"""Share of a step."""


class Condition(Enum):
    """How a rank is. The value is the name people read."""

    ABSENT = "not recorded yet"
    """Before `gw.init()` or `observe.start()`."""
    STARTING = "no step yet"
    RUNS = "runs"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank. Times are in seconds per step, means over the last steps; 0 if there were none."""

    rank: int
    condition: Condition = Condition.ABSENT
    step: int = -1
    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    nbytes: float = 0.0
    """Bytes of collectives per step."""
    has_communication: bool = True
    """Whether `exposed` and `nbytes` are recorded; not of torch's own DDP."""
    late: float = 0.0
    """How much later than those of the other ranks its last bucket is ready."""
    doing: str = ""
    """What it does now."""
    is_slow: bool = False
    """Whether it is a straggler."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """All ranks, and the run as a whole: medians over the ranks."""

    ranks: tuple[RankStatus, ...]
    step: int = -1
    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    nbytes: float = 0.0
    has_communication: bool = True
    """Whether `exposed` and `nbytes` are recorded; not of torch's own DDP."""
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


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of a rank, before it is compared with the others."""

    steps: Sequence[StepTimes]
    state: ProcessState
    step: int
    doing: str = ""


def run_status(
    facts: Mapping[int, RankFacts],
    *,
    size: int,
    now: int,
    since: int | None = None,
    slow: frozenset[int] = frozenset(),
    warning: str = "",
) -> RunStatus:
    """The status of a run of `size` ranks at `now`, from the steps that ended after `since`, or from the last 20.

    Times are in nanoseconds on the clock of the ranks. `slow` are the stragglers, `warning` the last warning.
    """
    chosen = {rank: _chosen(one.steps, since) for rank, one in facts.items()}
    late, last = _lateness(chosen)
    ranks = tuple(
        _rank_status(rank, facts.get(rank), chosen.get(rank, []), late.get(rank, 0.0), rank in slow)
        for rank in range(max([size, *(rank + 1 for rank in facts)]))
    )
    timed = [rank for rank in ranks if rank.seconds]
    ends = [one.steps[-1].end for one in facts.values() if one.steps]
    return RunStatus(
        ranks,
        step=max((rank.step for rank in ranks), default=-1),
        seconds=_median(rank.seconds for rank in timed),
        compute=_median(rank.compute for rank in timed),
        exposed=_median(rank.exposed for rank in timed),
        nbytes=_median(rank.nbytes for rank in timed),
        has_communication=all(rank.has_communication for rank in timed),
        samples_per_second=sum(map(_samples_per_second, chosen.values())),
        idle=(now - max(ends)) / 1e9 if ends else 0.0,
        slowest=None if last is None or ranks[last].late < _NOTICEABLE * ranks[last].seconds else ranks[last],
        warning=warning,
    )


def _chosen(steps: Sequence[StepTimes], since: int | None) -> list[StepTimes]:
    return list(steps)[-_STEPS:] if since is None else [one for one in steps if one.end > since]


def _rank_status(
    rank: int, facts: RankFacts | None, steps: Sequence[StepTimes], late: float, is_slow: bool
) -> RankStatus:
    if facts is None:
        return RankStatus(rank)
    condition = Condition.RUNS if facts.steps else Condition.STARTING
    if facts.state is ProcessState.GONE:
        condition = Condition.ENDED
    elif facts.state is ProcessState.STOPPED:
        condition = Condition.STOPPED
    if not steps:
        return RankStatus(rank, condition, facts.step, doing=facts.doing, is_slow=is_slow)
    return RankStatus(
        rank,
        condition,
        facts.step,
        seconds=fmean(one.seconds for one in steps),
        compute=fmean(one.compute for one in steps),
        exposed=fmean(one.share(Phase.EXPOSED) for one in steps),
        nbytes=fmean(one.nbytes for one in steps),
        has_communication=not any(one.backward_waits for one in steps),
        late=late,
        doing=facts.doing,
        is_slow=is_slow,
    )


def _lateness(chosen: Mapping[int, Sequence[StepTimes]]) -> tuple[dict[int, float], int | None]:
    """By rank: the median of how much later than the median of the others it was ready; and who was last in most steps."""
    ready = {rank: {one.step: one.last_ready for one in steps} for rank, steps in chosen.items() if steps}
    common = set.intersection(*(set(row) for row in ready.values())) if len(ready) > 1 else set()
    if not common:
        return {}, None
    columns = {step: sorted(row[step] for row in ready.values()) for step in common}
    late = {
        rank: median(row[step] - median_without(columns[step], row[step]) for step in common) / 1e9
        for rank, row in ready.items()
    }
    rank, times = Counter(max(ready, key=lambda rank: ready[rank][step]) for step in common).most_common(1)[0]
    return late, rank if times > len(common) / 2 else None


def _samples_per_second(steps: Sequence[StepTimes]) -> float:
    seconds = sum(one.seconds for one in steps)
    return sum(one.samples for one in steps) / seconds if seconds else 0.0


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def stats_line(status: RunStatus) -> str:
    """The status in one line, for log files."""
    if not status.seconds:
        parts = [without_figures(status), *filter(None, [status.ending])]
        return ", ".join(parts) + _last_warning(status)
    whole, compute, exposed = map(milliseconds, (status.seconds, status.compute, status.exposed))
    parts = [f"step {status.step}", f"{status.steps_per_second:.3g} steps/s", f"{whole} ms a step"]
    if status.has_communication:
        parts[-1] += f" (compute {compute}, exposed {exposed})"
        parts.append(f"{size_text(status.nbytes)} a step")
    if status.samples_per_second:
        parts.insert(2, f"{status.samples_per_second:,.0f} samples/s")
    if status.slowest is not None:
        parts.append(f"slowest rank {status.slowest.rank} ({milliseconds(status.slowest.late)} ms late)")
    if status.begun < len(status.ranks):
        parts.append(_recorded(status))
    ended = [rank.rank for rank in status.ranks if rank.condition in (Condition.ENDED, Condition.STOPPED)]
    if status.ending:
        parts.append(status.ending)
    elif ended:
        parts.append(f"{len(ended)} rank{'s' * (len(ended) > 1)} ended or stopped")
    return ", ".join(parts) + _last_warning(status)


def without_figures(status: RunStatus) -> str:
    """Where a run is of which no step was timed lately. Of ranks that share a ring, steps are known and their times are not."""
    if status.begun < len(status.ranks) and not status.seconds:
        return _recorded(status)
    if status.idle:
        return f"step {status.step}, no step for {status.idle:.0f} s{waits_for(status)}"
    return f"step {status.step}, without step times" if status.step > 0 else "no step yet"


def _recorded(status: RunStatus) -> str:
    return f"{status.begun} of {len(status.ranks)} ranks recorded{'' if status.ending else ' so far'}"


def waits_for(status: RunStatus) -> str:
    """Which ranks the others wait for, to be added to a line; empty if that is not known."""
    return f", waiting for {ranks_text(status.missing)}" if status.missing else ""


def _last_warning(status: RunStatus) -> str:
    return f"; last warning: {status.warning}" if status.warning else ""
