"""`HierarchicalGroup`: shared memory in the host, any other group between hosts.

    group = HierarchicalGroup.discover(store, rank, size)     # finds the hosts, makes the parts
    group = HierarchicalGroup(inside, across)                 # or of parts that you have

`layout.py` says who is where and who talks to other hosts, `programs.py` what happens in a collective, `meeting.py` how ranks
learn of each other, `failures.py` what a part's error means for the whole.

Note [Three parts]
`inside` has the ranks of this host. `across` has, for each carrier, the ranks with its place in all hosts (see Note [Lanes]).
`messages`, if there is one, has all ranks in order, and carries sends and receives, also those within a host. They could go through
`inside` where both ends are on one host. But a receive from anybody would then have to wait in two groups at once, and an engine
cannot be asked to forget the receive that lost: it would swallow a later message. A sender does not know what its receiver has
asked for, so the way must depend on neither. Without `messages` a message goes through `inside` or `across` where both ends
are in it, and a receive from anybody is refused. A sub-group's `across` is made from `messages` as well.

Note [One failure]
A part that fails leaves ranks out of step, so the whole fails: here at once, in the other parts of this rank, and through them
on every rank that shares one, until all have heard. What failed first is written into the membership before that, so that all
ranks name the same lost rank, also those that share no part with it. Without a store there is no membership; then a rank that
shares no part with the lost one is told GroupAborted, and by whom. The whole also fails when one of its collectives has run out of
time: some of its steps may have been taken on some ranks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from gradwire.collectives import Collective, Layout, Scope, build
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import CollectiveTimeout, GroupAborted, GroupError, PeerLost, UsageError, again
from gradwire.events import is_kept
from gradwire.groups.base import DEFAULT_TIMEOUT, Group
from gradwire.groups.c10d import C10dGroup
from gradwire.groups.forked import finalize_here
from gradwire.groups.hierarchical.failures import bad_news, chained, for_part, told_by
from gradwire.groups.hierarchical.meeting import Build, ask_around, find_hosts
from gradwire.groups.hierarchical.programs import TwoLevel
from gradwire.groups.host import host_identity
from gradwire.groups.lane import Lane
from gradwire.groups.ledger import Arrivals
from gradwire.groups.membership import Membership
from gradwire.groups.shared_memory import SharedMemoryGroup
from gradwire.groups.work import Work

# An operation this old is looked into: are the peers alive, where are they?
_SUSPICIOUS_AGE = 0.3


class HierarchicalWork(Work):
    """A Work that knows how many collectives its rank had joined with it."""

    place = 0
    known: Arrivals | None = None
    """Who had joined when a part gave it up."""


class HierarchicalGroup(Group):
    """Ranks on several hosts. It owns its parts: closing it closes them."""

    layout: Layout

    def __init__(
        self,
        inside: Group,
        across: Group | None = None,
        *,
        messages: Group | None = None,
        rank: int | None = None,
        layout: Layout | None = None,
        store: Any = None,
        roll: Membership | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """`inside` holds the ranks of this host; `across`, on its first k ranks, those with the same rank in the `inside` of
        every host, numbered by host; on the others it is None. k is the same on all hosts: 1 for a leader each, all where hosts
        are alike. `messages` holds all ranks, in order.

        `rank` is this rank's number in the whole, where ranks are not to be numbered host by host. All that is asked of the
        other ranks and checked, unless `layout` says it. `store` is where all ranks can be told of a failure, in the
        membership `roll` if there is one already.
        """
        if layout is None:
            layout, rank = ask_around(inside, across, rank)
        elif rank is None:
            raise UsageError(f"{type(self).__name__}: a layout was given, and no rank. Say also which of them this is.")
        mates = layout.hosts[layout.place(rank)[0]]
        super().__init__(
            rank, layout.size, name=name or "hierarchical", timeout=inside.timeout if timeout is None else timeout
        )
        self.layout = layout
        self.inside = inside
        self.across = across
        if messages is None and len(layout.hosts) == 1 and mates == tuple(range(self.size)):
            messages = inside
        self.messages = messages
        self._store = store
        self._check_parts(mates)
        self._two_level = TwoLevel(layout, self.rank)
        self._members: dict[Group, tuple[int, ...]] = {inside: mates}
        if across is not None:
            self._members[across] = tuple(ranks[inside.rank] for ranks in layout.hosts)
        if messages is not None:
            self._members[messages] = tuple(range(self.size))
        for part in self._members:
            self.ledger.collect_hook_errors_of(part.ledger)
        if roll is None and store is not None:
            roll = Membership.over(store, self.rank, self.size)
        self._roll = roll
        self._joined = 0
        self._meetings: list[Callable[[float], None]] = []
        """Of a recovery that was not finished, those that are left."""
        self._lane = Lane(f"{self.name}-{self.rank}")
        self._order = threading.Lock()
        self._driving = threading.Lock()
        self._watchdog.on_tick.append(_weak_tick(self))
        # After the base class's finalizer was made, so that at exit this thread ends first.
        self._lane_finalizer = finalize_here(self, self._lane.stop, 2.0)
        try:
            self._meet()
        except BaseException:
            if self._roll is not None:
                self._roll.leave("failed before it began")
            raise

    @classmethod
    def discover(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        name: str | None = None,
        across: Build = C10dGroup.gloo,
        inside: Build = SharedMemoryGroup,
        host: str | None = None,
    ) -> HierarchicalGroup:
        """Find out through `store` which ranks share a host, and make the parts.

        `across(store, rank, size, timeout=…, name=…)` makes a group between hosts: gloo's unless you say otherwise; it is called
        for this rank's lane and for `messages`. `host` is what tells hosts apart, this machine's identity unless you say otherwise.
        """
        name = name or "hierarchical"
        timeout_seconds(f"HierarchicalGroup.discover of {name!r}", timeout)  # before anybody is waited for
        # Groups over one store are made in the same order on every rank, so they have the same number.
        base = f"gradwire/hierarchical/{store.add(f'gradwire/hierarchical/{rank}/groups', 1)}"
        layout = find_hosts(store, base, rank, size, host_identity() if host is None else host, timeout)
        number, index = layout.place(rank)
        with ExitStack() as made:

            def make(build: Build, part: str, at: int, of: int) -> Group:
                group = build(PrefixStore(f"{base}/{part}", store), at, of, timeout=timeout, name=f"{name}/{part}")
                made.callback(group.close, 0)
                return group

            one, several = make(inside, f"inside-{number}", index, len(layout.hosts[number])), len(layout.hosts) > 1
            lane = (
                make(across, f"across-{index}", number, len(layout.hosts)) if several and index < layout.width else None
            )
            flat = make(across, "messages", rank, size) if several else None
            group = cls(
                one,
                lane,
                messages=flat,
                rank=rank,
                layout=layout,
                name=name,
                timeout=timeout,
                store=PrefixStore(base, store),
            )
            made.pop_all()
        return group

    def _check_parts(self, mates: tuple[int, ...]) -> None:
        hosts = len(self.layout.hosts)
        carries = hosts > 1 and self.inside.rank < self.layout.width
        fits = {
            "inside": mates[self.inside.rank : self.inside.rank + 1] == (self.rank,) and self.inside.size == len(mates),
            "across": (self.across is not None and self.across.size == hosts) if carries else self.across is None,
            "messages": self.messages is None or (self.messages.rank, self.messages.size) == (self.rank, self.size),
        }
        for part, fit in fits.items():
            if not fit:
                raise UsageError(
                    f"{type(self).__name__}: {part} is {getattr(self, part)}, which does not fit rank {self.rank} of "
                    f"{self.layout}. See what the constructor asks of each of its groups."
                )

    def _meet(self) -> None:
        """Nobody has a group before everybody has: what a rank does first must not wait for another that is still being made."""
        for step in self._two_level.carry_out(build.barrier(label="all here?")):
            (self.inside if step.where == "inside" else self._lane_group()).submit_and_wait(
                step.op.within(self.timeout)
            )

    # -- the one verb --------------------------------------------------------------------------------------------------

    def submit(self, op: Collective) -> Work:
        """Put the operation's steps on the lane; hand a message on."""
        if op.kind.is_p2p:
            return self._pass_on(op)
        with self._order:
            work = self._begin(op)
            self._lane.put(lambda: self._take_turn(work))
        return work

    def submit_and_wait(self, op: Collective) -> Work:
        """Take the steps in this thread, unless others are under way."""
        if op.kind.is_p2p:
            return super().submit_and_wait(op)
        with self._order:
            work = self._begin(op)
            here = self._lane.idle and self._driving.acquire(blocking=False)
            if not here:
                self._lane.put(lambda: self._take_turn(work))
        if here:
            try:
                self._carry_out(work)
            finally:
                self._driving.release()
        work.wait_done()
        return work

    def _begin(self, op: Collective) -> HierarchicalWork:
        if op.device.type == "cuda":
            torch.cuda.current_stream(op.device).synchronize()
        work = self.begin(op, HierarchicalWork)
        # Others may not take part in an operation of one scope, so ranks are counted by those in which all do.
        self._joined += op.scope is Scope.WORLD
        work.place = self._joined
        work.add_done_callback(self._over)
        return work

    def _take_turn(self, work: HierarchicalWork) -> None:
        with self._driving:  # a caller may be taking the steps of an earlier operation itself
            self._carry_out(work)

    def _carry_out(self, work: HierarchicalWork) -> None:
        program = self._two_level.carry_out(work.op)
        work.ledger.started(work, time.perf_counter())
        part = self.inside
        try:
            for step in program:
                left = work.deadline - time.perf_counter()
                if left <= 0:
                    self.ledger.expire(work)
                if work.is_completed():
                    return
                part = self.inside if step.where == "inside" else self._lane_group()
                part.submit_and_wait(step.op.within(left))
            if work.op.device.type == "cuda":
                torch.cuda.current_stream(work.op.device).synchronize()
            work.finish()
        except CollectiveTimeout as error:
            if work.op.scope is not Scope.WORLD:
                work.known = _in_whole(error.joined, error.missing, self._members[part])
            late = self.ledger.timed_out(work, min(work.timeout, time.perf_counter() - work.started))
            work.fail(chained(late, error))
        except Exception as error:
            work.fail(told_by(error, self._members[part], self._where(work), self._roll, work.place))
        except BaseException as error:  # Ctrl-C, in the caller's thread: the others take steps that this rank will not
            work.fail(self._broken_off(work, error))
            if not is_kept(error):
                raise
        finally:
            program.close()

    def _broken_off(self, work: Work, error: BaseException) -> GroupAborted:
        why = f"rank {self.rank} broke {work.op} off: {type(error).__name__}{f': {error}' if str(error) else ''}"
        return GroupAborted(f"{self._where(work)}: {why}. Every rank can call recover() to go on.", reason=why)

    def _lane_group(self) -> Group:
        assert self.across is not None
        return self.across

    def _where(self, work: Work | None) -> str:
        what = self.name if work is None else f"{work.op} (operation #{work.seq} of {self.name})"
        return f"{what} on rank {self.rank} of {self.size}"

    # -- messages ------------------------------------------------------------------------------------------------------

    def _pass_on(self, op: Collective) -> Work:
        op.check(self.rank, self.size)
        part, step = self._way(op)
        members = self._members[part]
        work = self.begin(op, HierarchicalWork)
        work.add_done_callback(self._over)

        def settle(inner: Work) -> None:
            error = inner.exception()
            if error is None:
                work.finish(source_rank=None if inner._source is None else members[inner._source])
            elif isinstance(error, CollectiveTimeout) or not isinstance(error, Exception):
                work.fail(self.ledger.timed_out(work, work.timeout))
            else:
                work.fail(told_by(error, members, self._where(work), self._roll, 0))

        try:
            part.submit(step).add_done_callback(settle)
        except Exception as error:
            work.fail(told_by(error, members, self._where(work), self._roll, 0))
        return work

    def _way(self, op: Collective) -> tuple[Group, Collective]:
        """The group that a message goes through, and the message in its ranks. See Note [Three parts]."""
        if self.messages is not None:
            return self.messages, op
        for part, members in self._members.items():
            if op.peer in members:
                return part, replace(op, peer=members.index(op.peer))
        raise UsageError(
            f"{op} on {self}: it may concern a rank on another host, and there is no group that joins the two. "
            "Make the group with discover(), or with messages=, a group of all ranks."
        )

    # -- memory and members --------------------------------------------------------------------------------------------

    @property
    def in_one_process(self) -> bool:  # type: ignore[override]
        """As the ranks of this host are."""
        return self.inside.in_one_process

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Memory of the host's own group: slices of it are reduced where they lie."""
        return self.inside.allocate(numel, dtype=dtype, device=device)

    def set_timeout(self, timeout: float) -> None:
        """Of the parts, too."""
        super().set_timeout(timeout)
        for part in self._members:
            part.set_timeout(timeout)

    def arrivals(self, work: Work) -> Arrivals | None:
        """Who has joined, as of the last membership: a wait must not hang on a slow store. The parts know only who is at a step."""
        if work.op.kind.is_p2p:
            return None if work.op.peer is None else Arrivals((self.rank,), (work.op.peer,))
        if work.op.scope is not Scope.WORLD and isinstance(work, HierarchicalWork):
            return work.known or self._arrivals_in_part(work.op.scope)
        roll = self._roll
        if roll is None or not isinstance(work, HierarchicalWork):
            return None
        joined = roll.have_joined(work.place)
        return Arrivals(joined, tuple(r for r in range(self.size) if r not in joined))

    def _arrivals_in_part(self, scope: Scope) -> Arrivals | None:
        """Who has joined the step that the part is at."""
        part = self.inside if scope is Scope.INSIDE else self.across
        steps = [] if part is None else list(part.ledger.pending.values())
        known = part.arrivals(steps[0]) if part is not None and steps else None
        return None if part is None or known is None else _in_whole(known.joined, known.missing, self._members[part])

    def standing(self, op: Collective) -> tuple[int, int]:
        """This rank's place in its host, or its host's among the hosts."""
        host, index = self.layout.place(self.rank)
        if op.scope is Scope.INSIDE:
            return index, len(self.layout.hosts[host])
        if index >= self.layout.width:
            raise UsageError(
                f"{op} on {self}: it is no carrier; the first {self.layout.width} ranks of each host talk to other hosts. Submit "
                "it on those only, as group.layout says."
            )
        return host, len(self.layout.hosts)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        """The same in small: sub-groups of the parts."""
        layout = self.layout.within(ranks)
        host, index = layout.place(ranks.index(self.rank))
        several, mates = len(layout.hosts) > 1, self._members[self.inside]
        messages = self.messages
        if several and messages is None:
            raise UsageError(
                f"sub-group {ranks} of {self}: it spans hosts, and there is no group of all ranks to make its parts of. "
                "Make the group with discover(), or with messages=."
            )
        with ExitStack() as made:

            def make(of: Group, members: list[int], part: str) -> Group:
                group = of.subgroup(members, name=f"{name}/{part}")
                made.callback(group.close, 0)
                return group

            inside = make(self.inside, [mates.index(ranks[r]) for r in layout.hosts[host]], f"inside-{host}")
            across = flat = None
            if several and messages is not None:
                if index < layout.width:
                    across = make(messages, [ranks[members[index]] for members in layout.hosts], f"across-{index}")
                flat = make(messages, ranks, "messages")
            group = type(self)(
                inside,
                across,
                messages=flat,
                rank=ranks.index(self.rank),
                layout=layout,
                store=None if self._store is None else PrefixStore(name, self._store),
                roll=None if self._roll is None else self._roll.within(name, ranks.index(self.rank), len(ranks)),
                name=name,
                timeout=self.timeout,
            )
            made.pop_all()
        return group

    # -- failures and the end: see Note [One failure] ------------------------------------------------------------------

    def _over(self, work: Work) -> None:
        """An operation is over: if badly, ranks may be out of step."""
        error = work.exception()
        if error is None or self.failure is not None or self.closed or isinstance(error, UsageError):
            return
        if work.op.kind.is_p2p and not isinstance(error, (PeerLost, GroupAborted)):
            return
        if isinstance(error, GroupError):
            self.fail(error)
        else:
            why = f"rank {self.rank} failed in {work.op}: {type(error).__name__}: {error}"
            self.fail(GroupAborted(f"{self._where(work)}: {why}", reason=why))

    def fail(self, error: BaseException) -> None:
        """Fail here, and tell the other ranks: through the membership, then through all parts."""
        first = self.failure is None
        super().fail(error)
        if not first or self.closed or self.forked:
            return
        if self._roll is not None and isinstance(error, PeerLost):
            why = f"rank {self.rank} has lost it" if error.rank is None else f"rank {error.rank} is lost"
            self._roll.record_failure(error.rank, why)
        elif self._roll is not None and not isinstance(error, CollectiveTimeout):
            reason = error.reason if isinstance(error, GroupAborted) else str(error)
            self._roll.record_failure(None, f"rank {self.rank} aborted: {reason}")
        for part, members in self._members.items():
            part.fail(for_part(error, members, self.name))

    def _tick(self) -> None:
        """In the watchdog's thread: publish this rank's progress, and look into what has been in flight for long."""
        roll = self._roll
        if roll is None or self.closed:
            return
        roll.joined = self._joined
        now = time.perf_counter()
        old = [work for work in list(self.ledger.pending.values()) if now - work.started > _SUSPICIOUS_AGE]
        slow = bool(old) and self.failure is None
        roll.tick(slow=slow)
        if slow:
            self._look(roll, old)

    def _look(self, roll: Membership, old: list[Work]) -> None:
        first = old[0] if old else None
        place = max((work.place for work in old if isinstance(work, HierarchicalWork)), default=0)
        error = bad_news(roll, self._where(first), place, None if first is None else first.op.signature)
        if error is not None:
            self.fail(error)

    def check_peers(self) -> None:
        """Read the membership and ask the parts now; raise if a peer is lost or has aborted."""
        if self.failure is None and not self.closed and not self.forked:
            if self._roll is not None:
                self._roll.refresh()
                self._look(self._roll, [])
            for part, members in self._members.items():
                try:
                    part.check_peers()
                except GroupError as error:
                    told = told_by(error, members, self._where(None), self._roll, 0)
                    if self.failure is None:
                        self.fail(told)
        super().check_peers()

    def recover(self, timeout: float | None = None) -> None:
        """Meet all ranks, then recover the parts. A lost peer stays lost."""
        self.refuse_in_child("recover()")
        if isinstance(self.failure, PeerLost):
            raise again(self.failure)
        limit = self._recovery_limit(timeout)
        deadline = time.perf_counter() + limit
        if not self._driving.acquire(timeout=limit):
            raise CollectiveTimeout(f"recovery of {self}: an operation is still under way after {limit:.3g} s.")
        try:
            # Whoever gives up goes on where it was: the others may have that meeting behind them.
            self._meetings = self._meetings or [self._meet_again, *(part.recover for part in self._members)]
            while self._meetings:
                self._meetings[0](max(0.1, deadline - time.perf_counter()))
                del self._meetings[0]
            self.failure = None
        finally:
            self._driving.release()

    def _meet_again(self, timeout: float) -> None:
        """The meeting of all ranks, in the store."""
        if self._roll is not None:
            self._roll.joined = self._joined
            try:
                self._roll.start_over(0, timeout)
            except TimeoutError as error:
                raise CollectiveTimeout(f"recovery of {self}: {error} within {timeout:.3g} s.") from None
        self._joined = 0

    def _release(self) -> None:
        self._meetings.clear()
        if self._roll is not None:
            self._roll.joined = self._joined
            self._roll.leave("closed" if self.failure is None else f"failed: {type(self.failure).__name__}")
        # What was in flight has had its time; a step that still is would hold the lane.
        for part in self._members:
            self._close_part(part)
        self._lane_finalizer()


def _weak_tick(group: HierarchicalGroup) -> Callable[[], None]:
    weak = weakref.WeakMethod(group._tick)

    def tick() -> None:
        method = weak()
        if method is not None:
            method()

    return tick


def _in_whole(joined: Sequence[int] | None, missing: Sequence[int] | None, members: Sequence[int]) -> Arrivals | None:
    """What a part of `members` knows, in ranks of the whole."""
    if joined is None or missing is None:
        return None
    return Arrivals(tuple(members[r] for r in joined), tuple(members[r] for r in missing))
