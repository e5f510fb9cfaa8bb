"""Stragglers: which rank the others wait for, in which phase it is slow, and what a step would take without that. Pure.

Note [What counts as slow]
A phase of a rank is compared, step by step, with the median of the other ranks in the same step, so that what is equal on all
ranks (long sequences, a cold cache) does not matter. The median of these differences over 20 steps is what the rank takes more.
It is slow if that is beyond 5 % of what the phase takes on the others, beyond 4 times the median absolute deviation of the other
ranks' differences, and beyond 4 standard errors of the median itself. A slow phase makes a straggler of a rank if the others wait
for it: in more than half of the steps its last bucket is ready later than that of any other rank usually is. "Usually", because
on a busy machine some rank is delayed by chance in every step, and is then the last one. Ranks that are about as slow, such as
those of a slow host, are stragglers together. And it must be noticeable: what a rank takes more is at least 2 % of the step, and
on average, a step would be at least 1 % shorter without it.

Note [What if]
Ranks meet when the last of them is ready. If the slow phases had taken what they take on the others, each slow rank would have
been ready earlier by the difference, and the step would have ended earlier by as much as the last of all ranks would have been
ready earlier. What follows, the exposed communication, is assumed to take as long as before. The prediction is the median of what
each step would have taken: steps can differ more than ranks do, and then a difference of two medians is further off.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from gradwire.observe.stragglers.steps import COMPUTE, Phase, StepTimes
from gradwire.observe.units import milliseconds, ranks

WINDOW = 20
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
        return sum(one.seconds - one.usual for one in self.slow)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in {' and '.join(map(str, self.slow))}: last in {self.last} of {self.steps} steps "
            f"({self.first_step}-{self.last_step})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For programs: times in seconds."""
        return {
            "rank": self.rank,
            "phases": [
                {"phase": one.phase.name.lower(), "seconds": one.seconds, "usual": one.usual} for one in self.slow
            ],
            "steps": [self.first_step, self.last_step],
            "compared": self.steps,
            "last": self.last,
            "step_seconds": self.step_seconds,
            "without": self.without,
        }


def describe(stragglers: Sequence[Straggler]) -> list[str]:
    """Stragglers as lines for a terminal; those of the same steps together, with what a step would take without them."""
    lines: list[str] = []
    for together in of_same_steps(stragglers):
        who = ranks(sorted(straggler.rank for straggler in together))
        first = together[0]
        times = f"{milliseconds(first.without)} instead of {milliseconds(first.step_seconds)} ms"
        lines += [*map(str, together), f"  without {who} a step takes {times}"]
    return lines


def of_same_steps(stragglers: Sequence[Straggler]) -> list[list[Straggler]]:
    """Stragglers of the same steps together, in the order in which they are given."""
    found: dict[tuple[int, int], list[Straggler]] = {}
    for one in stragglers:
        found.setdefault((one.first_step, one.last_step), []).append(one)
    return list(found.values())


Times = Mapping[int, Sequence[StepTimes]]
"""The steps of each rank, on one clock."""


def slow_ranks(times: Times, *, window: int = WINDOW) -> list[Straggler]:
    """The stragglers in the last `window` steps that all ranks of a group have finished, the one that costs most first.

    Empty with fewer steps or ranks than it takes to compare.
    """
    found = []
    for rows in comparable(times):
        steps = common_steps(rows)[-window:]
        found += compare(rows, steps) if len(steps) >= window else []
    return found


def comparable(times: Times) -> list[Times]:
    """The ranks that average gradients together, by group. Ranks of other groups, e.g. of other pipeline stages, do other work."""
    groups: dict[int, dict[int, Sequence[StepTimes]]] = {}
    for rank, row in times.items():
        if row:
            groups.setdefault(row[-1].group_id, {})[rank] = row
    return [rows for rows in groups.values() if len(rows) > 1]


def common_steps(times: Times) -> list[int]:
    """The numbers of the steps that all ranks have finished, in order."""
    known = [{one.step for one in row} for row in times.values()]
    return sorted(set.intersection(*known)) if known else []


def compare(times: Times, steps: Sequence[int]) -> list[Straggler]:
    """The stragglers in these steps, which all of these ranks have finished."""
    if len(times) < 2 or not steps:
        return []
    rows = {rank: _of_steps(row, steps) for rank, row in times.items()}
    step_seconds = median(median(one.seconds for one in row) for row in rows.values())
    waits = any(one.backward_waits for row in rows.values() for one in row)
    phases = [phase for phase in COMPUTE if not waits or phase is not Phase.BACKWARD]
    slow = _noticeable([_slow_in(phase, rows) for phase in phases], step_seconds)
    ready = {rank: [one.last_ready for one in row] for rank, row in rows.items()}
    guilty = {rank: phases for rank, phases in slow.items() if _times_late(rank, ready, slow) > len(steps) / 2}
    last = _times_last(ready)
    step_by_step = [median(one.seconds for one in column) for column in zip(*rows.values())]
    saved = _saved(guilty, ready)
    if fmean(saved) < _WORTH_SAVING * step_seconds:
        return []
    without = median(time - less for time, less in zip(step_by_step, saved))
    found = [
        Straggler(
            rank,
            tuple(one.summary for one in phases),
            steps[0],
            steps[-1],
            len(steps),
            last[rank],
            step_seconds,
            without,
        )
        for rank, phases in guilty.items()
    ]
    return sorted(found, key=lambda one: (-one.extra, one.rank))


