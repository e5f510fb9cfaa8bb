"""Who takes the place of a rank of an elastic run that has ended: given how it ended and what the hub knows of it. No I/O.

Note [Who is replaced]
When training has ended, or while ranks end with exit code 0, nobody is replaced; those that are in no view, as spares, are told to
end. A rank has left only if it has recorded that at the hub: it is replaced if fewer than the minimum would remain. Every other end
is a death, also exit code 0 of a rank without which the others have gone on. A spare takes the place of a rank that died, and a new
process that of the spare. A script that cannot start is given up: after `_MOST` deaths in a row of processes that were in no view,
in one place, or before the first view in all places together, the run fails with the last one.
So it does when the last member of a view dies: nobody could join; when a member has waited for others for too long; and after
`_MOST_AT_ONE_STEP` exceptions in a row without a step in between, as of a sample that cannot be read. One that ends with 0 before
training has ended, as by `break`, is not replaced, nor one whose start has ended by a UsageError, which the next would meet too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gradwire.elasticity.run_records import HubFacts

_MOST = 5
_MOST_AT_ONE_STEP = 10
_EARLY = 60.0
"""Seconds after its start within which a death says that the script cannot start."""


class Verdict(Enum):
    """How a process has ended."""

    FINISHED = "finished"
    LEFT = "left"
    DIED = "died"
    FAILED = "failed"
    """It died, and the run ends."""


class Decision(NamedTuple):
    """What follows from the end of a process."""

    verdict: Verdict
    delay: float | None = None
    """Seconds until a new process takes its place; None if none does."""
    promoted: int | None = None
    """The place of the spare that becomes a rank."""


@dataclass(slots=True)
class RankPlace:
    """One of the places for processes of this launcher. Each has a rank's number, and one process after another."""

    spare: bool
    member: str = ""
    """The id of its process, also of one that will be started; empty if there is none."""
    started: float | None = None
    """When its process was started; None if it was not."""
    failures: int = 0
    """Deaths in a row of processes that were in no view."""


class Replacement:
    """The places of a launcher: those of `ranks`, then those of `spares`. Ids of members begin with `name`."""

    def __init__(self, name: str, *, ranks: int, spares: int = 0, min_ranks: int = 1) -> None:
        self.places = [RankPlace(spare=number >= ranks) for number in range(ranks + spares)]
        self.finished = False
        """Whether training has ended."""
        self.died = self.replaced = self.left = 0
        self.name, self._min_ranks, self._members = name, min_ranks, 0
        self._step = self._stuck = 0
        """How many steps were committed at the last death, and how many deaths by exceptions there were since without another."""
        for place in self.places:
            self.enter(place)

    def enter(self, place: RankPlace) -> None:
        """Give a place a new id, for a process that will be started. No id is used again."""
        place.member, place.started = f"{self.name}-{self._members}", None
        self._members += 1

    @property
    def ranks(self) -> int:
        """How many processes there are, or will be, except spares."""
        return sum(bool(place.member) and not place.spare for place in self.places)

    def dispensable(self, facts: HubFacts) -> list[int]:
        """The places of processes with nothing left to do: spares, and when training has finished, those that are in no view."""
        if not self.finished and self.ranks:
            return []
        members = facts.last.members if self.finished and facts.last is not None else ()
        return [
            number
            for number, place in enumerate(self.places)
            if place.member and (place.spare or place.started is None or (members and place.member not in members))
        ]

    def ended(
        self, number: int, status: int, facts: HubFacts, now: float, *, gave_up: bool = False, refused: bool = False
    ) -> Decision:
        """The process in this place has ended: its exit code, or the negative number of a signal. `gave_up`: by TooFewMembers.
        `refused`: by a UsageError at its start."""
        place = self.places[number]
        out = facts.last is not None and place.member not in facts.last.members
        place.member = ""
        over = facts.ended or (status == 0 and (self.finished or (not facts.left and not out)))
        self.finished = over or (facts.left and facts.lost is not None)
        if over:
            self.died += status != 0
            return Decision(Verdict.FINISHED if status == 0 else Verdict.FAILED if status > 0 else Verdict.DIED)
        if status == 0 and facts.left:
            self.left += 1
            if place.spare or self.finished or self.ranks >= self._min_ranks:
                return Decision(Verdict.LEFT)
            self.enter(place)
            self.replaced += 1
            return Decision(Verdict.LEFT, 0.0)
        self.died += 1
        early = facts.view is None and now - (place.started or 0.0) < _EARLY
        place.failures = place.failures + 1 if early else 0
        failures = place.failures if facts.last is not None else sum(one.failures for one in self.places)
        before, self._step = self._step, 0 if facts.last is None else facts.last.step
        self._stuck = self._stuck + 1 if self._step == before and status > 0 else 0
        over = facts.lost is not None or (gave_up and (not out or facts.away)) or (refused and not self.ranks)
        if failures >= _MOST or self._stuck >= _MOST_AT_ONE_STEP or over:
            return Decision(Verdict.FAILED)
        if refused:
            return Decision(Verdict.DIED)
        self.replaced += 1
        promoted = None if place.spare else self._promote()
        place.spare = place.spare or promoted is not None
        self.enter(place)
        return Decision(Verdict.DIED, 2.0 ** (place.failures - 2) if place.failures > 1 else 0.0, promoted)

    def _promote(self) -> int | None:
        """Make a rank of the spare that has run for longest."""
        spares = [(p.started, n) for n, p in enumerate(self.places) if p.spare and p.member and p.started is not None]
        if not spares:
            return None
        _, number = min(spares)
        self.places[number].spare = False
        return number
