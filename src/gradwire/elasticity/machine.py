"""The commit protocol of one member: events in, instructions out, no I/O. A `Member` is a value, so that a search can try every
order of events (`tests/helpers/protocol_search.py`).

Note [Commit]
A step is computed in a *view*: an epoch, its members in rank order, and the number of steps committed before it. A member is
*prepared* when it has the average of every bucket. Then it votes, in one collective of all members, and commits when the vote is
over: so nobody commits a step for which a member was not prepared. When a member is lost, the others *freeze*: they abort the group
of the view, and then publish their standing (how many steps they have committed, whether they are prepared for the next one). The
next view is decided by the standings of all members that are not gone. If anybody, dead or alive, has committed a step, then all
were prepared for it, so all survivors have its averages and commit it now: forward. Else nobody has, and it is computed again.
A member that leaves is a survivor of the last view that has it: it goes forward with the others before it stops.

A member that has not received the state yet takes part all the same: it contributes zeros, keeps the averages, and votes. So it
counts as the others for what is committed, and not for what can be committed now: see Note [Stream] in `stream.py`.

Two conditions carry this. A member aborts before it publishes, so that a vote that ends late cannot commit what the others retry.
And a view is a record at the hub that is set once and contains the decision; members apply the records in order. No commit needs
the hub: while it is away, training goes on, and only the members cannot change.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from gradwire.errors import InternalError


class View(NamedTuple):
    """Who trains together, and from where. It is recorded once and never changes."""

    epoch: int
    members: tuple[str, ...]
    """In rank order: survivors keep theirs, joiners come last. An id is never used again."""
    step: int
    """How many steps are committed when the view begins. A survivor with fewer commits the one for which it is prepared."""
    fresh: tuple[str, ...] = ()
    """Members that begin without state and receive it from one that has it."""
    begins: bool = False
    """Whether nothing was committed before. If then a member dies that was to give its state to the others, and none of them has it
    yet, nothing is lost: another one takes its place. (One without the state was not prepared, so no step was committed.)"""


class Standing(NamedTuple):
    """Where a member was when it froze."""

    step: int
    """How many steps it has committed."""
    prepared: bool
    """Whether it has the averages of the next one."""
    holds: bool = True
    """Whether it has the state of the model; a joiner has not until it has received it, and caught up."""
    leaving: bool = False


class HubState(NamedTuple):
    """What the hub knows that concerns the members of one view."""

    standings: Mapping[str, Standing]
    gone: frozenset[str] = frozenset()
    """Processes that have ended, and those on hosts that are out of reach for longer than their lease. Such a host may come back:
    its processes are out only once a view is recorded without them."""
    lobby: tuple[str, ...] = ()
    """Processes that are ready to join."""
    next: View | None = None
    """The view that follows."""


class MemberPhase(Enum):
    LOBBY = "in the lobby"
    OPEN = "computing"
    PREPARED = "prepared"
    FROZEN = "frozen"
    OUT = "out"


class Vote(NamedTuple):
    """Submit the vote on this step to the group of this epoch."""

    epoch: int
    step: int


class Abort(NamedTuple):
    """Abort the group of this epoch. Nothing that ends in it later counts."""

    epoch: int


class Publish(NamedTuple):
    """Publish this standing for the change that ends the epoch."""

    epoch: int
    standing: Standing


class Propose(NamedTuple):
    """Record this view, unless another one of its epoch is recorded. The first one counts."""

    view: View


class Commit(NamedTuple):
    """Step the optimizer with the averages; what hooks and data have changed since the last step becomes final."""

    step: int


class Drop(NamedTuple):
    """Forget what was computed of this step; it will be computed again."""

    step: int


class Enter(NamedTuple):
    """Make the group of this view; give the state to its fresh members, or receive it."""

    view: View


class Stop(NamedTuple):
    """This member is not in the next view: it has left, or was taken for dead."""

    why: str
    last: bool = False
    """Whether nobody goes on who has the state."""


Instruction = Vote | Abort | Publish | Propose | Commit | Drop | Enter | Stop
Reaction = tuple["Member", tuple[Instruction, ...]]


class Member(NamedTuple):
    """One process in one run. Every method takes an event and returns the member after it, with what is to be done, in order."""

    me: str
    view: View | None = None
    phase: MemberPhase = MemberPhase.LOBBY
    step: int = 0
    """How many steps it has committed."""
    prepared: bool = False
    """Whether it has the averages of the next one. Its phase when it froze."""
    holds: bool = False
    leaving: bool = False
    min_ranks: int = 1
    max_ranks: int | None = None

    @property
    def computing(self) -> bool:
        return self.phase in (MemberPhase.OPEN, MemberPhase.PREPARED)

    @property
    def epoch(self) -> int:
        return -1 if self.view is None else self.view.epoch

    def received(self) -> Reaction:
        """This member has the state of the step."""
        return (self._replace(holds=True) if self.computing else self), ()

    def averaged(self) -> Reaction:
        """This member has the average of every bucket of the step."""
        # Before the first commit there is nothing with which to catch up.
        waits = self.view is not None and self.view.begins and not self.holds
        if self.phase is not MemberPhase.OPEN or waits:
            return self, ()
        return self._replace(phase=MemberPhase.PREPARED, prepared=True), (Vote(self.epoch, self.step),)

    def voted(self, epoch: int, *, change: bool) -> Reaction:
        """The vote on the step has ended: all members were prepared. `change`: somebody wants the members to change."""
        if self.phase is not MemberPhase.PREPARED or epoch != self.epoch:
            return self, ()  # late, after an abort: it does not count, see [Commit]
        member = self._replace(phase=MemberPhase.OPEN, prepared=False, step=self.step + 1)
        commit = (Commit(self.step),)
        if not change:
            return member, commit
        member, frozen = member.freeze()
        return member, commit + frozen

    def resolved(self, *, passed: bool, prepared: bool) -> Reaction:
        """A vote that the device has counted is over, perhaps after this member was frozen, before it has published its standing:
        see [Gate] in `device_vote.py`."""
        if not passed:
            member = self._replace(prepared=prepared)
            return member.freeze() if member.computing else (member, ())
        phase = MemberPhase.OPEN if self.computing else self.phase
        return self._replace(phase=phase, prepared=False, step=self.step + 1), (Commit(self.step),)

    def lost(self, epoch: int) -> Reaction:
        """The group of this epoch has failed here."""
        return self.freeze() if self.computing and epoch == self.epoch else (self, ())

    def leave(self) -> Reaction:
        """This process has been told to end: it leaves with the next change of members, which its vote asks for."""
        return self._replace(leaving=True), ()

    def look(self, hub: HubState) -> Reaction:
        """What the hub knows of the present view; for a process in the lobby, `next` is the view that has it, if there is one."""
        if hub.next is not None:
            return self._apply(hub.next)
        if self.view is None:
            return self, ()
        if self.computing:
            alarmed = hub.standings or not hub.gone.isdisjoint(self.view.members)
            return self.freeze() if alarmed else (self, ())
        if self.phase is MemberPhase.FROZEN:
            return self._decide(hub)
        return self, ()

    def freeze(self) -> Reaction:
        """Nothing of the view counts from here on. Once more, for a member that is frozen: the same."""
        standing = Standing(self.step, self.prepared, self.holds, self.leaving)
        return self._replace(phase=MemberPhase.FROZEN), (Abort(self.epoch), Publish(self.epoch, standing))

    def _decide(self, hub: HubState) -> Reaction:
        """Propose the next view when every member of this one is frozen or gone."""
        assert self.view is not None
        if any(m not in hub.standings and m not in hub.gone for m in self.view.members):
            return self, ()
        here = {m: hub.standings[m] for m in self.view.members if m not in hub.gone}
        joiners = [m for m in hub.lobby if m not in hub.gone and m not in self.view.members]
        leavers = {m for m, standing in hub.standings.items() if standing.leaving}
        stay = [m for m in here if m not in leavers]
        joiners = joiners[: None if self.max_ranks is None else max(0, self.max_ranks - len(stay))]
        stay += joiners
        holders = [m for m in here if here[m].holds]
        if stay and holders and leavers.issuperset(holders):
            stay = [*here, *joiners]  # a leaver that alone has the state gives it to the others first
        step = max((standing.step for standing in hub.standings.values()), default=0)
        if len(stay) < self.min_ranks or not (holders or self.view.begins):
            # A leaver need not wait. If it was told to leave after it froze, others may count on its state.
            nobody = leavers.issuperset(holders)
            return self._stop(step, last=nobody) if self.me in leavers and self.me not in stay else (self, ())
        step = _decided(hub, here)
        fresh = tuple(m for m in stay if m not in (holders or stay[:1]))
        begins = self.view.begins and step == self.view.step
        return self, (Propose(View(self.epoch + 1, tuple(stay), step, fresh, begins)),)

    def give_up(self, hub: HubState) -> Reaction:
        """There will be no next view: be at the step at which it would have begun, as far as is known."""
        here = {m: standing for m, standing in hub.standings.items() if m not in hub.gone}
        return self._settle(_decided(hub, here))

    def _apply(self, view: View) -> Reaction:
        if self.view is None:
            if self.me not in view.members:
                return self, ()  # still in the lobby
            return self._in(view), (Enter(view),)
        if view.epoch != self.epoch + 1 or self.phase is MemberPhase.OUT:
            raise InternalError(f"view {view.epoch} after {self.epoch} on {self.me}, {self.phase.value}", story=[])
        if self.me not in view.members:
            return self._stop(view.step)
        member, before = self._settle(view.step)
        if member.holds and member.step != view.step:
            raise InternalError(f"{self.me} is to commit {view.step - 1}, and is at {self.step}", story=[])
        return member._in(view), (*before, Enter(view))

    def _in(self, view: View) -> Member:
        holds = self.holds or self.me not in view.fresh
        return self._replace(view=view, phase=MemberPhase.OPEN, step=view.step, holds=holds)

    def _stop(self, step: int, *, last: bool = False) -> Reaction:
        member, before = self._settle(step)
        why = "it has left" if self.leaving else "the others go on without it, since it was taken for dead"
        return member._replace(phase=MemberPhase.OUT), (*before, Stop(why, last))

    def _settle(self, step: int) -> Reaction:
        """So many steps are committed: commit the one for which this member is prepared if it is one of them, or drop it."""
        before: tuple[Instruction, ...] = () if self.phase is MemberPhase.FROZEN else (Abort(self.epoch),)
        if self.holds and self.prepared and self.step + 1 == step:
            return self._replace(prepared=False, step=step), (*before, Commit(self.step))
        return self._replace(prepared=False), (*before, Drop(self.step))


def _decided(hub: HubState, here: Mapping[str, Standing]) -> int:
    """How many steps are committed when these go on: one more than anybody has committed if all are prepared for it."""
    step = max((standing.step for standing in hub.standings.values()), default=0)
    holders = [standing for standing in here.values() if standing.holds]
    return step + bool(holders and all(standing.prepared and standing.step == step for standing in holders))
