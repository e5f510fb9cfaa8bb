"""Stragglers: which rank the others wait for, in which phase it is slow, and what a step would take without that.

Note [What counts as slow]
A phase of a rank is compared, step by step, with the median of the other ranks in the same step, so that what is equal on all
ranks (long sequences, a cold cache) does not matter. The median of these differences over 20 steps is what the rank takes more.
It is slow if that is beyond 5 % of what the phase takes on the others, beyond 4 times the median absolute deviation of the other
ranks' differences, and beyond 4 standard errors of the median itself. A slow phase makes a straggler of a rank if in more than
half of the steps its last bucket is ready later than that of any other rank usually is: on a busy machine some rank is last by
chance in every step. Ranks that are about as slow, such as those of a slow host, are stragglers together. What a rank takes more
must be at least 2 % of the step, and on average, a step would be at least 1 % shorter without it.

Note [What if]
Ranks meet when the last of them is ready. If the slow phases had taken what they take on the others, each slow rank would have
been ready earlier by the difference, and the step would have ended earlier by as much as the last of all ranks would have been
ready earlier. Exposed communication is assumed to take as long as before. The prediction is the median over the steps.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from gradwire.observe.rings.clocks import aligned
from gradwire.observe.rings.intervals import ranks_apart
from gradwire.observe.rings.ring import read_rings
from gradwire.observe.stragglers.steps import COMPUTE, Phase, StepTimes, step_times
from gradwire.observe.units import milliseconds, ranks

if TYPE_CHECKING:
    import numpy as np

WINDOW = 20
CONFIRM = 2.0
"""Seconds for which a rank must be slow before it is reported: short steps fit 20 times into a hiccup of the machine."""
CONFIRM_STEPS = WINDOW // 2
"""Steps for which it must go on: of thousands of windows, some look slow by chance, if a phase takes now longer, now shorter."""
_SHARE = 0.05
_DEVIATIONS = 4.0
_NOTICEABLE = 0.02
_WORTH_SAVING = 0.01
_WORTH_NAMING = 0.1
"""A phase with less of what its rank takes more is not named."""
_STANDARD_ERROR = 1.86
"""The standard error of the median of n values is this many median absolute deviations, divided by the root of n."""


@dataclass(frozen=True, slots=True)
class SlowPhase:
    """A phase that takes longer on one rank than on the others. Times are in seconds, medians over the steps."""

    phase: Phase
    seconds: float
    usual: float
    """What it takes on the other ranks."""
    differences: Sequence[float] = field(default=(), repr=False, compare=False)
    """From the other ranks, in each step, in nanoseconds."""

    @property
    def extra(self) -> float:
        """What it takes more than on the others."""
        return self.seconds - self.usual

    def __str__(self) -> str:
        return f"{self.phase.value} ({milliseconds(self.seconds)} ms, the others take {milliseconds(self.usual)})"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    slow: tuple[SlowPhase, ...]
    """Its slow phases, the one that costs most first."""
    first_step: int
    last_step: int
    steps: int
    """How many steps were compared, from `first_step` to `last_step`."""
    last: int
    """In how many of them it was the last one to be ready."""
    step_seconds: float
    """What a step takes."""
    without: float
    """What a step would take without any slow phase: see Note [What if]."""

    @property
    def phase(self) -> Phase:
        """The phase that costs most."""
        return self.slow[0].phase

    @property
    def extra(self) -> float:
        """Seconds per step that it takes more than the others."""
        return sum(one.extra for one in self.slow)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in {' and '.join(map(str, self.slow))}: last in {self.last} of {self.steps} steps "
            f"({self.first_step}-{self.last_step})"
        )


def describe(stragglers: Sequence[Straggler]) -> list[str]:
    """Stragglers as lines for a terminal; those of the same steps together, with what a step would take without them."""
    lines: list[str] = []
    for together in of_same_steps(stragglers):
        who = ranks(sorted(straggler.rank for straggler in together))
        first = together[0]
        times = f"{milliseconds(first.without)} instead of {milliseconds(first.step_seconds)} ms"
        lines += map(str, together)
        lines += (
            [f"  without {who} a step takes {times}"] if first.without > 0 else []
        )  # ranks of a round do not wait in each step
    return lines


def of_same_steps(stragglers: Sequence[Straggler]) -> list[list[Straggler]]:
    """Stragglers of the same steps together, in the order in which they are given."""
    found: dict[tuple[int, int], list[Straggler]] = {}
    for one in stragglers:
        found.setdefault((one.first_step, one.last_step), []).append(one)
    return list(found.values())


Times = Mapping[int, Sequence[StepTimes]]
"""The steps of each rank, on one clock."""
NumberedSteps = Mapping[int, Mapping[int, StepTimes]]
"""The same by rank and number."""


def slow_ranks(times: Times) -> list[Straggler]:
    """The stragglers in the last `WINDOW` steps that all ranks of a group have finished, the one that costs most first. Empty
    with fewer steps or ranks than it takes to compare."""
    found = []
    for rows in comparable(times):
        steps = common_steps(rows)[-WINDOW:]
        found += compare(rows, steps) if len(steps) >= WINDOW else []
    return found


def comparable(times: Times) -> list[NumberedSteps]:
    """The ranks that average gradients together, by group. Ranks of other groups, e.g. of other pipeline stages, do other work."""
    groups: dict[int, dict[int, Mapping[int, StepTimes]]] = {}
    for rank, row in times.items():
        if row:
            groups.setdefault(row[-1].group_id, {})[rank] = {one.step: one for one in row}
    return [rows for rows in groups.values() if len(rows) > 1]


def common_steps(steps: NumberedSteps) -> list[int]:
    """The numbers of the steps that all ranks have finished, in order."""
    return sorted(set.intersection(*map(set, steps.values()))) if steps else []


def ready_times(times: Times) -> dict[int, dict[int, int]]:
    """By rank and step: when its last bucket was ready, in the steps that all of these ranks have finished, in order."""
    rows = {rank: {one.step: one for one in row} for rank, row in times.items()}
    steps = common_steps(rows)
    return {rank: {step: row[step].last_ready for step in steps} for rank, row in rows.items()}


def compare(found: NumberedSteps, steps: Sequence[int]) -> list[Straggler]:
    """The stragglers in these steps, which all of these ranks have finished."""
    if not steps:
        return []
    rows = {rank: [own[step] for step in steps] for rank, own in found.items()}
    step_seconds = median(median(one.seconds for one in row) for row in rows.values())
    waits = any(one.backward_waits for row in rows.values() for one in row)
    phases = [phase for phase in COMPUTE if not waits or phase is not Phase.BACKWARD]
    slow = _noticeable([_slow_in(phase, rows) for phase in phases], step_seconds)
    ready = {rank: [one.last_ready for one in row] for rank, row in rows.items() if slow}
    guilty = {rank: phases for rank, phases in slow.items() if _times_late(rank, ready, slow) > len(steps) / 2}
    saved = _saved(guilty, ready) if guilty else []
    if not guilty or fmean(saved) < _WORTH_SAVING * step_seconds:
        return []
    last = Counter(max(ready, key=lambda rank: ready[rank][i]) for i in range(len(steps)))
    step_by_step = [median(one.seconds for one in column) for column in zip(*rows.values())]
    without = median(time - less for time, less in zip(step_by_step, saved))
    stragglers = [
        Straggler(rank, tuple(its), steps[0], steps[-1], len(steps), last[rank], step_seconds, without)
        for rank, its in guilty.items()
    ]
    return sorted(stragglers, key=lambda one: (-one.extra, one.rank))


def _noticeable(by_phase: Sequence[Mapping[int, SlowPhase]], step_seconds: float) -> dict[int, list[SlowPhase]]:
    """By rank: the phases that make it slow, the one that costs most first."""
    slow = {}
    for rank in {rank for found in by_phase for rank in found}:
        phases = sorted((found[rank] for found in by_phase if rank in found), key=lambda one: -one.extra)
        total = sum(one.extra for one in phases)
        if total >= _NOTICEABLE * step_seconds:
            slow[rank] = [one for one in phases if one.extra >= _WORTH_NAMING * total]
    return slow


def _slow_in(phase: Phase, rows: Times) -> dict[int, SlowPhase]:
    """By rank that is slow in `phase`: how slow."""
    import numpy as np  # not before: the launcher starts without it

    table = np.array([[one.phases.get(phase, 0) for one in row] for row in rows.values()], np.float64)
    usual = medians_of_others(table)
    differences = table - usual
    more, typical = np.median(differences, axis=1), np.median(usual, axis=1)
    noise = _STANDARD_ERROR * _deviation(differences) / math.sqrt(table.shape[1])
    slow = {}
    for i, rank in enumerate(rows):
        least = max(_SHARE * typical[i], _DEVIATIONS * noise[i], 0)
        if more[i] > least and more[i] > _DEVIATIONS * _deviation(np.delete(more, i)):
            seconds = float(typical[i] + more[i]) / 1e9
            slow[rank] = SlowPhase(phase, seconds, float(typical[i]) / 1e9, differences[i].tolist())
    return slow


def medians_of_others(table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each value: the median of the others in its column.

    >>> import numpy as np
    >>> medians_of_others(np.array([[1.0], [2], [2], [9]])).ravel().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    import numpy as np

    ordered, middle = np.sort(table, axis=0), (len(table) - 1) // 2

    def without(place: int) -> Any:
        """What is at `place` of a sorted column without the value."""
        return np.where(ordered[place] >= table, ordered[place + 1], ordered[place])

    medians = without(middle) if len(table) % 2 == 0 else (without(middle - 1) + without(middle)) / 2
    return np.asarray(medians)


def _deviation(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Along the last axis."""
    import numpy as np

    middle = np.median(values, axis=-1, keepdims=True)
    return np.asarray(np.median(np.abs(values - middle), axis=-1))