def _of_steps(row: Sequence[StepTimes], steps: Sequence[int]) -> list[StepTimes]:
    by_step = {one.step: one for one in row}
    return [by_step[step] for step in steps]


@dataclass(frozen=True, slots=True)
class _Slow:
    summary: SlowPhase
    differences: Sequence[float]
    """From the other ranks, in each step, in nanoseconds."""

    @property
    def extra(self) -> float:
        return self.summary.seconds - self.summary.usual


def _noticeable(by_phase: Sequence[Mapping[int, _Slow]], step_seconds: float) -> dict[int, list[_Slow]]:
    """By rank: the phases that make it slow, the one that costs most first."""
    slow = {}
    for rank in {rank for found in by_phase for rank in found}:
        phases = sorted((found[rank] for found in by_phase if rank in found), key=lambda one: -one.extra)
        total = sum(one.extra for one in phases)
        if total >= _NOTICEABLE * step_seconds:
            slow[rank] = [one for one in phases if one.extra >= _WORTH_NAMING * total]
    return slow


def _slow_in(phase: Phase, rows: Times) -> dict[int, _Slow]:
    """By rank that is slow in `phase`: how slow."""
    table = {rank: [one.phases.get(phase, 0) for one in row] for rank, row in rows.items()}
    columns = [sorted(column) for column in zip(*table.values())]
    usual = {rank: [median_without(column, x) for column, x in zip(columns, row)] for rank, row in table.items()}
    differences = {rank: [x - other for x, other in zip(row, usual[rank])] for rank, row in table.items()}
    more = {rank: median(row) for rank, row in differences.items()}
    slow = {}
    for rank, row in differences.items():
        noise = _STANDARD_ERROR * _deviation(row) / math.sqrt(len(row))
        spread = _deviation([value for other, value in more.items() if other != rank])
        typical = median(usual[rank])
        if more[rank] > max(_SHARE * typical, _DEVIATIONS * spread, _DEVIATIONS * noise, 0):
            slow[rank] = _Slow(SlowPhase(phase, (typical + more[rank]) / 1e9, typical / 1e9), row)
    return slow


def median_without(ordered: Sequence[int], value: int) -> float:
    """The median of the sorted `ordered` without one occurrence of `value`.

    >>> median_without([1, 2, 2, 9], 2), median_without([1, 2, 9], 1)
    (2, 5.5)
    """
    skipped, size = bisect_left(ordered, value), len(ordered) - 1
    upper = ordered[size // 2 + (size // 2 >= skipped)]
    if size % 2:
        return upper
    lower = size // 2 - 1
    return (ordered[lower + (lower >= skipped)] + upper) / 2


def _deviation(values: Sequence[float]) -> float:
    """The median absolute deviation."""
    middle = median(values)
    return float(median(abs(value - middle) for value in values))


def _times_last(ready: Mapping[int, Sequence[int]]) -> Counter[int]:
    """In how many steps each rank was ready last."""
    return Counter(max(ready, key=lambda rank: ready[rank][i]) for i in range(len(next(iter(ready.values())))))


def _times_late(rank: int, ready: Mapping[int, Sequence[int]], slow: Mapping[int, Sequence[_Slow]]) -> int:
    """In how many steps a rank was ready later than any other usually is, except those that are about as slow.

    Times are compared with the median of all ranks in the same step.
    """
    middle = [median(column) for column in zip(*ready.values())]
    after = {other: [time - at for time, at in zip(row, middle)] for other, row in ready.items()}
    extra = {other: sum(one.extra for one in phases) for other, phases in slow.items()}
    alike = {other for other, time in extra.items() if extra[rank] / 2 < time < extra[rank] * 2}
    others = [other for other in ready if other not in alike] or [other for other in ready if other != rank]
    usual = max(median(after[other]) for other in others)
    return sum(time > usual for time in after[rank])


def _saved(slow: Mapping[int, Sequence[_Slow]], ready: Mapping[int, Sequence[int]]) -> list[float]:
    """Seconds by which each step would be shorter if nothing were slow: see Note [What if]."""
    without = {
        rank: [time - sum(one.differences[i] for one in slow.get(rank, ())) for i, time in enumerate(row)]
        for rank, row in ready.items()
    }
    return [max(0.0, max(now) - max(then)) / 1e9 for now, then in zip(zip(*ready.values()), zip(*without.values()))]
