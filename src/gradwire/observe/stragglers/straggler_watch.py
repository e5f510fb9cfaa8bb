"""Stragglers of a run: of one that is being watched, each reported once, and of what a run has recorded. Without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gradwire.observe.rings.clocks import aligned
from gradwire.observe.rings.intervals import ranks_apart
from gradwire.observe.rings.ring import read_rings
from gradwire.observe.stragglers.detect import (
    WINDOW,
    Straggler,
    Times,
    common_steps,
    comparable,
    compare,
    describe,
    slow_ranks,
)
from gradwire.observe.stragglers.steps import Phase, StepTimes, step_times

PERIOD = 1.0
"""Seconds between two comparisons."""
CONFIRM = 2.0
"""Seconds for which a rank must be slow before it is reported: short steps fit 20 times into a hiccup of the machine."""
CONFIRM_STEPS = WINDOW // 2
"""Steps for which it must go on: of thousands of windows, some look slow by chance, if a phase takes now longer, now shorter."""


def find_stragglers(run: str | os.PathLike[str]) -> list[Straggler]:
    """The ranks that others waited for in a run, with the steps in which they did, in order. `run` is the directory of a run.

    It may still go on, or be over.
    """
    rings = aligned(ranks_apart(read_rings(run)))
    return stragglers_over_time({ring.rank: step_times(ring.records) for ring in rings})


def stragglers_over_time(times: Times) -> list[Straggler]:
    """The stragglers of all steps: windows are compared one after another, and those that agree are joined. One alone is chance,
    unless there are no others. Pure."""
    found: list[Straggler] = []
    for ranks in comparable(times):
        steps = common_steps(ranks)
        by_step = {rank: {one.step: one for one in row} for rank, row in ranks.items()}
        now: dict[tuple[int, Phase], int] = {}  # by rank and phase: where the first of the windows that agree begins
        begins = range(0, len(steps) - WINDOW + 1, CONFIRM_STEPS)
        least = min(len(steps), WINDOW + CONFIRM_STEPS)
        for begin in [*begins, len(steps)]:
            window = steps[begin : begin + WINDOW]
            rows = {rank: [own[step] for step in window] for rank, own in by_step.items()}
            here = {(one.rank, one.phase) for one in compare(rows, window)}
            for key in now.keys() - here:
                together = steps[now.pop(key) : begin + WINDOW - CONFIRM_STEPS if window else None]
                found += _joined(ranks, together, key) if len(together) >= least else []
            for key in here - now.keys():
                now[key] = begin
    return sorted(found, key=lambda one: (one.first_step, one.rank))


def _joined(ranks: Times, steps: Sequence[int], key: tuple[int, Phase]) -> list[Straggler]:
    """The straggler of several windows, from all their steps; if it is not one over all of them, from the first."""
    for part in (steps, steps[:WINDOW]):
        if same := [one for one in compare(ranks, part) if (one.rank, one.phase) == key]:
            return same
    return []


class StragglerWatch:
    """Compares ranks while they run. Reports a straggler once, again when it changes, and when it is one no longer."""

    def __init__(self) -> None:
        self.current: list[Straggler] = []
        """The stragglers that have been confirmed."""
        self._since: dict[tuple[int, Phase], tuple[float, int]] = {}
        """When a rank was found to be slow for the first time, and the last step of that window."""
        self._reported: dict[int, Straggler] = {}
        self._seen: dict[int, int] = {}
        """By rank that was reported: the step at which it was slow last."""
        self._next = 0.0
        self._finished: list[int] = []

    def check(self, times: Mapping[int, Sequence[StepTimes]], now: float) -> list[str]:
        """The lines to print at `now`, in seconds on any clock. `times` are the last steps of each rank, on one clock."""
        finished = [row[-1].step for row in times.values() if row]
        if now < self._next or finished == self._finished:
            return []
        self._next, self._finished = now + PERIOD, finished
        found = slow_ranks(times)
        since = {(one.rank, one.phase): (now, one.last_step) for one in found}
        self._since = {key: self._since.get(key, begin) for key, begin in since.items()}
        self.current = [one for one in found if self._is_confirmed(one, now)]
        lines = describe(self.current) if any(map(self._is_new, self.current)) else []
        if lines:
            self._reported |= {one.rank: one for one in self.current}
        return [*lines, *self._recovered(times, {one.rank for one in found})]

    def _is_confirmed(self, one: Straggler, now: float) -> bool:
        time, step = self._since[one.rank, one.phase]
        return now - time >= CONFIRM and one.last_step - step >= CONFIRM_STEPS

    def _is_new(self, one: Straggler) -> bool:
        known = self._reported.get(one.rank)
        return known is None or known.phase is not one.phase or not known.extra / 2 < one.extra < known.extra * 2

    def _recovered(self, times: Mapping[int, Sequence[StepTimes]], slow: set[int]) -> list[str]:
        """Ranks that were reported and have not been slow in a whole window since."""
        lines = []
        for rank, known in list(self._reported.items()):
            step = times[rank][-1].step if times.get(rank) else known.last_step
            if rank in slow:
                self._seen[rank] = step
            elif step - self._seen.setdefault(rank, step) >= WINDOW:
                del self._reported[rank], self._seen[rank]
                lines.append(f"rank {rank} is as fast as the others again (step {step})")
        return lines
