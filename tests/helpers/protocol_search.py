"""Exhaustive search: every order of events of a few members, with crashes, a cut between hosts, restarts of the hub, late votes,
joiners and leavers. What the members do is decided by the real `Member`; the network and the hub are modelled here.

A collective ends on a member at any time after all members of the view have contributed, or never, and so does what it asks of
the hub: to be slow, or cut off, or without a hub for a while, is the same as to come last. A joiner contributes at once, and gets
the state of when its view began at any time, or never; it has what it has committed meanwhile. So what a cut adds is that any
group may fail and any process may be taken for gone, until it heals; and what a restart of the hub adds is a request that was
carried out without the sender's knowledge, which is repeated. A member that dies before it has sent its gradients is to the others
like one whose averages come late, so here they are sent at once; and one that is frozen and has not published yet is like one that
is slow, so here it publishes at once. Records are set once, so one that looks at an old state of the hub is slow too. In the story
of a violation, names may be exchanged between two events: see `alike`.

Votes of the device (Note [Gate] in `device_vote.py`) have two actors. The host enqueues one, clears its row and aborts when the
member freezes, and learns the result late. The device copies the row at any time after the averages are there, and steps at any
time after all rows were copied, even after the abort; or it drains after the abort, and from then on it does nothing.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from gradwire.elasticity.machine import (
    Abort,
    Commit,
    Drop,
    Enter,
    HubState,
    Instruction,
    Member,
    MemberPhase,
    Propose,
    Publish,
    Standing,
    Stop,
    View,
    Vote,
)
from gradwire.errors import InternalError

History = tuple[View, ...]
"""Of each committed step, the view whose members averaged it."""


class Ballot(NamedTuple):
    """A vote of the device, enqueued by a host that does not know the result yet."""

    armed: bool = True
    """Whether the row is whole that the device will copy."""
    copied: bool = False
    """Whether the device has copied it whole."""
    aborted: bool = False
    passed: bool = False
    """Whether the gate was open, so that the step is committed."""


class Process(NamedTuple):
    """A member, with what the model must know of it."""

    member: Member
    alive: bool = True
    history: History = ()
    averages: View | None = None
    """The view in which the averages that it holds were made."""
    todo: Propose | None = None
    """What the hub has not received yet."""
    kept: History = ()
    """The history of this view, of a member that does not hold the state."""
    hub: int = 0
    ballot: Ballot | None = None


class Hub(NamedTuple):
    """Records. There is one hub, except where a mutant elects another."""

    views: tuple[View, ...]
    standings: frozenset[tuple[int, str, Standing]] = frozenset()
    gone: frozenset[str] = frozenset()
    lobby: frozenset[str] = frozenset()

    def board(self, epoch: int) -> HubState:
        following = [view for view in self.views if view.epoch == epoch + 1]
        waiting = tuple(sorted(self.lobby - {m for view in self.views for m in view.members}))
        standings = {m: s for e, m, s in self.standings if e == epoch}
        return HubState(standings, self.gone, waiting, following[0] if following else None)


class World(NamedTuple):
    processes: tuple[Process, ...]
    hubs: tuple[Hub, ...]
    contributed: frozenset[tuple[View, int, str, str]] = frozenset()
    """(view, step, "average" or "vote" or what the vote asks for, who)"""
    crashes: int = 0
    leaves: int = 0
    cut: frozenset[str] | None = None
    """While the network is cut: the processes that are separated from the first hub; empty if it may be any."""
    cuts: int = 0
    restarts: int = 0


class Violation(AssertionError):
    """The protocol does not hold."""


@dataclass
class Limits:
    ranks: int = 3
    joiners: int = 0
    steps: int = 1
    crashes: int = 1
    leaves: int = 0
    cuts: int = 0
    restarts: int = 0
    views: int = 1
    """How many groups in succession may fail although all their members are alive."""
    min_ranks: int = 1
    gated: int = 0
    """On how many steps, from the first one, the device votes; hosts on the others."""


class Search:
    """All worlds that can be reached. `kind` is the machine; `elects`: the first member is cut off, and has elected a
    hub of its own. With votes of the device: `clears` the row before the abort, and `drains` the device before it publishes."""

    def __init__(
        self,
        limits: Limits,
        *,
        kind: type[Member] = Member,
        elects: bool = False,
        clears: bool = True,
        drains: bool = True,
    ) -> None:
        self.limits = limits
        self.elects, self.clears, self.drains = elects, clears, drains
        names = [f"r{i}" for i in range(limits.ranks)]
        first = View(0, tuple(names), 0)
        begun = [Process(kind(name, first, MemberPhase.OPEN, holds=True, min_ranks=limits.min_ranks)) for name in names]
        begun += [Process(kind(f"j{i}", min_ranks=limits.min_ranks)) for i in range(limits.joiners)]
        given = frozenset((first, 0, "average", name) for name in names)
        self.first = World(tuple(begun), (Hub((first,)),), given, limits.crashes, limits.leaves, None, limits.cuts,
                           limits.restarts)  # fmt: skip
        if elects:
            standing_by = (begun[0]._replace(hub=1), *begun[1:])
            hubs, cut = (Hub((first,)), Hub((first,))), frozenset(names[:1])
            self.first = self.first._replace(processes=standing_by, hubs=hubs, cut=cut)

    def run(self) -> int:
        """How many worlds there are; raises Violation with the way to the first bad one."""
        came_from: dict[World, tuple[World, str] | None] = {self.first: None}
        queue = deque([self.first])
        at: World | None = self.first
        try:
            while queue:
                at = world = queue.popleft()
                same = forget if self.elects else lambda world: alike(forget(world))
                actions = [(what, same(after)) for what, after in self.actions(world)]
                if all(after == world for _, after in actions):
                    self.check_end(world)  # faults may come, but they need not
                for what, after in (*actions, *((what, same(after)) for what, after in self.faults(world))):
                    if after not in came_from:
                        came_from[after] = (world, what)
                        at = after
                        self.check(after)
                        at = world
                        queue.append(after)
        except (AssertionError, InternalError) as error:
            story = [f"{error}"]
            while at is not None and came_from[at] is not None:
                at, what = came_from[at]  # type: ignore[misc]
                story.append(what)
            raise Violation("\n".join(reversed(story))) from error
        return len(came_from)

    # -- what may happen -----------------------------------------------------------------------------------------------

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        for i, process in enumerate(world.processes):
            if process.alive and process.member.phase is not MemberPhase.OUT:
                yield from self._member_acts(world, i, process)
        yield from self._detected(world)

    def _member_acts(self, world: World, i: int, process: Process) -> Iterator[tuple[str, World]]:
        me, member, view = process.member.me, process.member, process.member.view
        if view is not None:
            step = member.step
            done = {(kind, who) for v, s, kind, who in world.contributed if v == view and s == step}
            yield from self._computes(world, i, process)
            if gated := self._by_device(view, step):
                yield from self._gated(world, i, process, done)
            for kind in () if gated else ("average", "vote"):
                if (kind, me) in done and all((kind, m) in done for m in view.members):
                    # Perhaps late: the member may have frozen in the meantime.
                    if kind == "average":
                        after, reaction = process._replace(averages=view), member.averaged()
                    else:
                        asked = {kind for kind, _ in done}
                        change = "leave" in asked or ("join" in asked and "behind" not in asked)
                        after, reaction = process, member.voted(view.epoch, change=change)
                    if reaction != (member, ()):
                        yield f"{me}: the {kind} of step {step} ends", self._react(world, i, after, reaction)
            for earlier in {c[0] for c in world.contributed if c[0].epoch < view.epoch and me in c[0].members}:
                reaction = member.voted(earlier.epoch, change=False)
                if reaction != (member, ()):
                    yield f"{me}: a vote of view {earlier.epoch} ends", self._react(world, i, process, reaction)
        yield from self._at_hub(world, i, process)

    def _by_device(self, view: View, step: int) -> bool:
        return step < self.limits.gated and not view.fresh

    def _gated(self, world: World, i: int, process: Process, done: set[tuple[str, str]]) -> Iterator[tuple[str, World]]:
        """What host and device do about a vote of the device. `done`: what was contributed to this step."""
        member, ballot, me, step = process.member, process.ballot, process.member.me, process.member.step
        assert member.view is not None
        if ballot is None:
            if member.averaged() != (member, ()):
                yield f"{me}: enqueues the vote on step {step}", self._react(world, i, process, member.averaged())
            return
        averaged, voted = (all((kind, m) in done for m in member.view.members) for kind in ("average", "vote"))
        if ballot.armed and averaged and not (ballot.copied or ballot.aborted):
            copied = process._replace(averages=member.view, ballot=ballot._replace(copied=True))
            after = contribute(put(world, i, copied), member.view, step, "vote", me)
            yield f"{me}: the device copies the row of step {step}", after
        if ballot.copied and voted and not ballot.passed:
            assert process.averages is not None, f"the device of {me} commits {step} without averages"
            stepped = process._replace(
                history=(*process.history, process.averages), ballot=ballot._replace(passed=True)
            )
            yield f"{me}: the device commits step {step}", put(world, i, stepped)
        if ballot.passed or ballot.aborted:
            prepared = ballot.copied or ballot.armed  # what is whole is copied, with averages or without
            member, todo = member.resolved(passed=ballot.passed, prepared=prepared)
            if member.phase is MemberPhase.FROZEN:
                todo += member.freeze()[1]
            known = process._replace(averages=None if ballot.passed else process.averages, ballot=None)
            todo = tuple(one for one in todo if not isinstance(one, Commit))  # the device has done that
            yield f"{me}: the device is past the vote on step {step}", self._react(world, i, known, (member, todo))

    def _computes(self, world: World, i: int, process: Process) -> Iterator[tuple[str, World]]:
        member, view, me = process.member, process.member.view, process.member.me
        assert view is not None
        sent = self._sent(world, view)
        if not member.holds and sent is not None and member.received() != (member, ()):
            # Perhaps late, as above.
            received = process._replace(history=(*sent, *process.kept), kept=())
            yield f"{me} has the state", self._react(world, i, received, member.received())
        if not member.computing:
            return
        if any(not self._with_me(world, process, p) for p in world.processes if p.member.me in view.members):
            yield f"{me}: its group fails", self._react(world, i, process, member.lost(view.epoch))

    def _sent(self, world: World, view: View) -> History | None:
        """The state with which members have entered the view: they may have gone on or died since."""
        donors = (
            p for p in world.processes if p.member.view == view and p.member.holds and p.member.me not in view.fresh
        )
        return next((p.history[: view.step] for p in donors), None)

    def _with_me(self, world: World, me: Process, other: Process) -> bool:
        """Whether the other process is in the group of my view and can be reached."""
        split = (
            world.cut is not None
            and me.member.epoch < self.limits.views
            and (not world.cut or (me.member.me in world.cut) != (other.member.me in world.cut))
        )
        theirs, mine = other.member.epoch, me.member.epoch
        aborted = theirs > mine or (theirs == mine and not other.member.computing)
        return other.alive and other.member.phase is not MemberPhase.OUT and not split and not aborted

    def _at_hub(self, world: World, i: int, process: Process) -> Iterator[tuple[str, World]]:
        me, member, hub = process.member.me, process.member, world.hubs[process.hub]
        if process.ballot is not None and not member.computing:
            return  # it waits for the device
        if process.todo:
            if all(view.epoch != process.todo.view.epoch for view in hub.views):
                world = put_hub(world, process.hub, hub._replace(views=(*hub.views, process.todo.view)))
            yield f"{me}: {process.todo}", put(world, i, process._replace(todo=None))
            if world.restarts:
                yield f"{me}: {process.todo}, and the hub dies", world._replace(restarts=world.restarts - 1)
            return
        if member.phase is MemberPhase.LOBBY:
            if me not in hub.lobby:
                yield f"{me} is in the lobby", put_hub(world, process.hub, hub._replace(lobby=hub.lobby | {me}))
                return
            mine = [view for view in hub.views if me in view.members]
            if mine:
                yield f"{me} joins", self._react(world, i, process, member.look(HubState({}, next=mine[-1])))
            return
        board = hub.board(member.epoch)
        late = process.ballot is not None and board.next is not None  # see `Performer._watch`
        reaction = member.lost(member.epoch) if late else member.look(board)
        if reaction != (member, ()):
            yield f"{me} looks", self._react(world, i, process, reaction)

    def _detected(self, world: World) -> Iterator[tuple[str, World]]:
        names = {m for p in world.processes if p.member.view is not None for m in p.member.view.members}
        for process in world.processes:
            name, ended = process.member.me, not process.alive or process.member.phase is MemberPhase.OUT
            for h, hub in enumerate(world.hubs):
                if (ended or self._cut_off(world, h, name)) and name not in hub.gone and name in names:
                    yield f"hub {h}: {name} is gone", put_hub(world, h, hub._replace(gone=hub.gone | {name}))
                elif not ended and world.cut is None and name in hub.gone:
                    yield f"hub {h}: {name} is back", put_hub(world, h, hub._replace(gone=hub.gone - {name}))
        if world.cut is not None:
            yield "the cut heals", world._replace(cut=None)

    def faults(self, world: World) -> Iterator[tuple[str, World]]:
        for i, process in enumerate(world.processes):
            name, phase = process.member.me, process.member.phase
            if process.alive and phase is not MemberPhase.OUT and world.crashes:
                yield f"{name} dies", put(world._replace(crashes=world.crashes - 1), i, process._replace(alive=False))
            in_view = process.alive and phase not in (MemberPhase.OUT, MemberPhase.LOBBY)
            if in_view and world.leaves and not process.member.leaving:
                told = process._replace(member=process.member.leave()[0])
                yield f"{name} is told to leave", put(world._replace(leaves=world.leaves - 1), i, told)
        if world.cuts:
            yield "the network is cut", world._replace(cut=frozenset(), cuts=world.cuts - 1)

    def _cut_off(self, world: World, hub: int, name: str) -> bool:
        return world.cut is not None and (not world.cut or (name in world.cut) != bool(hub))

    def _react(self, world: World, i: int, process: Process, reaction: tuple[Member, tuple[Instruction, ...]]) -> World:
        member, todo = reaction
        process = process._replace(member=member)
        for one in todo:
            if isinstance(one, Vote) and member.view is not None and self._by_device(member.view, one.step):
                process = process._replace(ballot=Ballot())
            elif isinstance(one, Vote):
                view, me = member.view, member.me
                assert view is not None
                world = contribute(world, view, one.step, "vote", me)
                asks = {"leave": member.leaving, "behind": not member.holds,
                        "join": me in view.fresh or world.hubs[process.hub].board(view.epoch).lobby}  # fmt: skip
                for kind in (kind for kind, asked in asks.items() if asked):
                    world = contribute(world, view, one.step, kind, me)
            elif isinstance(one, Commit):
                assert process.averages is not None, f"{member.me} commits {one.step} without averages"
                where = "history" if member.holds else "kept"
                process = process._replace(averages=None, **{where: (*getattr(process, where), process.averages)})
            elif isinstance(one, Drop):
                process = process._replace(averages=None)
            elif isinstance(one, Abort) and process.ballot is not None:
                armed = process.ballot.armed and not self.clears
                process = process._replace(ballot=process.ballot._replace(armed=armed, aborted=True))
            elif isinstance(one, Publish) and process.ballot is not None and self.drains:
                continue
            elif isinstance(one, Publish):
                hub = world.hubs[process.hub]
                standing = one.epoch, member.me, one.standing
                world = put_hub(world, process.hub, hub._replace(standings=hub.standings | {standing}))
            elif isinstance(one, Propose):
                assert one.view.epoch < 12, "views follow one another without end"
                process = process._replace(todo=one)
            elif isinstance(one, Stop) and not self.limits.cuts:  # in a cut, a member may be taken for dead
                assert member.leaving, f"{member.me} is alive, and the others go on without it"
                hub = world.hubs[process.hub]
                view, standings = (
                    hub.board(member.epoch).next,
                    [s.step for e, _, s in hub.standings if e == member.epoch],
                )
                committed = max(standings) if view is None else view.step
                missing = member.holds and len(process.history) < committed
                assert not missing, f"{member.me} leaves without step {committed - 1}, which others have committed"
            elif isinstance(one, Enter):
                assert member.holds != (member.me in one.view.fresh), (
                    f"{member.me} holds the state: {member.holds}; {one}"
                )
                process = process._replace(kept=())
            else:
                assert isinstance(one, Abort | Stop)
        if member.computing and member.step < self.limits.steps:
            assert member.view is not None
            world = contribute(world, member.view, member.step, "average", member.me)
        return put(world, i, process)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self, world: World) -> None:
        """No two processes, dead or alive, have committed different averages as the same step."""
        longest = max((p.history for p in world.processes), key=len)
        for process in world.processes:
            view = process.member.view
            first = 0 if view is None or process.member.holds else view.step
            mine = process.history if process.member.holds or not first else process.kept
            if any(one != other for one, other in zip(mine, longest[first:], strict=False)):
                raise Violation(f"{process.member.me} has committed {mine}, and another {longest}")

    def check_end(self, world: World) -> None:
        """Nothing more happens by itself: all survivors have committed all steps, and whatever a dead one had; or they are too
        few, and none of them was told to leave, unless it alone has the state."""
        alive = [p for p in world.processes if p.alive and p.member.phase is not MemberPhase.OUT]
        members = [p for p in alive if p.member.phase is not MemberPhase.LOBBY]
        holders = [p for p in members if p.member.holds]
        if self.elects or not holders:
            assert self.elects or not members or world.crashes < self.limits.crashes, "nobody has the state any more"
            return
        few = len(alive) < self.limits.min_ranks
        for process in members:
            unfinished = len(process.history) < self.limits.steps
            if unfinished and (not few or (process.member.leaving and holders != [process])):
                raise Violation(
                    f"{process.member.me} is stuck {process.member.phase.value} after {process.member.step} steps"
                )


def forget(world: World) -> World:
    """Without what can no longer matter, so that worlds that differ in nothing else are one."""
    processes = tuple(
        p._replace(todo=None) if p.todo is not None and p.todo.view.epoch <= world.hubs[p.hub].views[-1].epoch else p
        if p.alive and p.member.phase is not MemberPhase.OUT
        else Process(Member(p.member.me, phase=MemberPhase.OUT), p.alive, p.history, hub=p.hub)
        for p in world.processes
    )  # fmt: skip
    views = {p.member.view for p in processes}
    first = min(
        (p.member.epoch for p in processes if p.member.phase not in (MemberPhase.OUT, MemberPhase.LOBBY)), default=0
    )
    hubs = []
    for hub in world.hubs:
        later = tuple(view for view in hub.views if view.epoch >= first)
        known = hub.lobby | {m for view in later for m in view.members}
        standings = frozenset(s for s in hub.standings if s[0] >= first)
        hubs.append(Hub(later, standings, hub.gone & known, hub.lobby))
    contributed = frozenset(c for c in world.contributed if c[0] in views)
    return world._replace(processes=processes, hubs=tuple(hubs), contributed=contributed)


def alike(world: World) -> World:
    """The world with its processes in a fixed order and named by it: those that differ in names only are one."""
    hub = world.hubs[0]
    given = Counter((who, kind, view.epoch) for view, _, kind, who in world.contributed)

    def looks(p: Process) -> tuple[object, ...]:
        m = p.member
        standing = sorted(s[::2] for s in hub.standings if s[1] == m.me)
        gave = sorted(key[1:] for key in given if key[0] == m.me)
        proposes = (
            (-1,) if p.todo is None else (p.todo.view.step, len(p.todo.view.members), m.me in p.todo.view.members)
        )
        return (m.me[0], p.alive, m.phase.value, m.epoch, m.step, m.prepared, m.leaving, m.holds, len(p.history), p.ballot or (),
                m.me in hub.gone, p.averages is None, standing, gave, proposes,
                [m.me in view.members for view in hub.views])  # fmt: skip

    order = sorted(world.processes, key=looks)
    names = sorted(p.member.me for p in world.processes)
    if [p.member.me for p in order] == names:
        return world
    new = {p.member.me: name for p, name in zip(order, names, strict=True)}

    @functools.cache
    def renamed(view: View) -> View:
        members, fresh = (tuple(sorted(new[m] for m in some)) for some in (view.members, view.fresh))
        return View(view.epoch, members, view.step, fresh)

    def process(p: Process) -> Process:
        m = p.member
        member = m._replace(me=new[m.me], view=None if m.view is None else renamed(m.view))
        averages = None if p.averages is None else renamed(p.averages)
        todo = None if p.todo is None else Propose(renamed(p.todo.view))
        history, kept = (tuple(map(renamed, some)) for some in (p.history, p.kept))
        return Process(member, p.alive, history, averages, todo, kept, ballot=p.ballot)

    def some(names: frozenset[str]) -> frozenset[str]:
        return frozenset(new[m] for m in names)

    standings = frozenset((e, new[m], s) for e, m, s in hub.standings)
    hub = Hub(tuple(map(renamed, hub.views)), standings, some(hub.gone), some(hub.lobby))
    contributed = frozenset((renamed(v), s, kind, new[who]) for v, s, kind, who in world.contributed)
    return world._replace(processes=tuple(map(process, order)), hubs=(hub,), contributed=contributed)


def put(world: World, i: int, process: Process) -> World:
    return world._replace(processes=(*world.processes[:i], process, *world.processes[i + 1 :]))


def put_hub(world: World, i: int, hub: Hub) -> World:
    return world._replace(hubs=(*world.hubs[:i], hub, *world.hubs[i + 1 :]))


def contribute(world: World, view: View, step: int, kind: str, who: str) -> World:
    return world._replace(contributed=world.contributed | {(view, step, kind, who)})


def main() -> None:
    """Search with the limits that are given."""
    parser = argparse.ArgumentParser(description="Every order of events of a few members of an elastic run.")
    for field in fields(Limits):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    limits = Limits(**vars(parser.parse_args()))
    print(f"{Search(limits).run():,} worlds, and the protocol holds in all: {limits}")


if __name__ == "__main__":
    main()
