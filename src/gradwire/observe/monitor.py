"""Watches a run: stragglers, figures, the last warning. For `--stats`, `--watch` and `gradwire top`; without torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from gradwire.observe.hangs.analysis import find_waiting
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.run_status import RankFacts, RunStatus, run_status, stats_line
from gradwire.observe.run_warnings import merge_warnings
from gradwire.observe.stragglers.detect import StragglerWatch, describe, slow_ranks
from gradwire.observe.stragglers.steps import Phase

PERIOD = 1.0
"""Seconds between two looks."""
PLAIN_INTERVAL = 10.0
"""Seconds between lines of figures instead of a live view, where there is no terminal."""
_LONG_WAIT = 1.0
"""Seconds after which a wait is worth showing."""


class RunMonitor:
    """The state of a run of `size` ranks. `stats` is the interval of lines of figures, in seconds; None: no such lines."""

    def __init__(self, run: RunFollower, *, size: int = 0, stats: float | None = None) -> None:
        self.run = run
        self.stragglers = StragglerWatch()
        self._size = size
        self._stats = stats
        self._since = time.monotonic()
        self._next_look = self._since
        self._works = True
        self._warning: tuple[float, str] = (0.0, "")
        self._last_line = self._warned = ""

    @property
    def next_look(self) -> float:
        """When `check_if_due` looks again, on the monotonic clock."""
        if not self._works:
            return math.inf
        return self._next_look if self._stats is None else min(self._next_look, self._since + self._stats)

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
            self._works = False
            return [f"the run is not watched any more: {type(error).__name__}: {error}"]

    def check(self) -> list[str]:
        """Look, and return the lines to print: stragglers, and figures if their interval is over."""
        now = time.monotonic()
        self._next_look = now + PERIOD
        self.run.look()
        lines = self.stragglers.check({rank.rank: rank.folder.steps for rank in self.run.local_ranks}, now)
        self.note(lines)
        if self._stats is not None and now >= self._since + self._stats:
            lines = [*lines, *self.figures(self.status(since=int(self._since * 1e9)))]
            self._since = now
        return lines

    def figures(self, status: RunStatus) -> list[str]:
        """The line of figures, with the last warning if the one before did not have it; nothing if nothing has changed."""
        line = stats_line(status if status.warning != self._warned else replace(status, warning=""))
        changed = line != self._last_line
        self._warned, self._last_line = status.warning, line
        return [line] if changed else []

    def look_back(self) -> None:
        """Look once at a run that was not watched so far: what its last steps show need not be confirmed."""
        self.run.look()
        self.stragglers.current = slow_ranks({rank.rank: rank.folder.steps for rank in self.run.local_ranks})
        self.note(describe(self.stragglers.current))

    def note(self, lines: Sequence[str]) -> None:
        """Lines that were shown as a warning: the first is the last warning from now on."""
        if lines:
            self._warning = time.time(), lines[0]

    def status(self, *, since: int | None = None) -> RunStatus:
        """As of the last look; from the steps that ended after `since`, in nanoseconds on the monotonic clock, or the last 20."""
        now = time.monotonic_ns()
        local = self.run.local_ranks
        facts = {
            rank.rank: RankFacts(rank.folder.steps, self.run.state(rank), rank.step, _doing(rank, now))
            for rank in local
        }
        size = max([self._size, *(int(rank.header["size"]) for rank in local)])
        slow = frozenset(one.rank for one in self.stragglers.current)
        waiting = find_waiting(local, now, deadline=_LONG_WAIT)
        status = run_status(facts, size=size, now=now, since=since, slow=slow, warning=self._last_warning())
        if waiting is not None:
            status = replace(status, missing=waiting.missing)
        outcome = self.run.outcome
        return status if outcome is None else replace(status, ending=outcome.text or "ended without an error")

    def _last_warning(self) -> str:
        recorded = merge_warnings((rank.rank, rank.header, rank.warnings) for rank in self.run.ranks.values())
        found = [self._warning, *((one.time, one.text) for one in recorded[-1:])]
        return max(found)[1]


def _doing(rank: RankProgress, now: int) -> str:
    """What a rank does, for people: the phase of its step, or the collective that it has waited in for long."""
    waiting = rank.waiting_in()
    if waiting is not None and now - waiting[1] > _LONG_WAIT * 1e9:
        return f"{(now - waiting[1]) / 1e9:.0f} s in {waiting[0].op}"
    if rank.phase is Phase.EXPOSED:
        return "waits"
    return "" if rank.phase is None else rank.phase.value
