"""`Limits`: with how many members a run goes on. `Quorum`: how long they wait for a slow one at the end of a round. Each records in
the hub that it is there; one that is not ends the round with the step that it is in, when enough others have waited for it. Without
the hub they wait until it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gradwire.elasticity.machine import Member
from gradwire.elasticity.run_records import RunRecords


@dataclass(frozen=True, slots=True)
class Limits:
    """With how many members a run goes on."""

    min_ranks: int = 1
    max_ranks: int | None = None
    starters: int = 0
    """With how many it begins, less those that have died; 0 for a process that joins later."""
    patience: float = 600.0
    """Seconds for which a member waits for others."""
    quorum: int = 0
    """How many members are at the end of a round when the others end it early; 0 for all."""
    grace: float = 0.0
    """How many seconds they wait before."""


class Quorum:
    """When `size` members are at the end of a round, they wait for `grace` seconds more; with a size of 0, for all."""

    def __init__(self, size: int, grace: float) -> None:
        self._size, self._grace = size, grace
        self.arrived = -1
        """The round at whose end this member is."""
        self._complete = (-1, 0.0)
        """The last round at whose end enough members were, and since when."""

    def late(self, number: int) -> bool:
        """Whether enough members have waited for this one at the end of the round."""
        complete, since = self._complete
        return complete == number and time.monotonic() >= since + self._grace

    def count(self, member: Member, records: RunRecords) -> None:
        """After each look at the hub, in the thread that watches it."""
        if not self._size or member.view is None:
            return
        if self.arrived == member.step:
            records.arrive(member.me, member.step)
        here = records.arrived(member.step).intersection(member.view.members)
        if len(here) >= self._size and self._complete[0] != member.step:
            self._complete = member.step, time.monotonic()