def _times_late(rank: int, ready: Mapping[int, Sequence[int]], slow: Mapping[int, Sequence[SlowPhase]]) -> int:
    """In how many steps a rank was ready later than any other usually is, except those that are about as slow. Times are
    compared with the median of all ranks in the same step."""
    middle = [median(column) for column in zip(*ready.values())]
    after = {other: [time - at for time, at in zip(row, middle)] for other, row in ready.items()}
    extra = {other: sum(one.extra for one in phases) for other, phases in slow.items()}
    alike = {other for other, time in extra.items() if extra[rank] / 2 < time < extra[rank] * 2}
    others = [other for other in ready if other not in alike] or [other for other in ready if other != rank]
    usual = max(median(after[other]) for other in others)
    return sum(time > usual for time in after[rank])


def _saved(slow: Mapping[int, Sequence[SlowPhase]], ready: Mapping[int, Sequence[int]]) -> list[float]:
    """Seconds by which each step would be shorter if nothing were slow: see Note [What if]."""
    without = {
        rank: [time - sum(one.differences[i] for one in slow.get(rank, ())) for i, time in enumerate(row)]
        for rank, row in ready.items()
    }
    return [max(0.0, max(now) - max(then)) / 1e9 for now, then in zip(zip(*ready.values()), zip(*without.values()))]


