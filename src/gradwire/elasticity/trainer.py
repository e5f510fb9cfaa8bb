"""What a `Performer` is given: what is trained, how the group of a view is made, and with how many members a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradwire.elasticity import machine
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.stream import Joins
from gradwire.groups.base import Group

Build = Callable[[machine.View, str, RunRecords], Group]
"""Makes the group of a view, for the member of this id: all members call it at the same time."""


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


class Trainer(Protocol):
    """What is trained: called by the thread that trains, in the order that the protocol asks for."""

    @property
    def may_leave(self) -> bool:
        """Whether nothing is lost if this member leaves with a change of members that nobody has voted for."""

    def commit(self) -> None:
        """Step the optimizer with the averages."""

    def commit_behind(self, closed: Tensor) -> None:
        """Step the optimizer unless this flag on the device is 1, and begin the next step. `commit` follows when it was not."""

    def reopen(self) -> None:
        """The gate was closed: have the averages again, and forget what was begun after them."""

    def drop(self) -> None:
        """Have everything as it was when the step began."""

    def hand_over(self, leaving: bool) -> None:
        """Some members leave: one that stays takes on what they owe. A collective of the old view."""

    joins: Joins

    def follow(self, view: machine.View) -> None:
        """This view comes next, whether or not its group can be made: called for every view with this member, in order."""

    def enter(self, view: machine.View, group: Group) -> None:
        """Use this group; give the state to the fresh members of the view, or receive it."""
