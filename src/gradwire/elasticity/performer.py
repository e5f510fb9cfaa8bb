"""`Performer`: performs what the commit protocol instructs, with the hub and with real groups.

Note [Two threads]
The thread that trains votes, commits, and applies views. Another one watches the hub, because the first may be computing, or wait
for a member that has died. All it does is to freeze the member: it aborts the group and publishes the member's standing. The thread
that trains finds that out at its next vote at the latest. Both take every step of the machine under one lock; what a step instructs
is done after it, in order. An abort comes before its publication on both: what one has frozen, the other may publish again.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

import torch

from gradwire.elasticity import machine
from gradwire.elasticity.device_vote import DeviceVote, vote_of_hosts
from gradwire.elasticity.quorum import Limits, Quorum
from gradwire.elasticity.run_errors import diverged, nobody_has_the_state, pause_after, silent_members, too_few, warn
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.training import Training
from gradwire.errors import CollectiveMismatch, Evicted, GroupAborted, GroupError, HookError, TooFewMembers, UsageError
from gradwire.groups.base import Group
from gradwire.groups.store.rendezvous import watching

_CHANGE = "the members of the run change"
_PAUSE, _WARN = 0.02, 5.0
_LOOK = 0.5
"""Seconds for which one look at the hub waits for news."""
_AWAY, _CLOSE, _TOLD = 6.0, 1.0, 4.0
"""Seconds for which a member waits for a hub that is away, when training ends or it is told to end, and when it has ended; and for
others to join when it is told to end."""

Build = Callable[[machine.View, str, RunRecords], Group]
"""Makes the group of a view, for the member of this id: all members call it at the same time."""


class Performer:
    """One process in one run."""

    def __init__(
        self, me: str, connect: Callable[[], RunRecords], build: Build, training: Training, limits: Limits
    ) -> None:
        """`connect` is called once for each thread."""
        self.member = machine.Member(me, min_ranks=limits.min_ranks, max_ranks=limits.max_ranks)
        self.left: str | None = None
        """Why this process is out of the run, once it is."""
        self._connect = connect
        self._records = connect()
        self._build = build
        self.training = training
        self._limits = limits
        self.quorum = Quorum(limits.quorum, limits.grace)
        self._lock = threading.Lock()
        self._present: tuple[int, Group | None] = (-1, None)
        self._lobby: tuple[str, ...] = ()
        self.leaving = False
        """Whether this process has been told to leave."""
        self._leave_voted = self._asks = False
        """Whether the last vote asks for a leave; whether the thread that trains asks the hub itself while it is frozen."""
        self.change_voted = False
        """Whether the last vote of the device asks for a change of members: it comes after the next one, which hosts count."""
        self._facts: list[int] = []
        self._failure: GroupError | None = None
        """Why the last view that failed before it began did so."""
        self._pending: DeviceVote | None = None
        """The vote of the device whose result is not known here yet. Meanwhile only the thread that trains publishes."""
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"gradwire-members-{me}", daemon=True)

    @property
    def view(self) -> machine.View:
        assert self.member.view is not None
        return self.member.view

    @property
    def frozen(self) -> bool:
        """Whether the members change: what is computed now may be dropped."""
        return not self.member.computing

    def leave(self) -> None:
        """Leave after the next step. May be called in a signal handler."""
        self.leaving = True
        self._records.hurry(_AWAY)

    def join(self, step: int) -> None:
        """Wait in the lobby until there is a view with this process. `step` is where a run begins of which it is the first."""
        records, me = self._records, self.member.me
        if records.facts(me).view is not None:
            raise UsageError(
                f"gw.elastic() in {me}: this process was in this run before, and a member that has left does not come back. Start "
                "another process, or a run of its own."
            )
        records.enter_lobby(me, self._limits.starters)
        self._watcher.start()
        deadline, version = time.monotonic() + self._limits.patience, -1
        while self.member.phase is machine.MemberPhase.LOBBY:
            hub = records.facts(me, after=version, wait=_LOOK)
            version, view = hub.version, hub.view
            if hub.complete:
                view = records.first_view(self.member, hub.here, step)
            if view is not None:
                self._react(lambda member, view=view: member.look(machine.HubState({}, next=view)))  # type: ignore[misc]
            elif self.leaving or hub.ended:
                self._stop(machine.Stop("it has left" if self.leaving else "training has ended"))
            elif hub.lost is not None:
                raise nobody_has_the_state(me, hub.lost)
            elif hub.last is not None and not hub.away:
                deadline = time.monotonic() + self._limits.patience  # it may be needed later
            elif time.monotonic() > deadline:
                here = ", ".join(hub.here) + "; no member of the run can be reached" * hub.away
                raise TooFewMembers(
                    f"joining the run as {me}: no view with it in {self._limits.patience:.3g} s. In the lobby: {here}. Look at the "
                    "output of the members, or raise patience=."
                )
        self.settle()

    def lost(self) -> None:
        """The group has failed here."""
        self._react(lambda member: member.lost(member.epoch))

    def vote(self, facts: list[int], device: torch.device | None = None) -> None:
        """This member has all averages: vote, and commit the step, or change the members and commit or drop it. `facts` must be
        the same on all members. With a `device` that has enqueued the averages, it votes: see `resolve`."""
        self._facts = facts
        group = self._present[1]
        if device is not None and group is not None:
            self._pending = DeviceVote(group, device, facts, self._wants)
        self._react(machine.Member.averaged)
        self.settle()

    @property
    def pending(self) -> bool:
        """Whether the result of a vote of the device is not known yet."""
        return self._pending is not None

    def resolve(self) -> None:
        """Wait for the result of a vote of the device: the step is committed, or this member is frozen, and `settle` goes on."""
        vote = self._pending
        if vote is None:
            return
        if not vote.ended:
            try:
                vote.wait(self.check_group)
            except GroupError:
                self.lost()
                vote.wait(self.check_group)
        if vote.passed:
            self._pending, self.change_voted = None, vote.wants
            self._react(lambda member: member.resolved(passed=True, prepared=True))
        elif vote.complete:
            raise diverged(self.member)
        else:
            self.lost()

    def check_group(self) -> bool:
        """Freeze if the group has failed. Whether this member is frozen."""
        group = self._present[1]
        if group is not None and group.failure is not None:
            self.lost()
        return self.frozen

    def settle(self) -> None:
        """If the members change, wait until there is a view whose group works."""
        if not self.check_group():
            return  # one that freezes from here on has not waited for its pending vote
        self.resolve()
        if (vote := self._pending) is not None:
            self._pending = None
            self.training.reopen()
            self._react(lambda member: member.resolved(passed=False, prepared=vote.prepared))
        self._asks = True
        try:
            self._change_members()
        finally:
            self._asks = False

    def _change_members(self) -> None:
        published, version, failed, begun = -2, -1, 0, time.monotonic()
        warned, deadline, told = begun + _WARN, begun + self._limits.patience, math.inf
        while self.member.phase is machine.MemberPhase.FROZEN:
            epoch, hub, facts, away = self.member.epoch, machine.HubState({}), None, False
            try:
                if published != epoch:
                    for instruction in self.member.freeze()[1]:
                        self._perform(instruction, self._records)
                    published, version = epoch, -1
                version, hub = self._records.look(epoch, after=version, wait=_LOOK)
                facts = None if self.member.holds else self._records.facts(self.member.me)
            except GroupError as error:
                away, self._failure = True, error
                time.sleep(_PAUSE)
            if facts is not None and facts.ended:
                self.come_too_late()
                break
            if facts is not None and facts.lost is not None:
                raise nobody_has_the_state(self.member.me, facts.lost)
            todo = self._react(lambda member, hub=hub: member.look(hub))  # type: ignore[misc]
            if self.member.epoch != epoch and self.frozen:
                failed += 1
                pause_after(failed, self.member.me, self._failure, self._limits.patience)
            waits_for_joiners = not todo and not silent_members(self.member, hub)
            if waits_for_joiners and not (away or self.leaving) and self.frozen and time.monotonic() > warned:
                warned = math.inf
                warn(self.member, deadline - time.monotonic())
            now = time.monotonic()
            told = min(told, now if self.leaving else math.inf)
            late = now > deadline or (self.leaving and (away or (waits_for_joiners and now > told + _TOLD)))
            if late and self.member.phase is machine.MemberPhase.FROZEN:
                self._react(lambda member, hub=hub: member.give_up(hub))  # type: ignore[misc]
                raise too_few(self.member, hub, None if self.leaving else self._limits.patience) from self._failure

    def end(self) -> None:
        """Training has ended on all members."""
        self._records.hurry(_AWAY)
        with contextlib.suppress(GroupError):
            self._records.end(self.member.step)

    def close(self, timeout: float = 5.0) -> None:
        """Take no part any more."""
        self._closed.set()
        self._records.hurry(_CLOSE)
        with contextlib.suppress(GroupError):
            self._records.mark(self.member.me, gone=True)
        self._records.close()
        if self._watcher.ident is not None:
            self._watcher.join(timeout)
        self._exchange(-1, None)

    def _react(self, event: Callable[[machine.Member], machine.Reaction]) -> tuple[machine.Instruction, ...]:
        with self._lock:
            self.member, todo = event(self._told())
        for instruction in todo:
            if not isinstance(instruction, machine.Publish):  # `settle` does: a backward must not wait for the hub
                self._perform(instruction, self._records)
        return todo

    def _told(self) -> machine.Member:
        """Before a standing is published that says otherwise: whether it leaves. While it computes, none says so yet."""
        member = self.member._replace(leaving=self.member.leaving and not self.member.computing)
        return member.leave()[0] if self.leaving and self.training.may_leave else member

    def _watch(self) -> None:
        records, epoch, version = self._connect(), -2, -1
        while not self._closed.is_set():
            if self._asks and self.frozen:
                self._closed.wait(_PAUSE)
                continue
            if epoch != self.member.epoch:
                epoch, version = self.member.epoch, -1
            try:
                version, hub = records.look(epoch, after=version, wait=_LOOK)
                self.quorum.count(self.member, records)
            except (GroupError, UsageError):  # or it has another key now
                self._closed.wait(_PAUSE)
                continue  # training goes on without it
            self._lobby = tuple(one for one in hub.lobby if one not in hub.gone)
            with self._lock:
                if self.frozen or self.member.epoch != epoch:
                    continue
                member = self._told()
                self.member, todo = member.lost(epoch) if hub.next is not None else member.look(hub)
                publishes = self._pending is None
            try:
                for instruction in todo:
                    if publishes or not isinstance(instruction, machine.Publish):
                        self._perform(instruction, records)
            except (GroupError, UsageError):
                continue  # the thread that trains publishes it when the hub is back
        records.close()

    def _perform(self, instruction: machine.Instruction, records: RunRecords) -> None:
        match instruction:
            case machine.Abort(epoch):
                here, group = self._present
                if here == epoch and group is not None:
                    if (vote := self._pending) is not None:
                        vote.clear()
                    group.abort(_CHANGE)
                    self.training.joins.abort()
                    group.abort_device()
            case machine.Publish(epoch, standing):
                records.publish(epoch, self.member.me, standing)
            case machine.Vote():
                self._vote(instruction)
            case machine.Propose(view):
                try:
                    recorded = records.propose(view)
                except GroupError:
                    return  # the hub is away: `settle` decides again when it is back
                self._react(lambda member: member.look(machine.HubState({}, next=recorded)))
            case machine.Commit():
                self.training.commit()
                if self._leave_voted:
                    self._leave_voted = False
                    with contextlib.suppress(GroupError):  # then it is lost, as in a crash
                        self.training.hand_over(self.member.leaving)
            case machine.Drop():
                self.training.drop()
            case machine.Enter(view):
                self._enter(view)
            case machine.Stop():
                self._stop(instruction)

    @property
    def _wants(self) -> list[int]:
        """Whether this member wants others to join, or to compute itself; and whether it wants to leave."""
        joins = bool(self._lobby) and len(self.view.members) < (self.member.max_ranks or len(self.view.members) + 1)
        return [int(joins or self.training.joins.lag is not None), int(self.member.leaving or self.leaving)]

    def _vote(self, vote: machine.Vote) -> None:
        group = self._present[1]
        assert group is not None
        if (pending := self._pending) is not None:
            with self._lock:
                if self.member.computing:  # else the group may have been aborted already, and with it the averages
                    pending.arm()
            try:
                self.training.commit_behind(pending.cast())
            except GroupError:
                self.lost()
            return
        self.change_voted = False
        holds = self.member.holds
        try:
            join, leave, behind, agree = vote_of_hosts(group, self._wants, self._facts, holds=holds)
            if holds and not agree:
                raise diverged(self.member)
        except GroupError as error:
            if isinstance(error, CollectiveMismatch):
                raise
            self.lost()
            return
        self._leave_voted = bool(leave)
        arrived = not holds and self.training.joins.lag == 0
        if arrived and agree:
            self._react(machine.Member.received)
        self._react(lambda member: member.voted(vote.epoch, change=bool((join and not behind) or leave)))
        if arrived and not agree:
            self.training.joins.begin_again()
            self.lost()

    def _enter(self, view: machine.View) -> None:
        self.training.follow(view)
        try:
            with watching(lambda: GroupAborted(_CHANGE, reason=_CHANGE) if self.frozen else None):
                group = self._build(view, self.member.me, self._records)
                self._exchange(view.epoch, group)
                self._lobby = ()
                if self.frozen:
                    group.abort(_CHANGE)
                self.training.enter(view, group)
        except GroupError as error:
            if isinstance(error, CollectiveMismatch):
                raise
            self._failure = error
            self.lost()
            return
        if not self.member.holds and self.training.joins.lag is None:
            self._react(machine.Member.received)

    def received(self) -> None:
        """The others have waited until this member has the state: it computes with them in the next view."""
        self._react(machine.Member.received)
        self.lost()

    def come_too_late(self, *, if_ended: bool = False) -> bool:
        """Training has ended before this member has computed in it. `if_ended`: that is not known, and the hub is asked."""
        ended = not if_ended
        with contextlib.suppress(GroupError):
            ended = ended or self._records.facts(self.member.me).ended
        if ended:
            self.left = "training has ended"
            with self._lock:
                self.member = self.member._replace(phase=machine.MemberPhase.OUT, holds=False)
        return ended

    def _exchange(self, epoch: int, group: Group | None) -> None:
        (_, old), self._present = self._present, (epoch, group)
        if old is not None:
            with contextlib.suppress(HookError):
                old.close(0.0)

    def _stop(self, stop: machine.Stop) -> None:
        self.left = stop.why
        with self._lock:
            self.member = self.member._replace(phase=machine.MemberPhase.OUT)
        if self.member.leaving or self.leaving:
            self._records.leave(self.member.me)
            if stop.last:
                raise TooFewMembers(
                    f"{self.member.me} leaves after step {self.member.step}, as do all others who have the state: nobody goes on."
                )
        elif self.member.view is not None:
            raise Evicted(f"{self.member.me}: {stop.why}. Start it again: it joins with the state of the others.")