def find_stragglers(run: str | os.PathLike[str]) -> list[Straggler]:
    """The ranks that others waited for in a run, with the steps in which they did, in order. `run` is the directory of a run. It
    may still go on, or be over."""
    rings = aligned(ranks_apart(read_rings(run)))
    return stragglers_over_time({ring.rank: step_times(ring.records) for ring in rings})


def stragglers_over_time(times: Times) -> list[Straggler]:
    """The stragglers of all steps: windows are compared one after another, and those that agree are joined. One alone is chance,
    unless there are no others. Pure."""
    found: list[Straggler] = []
    for rows in comparable(times):
        steps = common_steps(rows)
        now: dict[tuple[int, Phase], int] = {}  # by rank and phase: where the first of the windows that agree begins
        begins = range(0, len(steps) - WINDOW + 1, CONFIRM_STEPS)
        least = min(len(steps), WINDOW + CONFIRM_STEPS)
        for begin in [*begins, len(steps)]:
            window = steps[begin : begin + WINDOW]
            here = {(one.rank, one.phase) for one in compare(rows, window)}
            for key in now.keys() - here:
                together = steps[now.pop(key) : begin + WINDOW - CONFIRM_STEPS if window else None]
                found += _joined(rows, together, key) if len(together) >= least else []
            for key in here - now.keys():
                now[key] = begin
    return sorted(found, key=lambda one: (one.first_step, one.rank))


def _joined(rows: NumberedSteps, steps: Sequence[int], key: tuple[int, Phase]) -> list[Straggler]:
    """The straggler of several windows, from all their steps; if it is not one over all of them, from the first."""
    for part in (steps, steps[:WINDOW]):
        if same := [one for one in compare(rows, part) if (one.rank, one.phase) == key]:
            return same
    return []


class StragglerWatch:
    """Compares ranks while they run. Reports a straggler once, again when it changes, and when it is one no longer."""

    def __init__(self) -> None:
        self.current: list[Straggler] = []
        """The stragglers that have been confirmed."""
        self._since: dict[tuple[int, Phase], tuple[float, int]] = {}
        """When a rank was found to be slow for the first time, and the last step of that window."""
        self._reported: dict[int, tuple[Straggler, int]] = {}
        """By rank: what was reported of it, and the step at which it was slow last."""
        self._finished: list[int] = []

    def check(self, times: Times, now: float) -> list[str]:
        """The lines to print at `now`, in seconds on any clock. `times` are the last steps of each rank, on one clock."""
        finished = [row[-1].step for row in times.values() if row]
        if finished == self._finished:
            return []
        self._finished = finished
        found = slow_ranks(times)
        since = {(one.rank, one.phase): (now, one.last_step) for one in found}
        self._since = {key: self._since.get(key, begin) for key, begin in since.items()}
        self.current = [one for one in found if self._is_confirmed(one, now)]
        lines = describe(self.current) if any(map(self._is_new, self.current)) else []
        if lines:
            self._reported |= {one.rank: (one, one.last_step) for one in self.current}
        return [*lines, *self._recovered(times, {one.rank for one in found})]

    def _is_confirmed(self, one: Straggler, now: float) -> bool:
        time, step = self._since[one.rank, one.phase]
        return now - time >= CONFIRM and one.last_step - step >= CONFIRM_STEPS

    def _is_new(self, one: Straggler) -> bool:
        known, _ = self._reported.get(one.rank, (None, 0))
        return known is None or known.phase is not one.phase or not known.extra / 2 < one.extra < known.extra * 2

    def _recovered(self, times: Times, slow: set[int]) -> list[str]:
        """Ranks that were reported and have not been slow in a whole window since."""
        lines = []
        for rank, (known, seen) in list(self._reported.items()):
            step = times[rank][-1].step if times.get(rank) else known.last_step
            if rank in slow:
                self._reported[rank] = known, step
            elif step - seen >= WINDOW:
                del self._reported[rank]
                lines.append(f"rank {rank} is as fast as the others again (step {step})")
        return lines
