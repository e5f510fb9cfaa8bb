"""`HierarchicalGroup`: shared memory in the host, any other group between hosts.

    group = HierarchicalGroup.discover(store, rank, size)     # finds the hosts, makes the parts
    group = HierarchicalGroup(inside, across)                 # or of parts that you have

`discovery.py`: how ranks determine which of them share a host. `subgroups.py`: the groups inside and between hosts, and what their
errors mean for the whole. `two_level_programs.py`: the steps of a collective.

Note [One failure]
A part that fails leaves ranks out of step, so the whole fails: here at once, in the other parts of this rank, and through them
on every rank that shares one, until all have failed. What failed first is written into the membership before that, so that all
ranks name the same lost rank, also those that share no part with it. Without a store there is no membership; then a rank that
shares no part with the lost one raises GroupAborted. The whole also fails when one of its collectives has timed out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from gradwire.collectives import Collective, Layout, Scope, build
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import CollectiveTimeout, GroupAborted, GroupError, PeerLost, UsageError
from gradwire.events import is_kept
from gradwire.groups.base import DEFAULT_TIMEOUT, BuildGroup, Group
from gradwire.groups.c10d import C10dGroup
from gradwire.groups.failure.membership import Membership
from gradwire.groups.failure.monitor import Monitor
from gradwire.groups.forked import finalize_here
from gradwire.groups.hierarchical import subgroups
from gradwire.groups.hierarchical.discovery import discover_from_groups, discover_hosts
from gradwire.groups.hierarchical.two_level_programs import TwoLevel
from gradwire.groups.ledger import Arrivals, chained
from gradwire.groups.shared_memory import SharedMemoryGroup
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.groups.work import Work
from gradwire.runtime.host import host_identity
from gradwire.runtime.threads import Worker


class HierarchicalGroup(Group):
    """Ranks on several hosts. It owns its parts: closing it closes them."""

    layout: Layout
    identifies_itself = True

    def __init__(
        self,
        inside: Group,
        across: Group | None = None,
        *,
        messages: Group | None = None,
        rank: int | None = None,
        layout: Layout | None = None,
        store: Any = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """`inside` holds the ranks of this host; `across`, on its first k ranks, those with the same rank in the `inside` of every
        host, numbered by host; on the others it is None. k is the same on all hosts: 1 for a leader each, all where hosts are
        alike. `messages` holds all ranks, in order. `rank` is this rank's number in the whole, where ranks are not numbered host by
        host. Unless `layout` is given, the ranks check all of that. `store` is where they publish progress and failures."""
        group_id: int | None
        if layout is None:
            layout, rank, group_id = discover_from_groups(inside, across, rank)
        elif rank is None:
            raise UsageError(f"{type(self).__name__}: a layout was given, but no rank. Pass rank= as well.")
        else:
            group_id = None if messages is None else messages.ledger.events.child_id("hierarchical")
        parts = subgroups.GroupParts(layout, rank, inside, across, messages)
        timeout = inside.timeout if timeout is None else timeout
        super().__init__(rank, layout.size, name=name or "hierarchical", timeout=timeout)
        self.layout = layout
        if store is None:  # else the monitor does it
            self.ledger.identify(group_id)
        self.inside, self.across, self.messages = parts.inside, parts.across, parts.messages
        self.in_one_process = inside.in_one_process
        self._parts = parts
        self._store = store
        self._two_level = TwoLevel(layout, self.rank)
        for part in parts.members:
            self.ledger.collect_hook_errors_of(part.ledger)
        self._monitor = Monitor(self, None if store is None else Membership.over(store, self.rank, self.size))
        self._known: Arrivals | None = None
        """Which ranks had joined the current operation of one scope when it timed out in a part."""
        self._meetings: list[Callable[[float], object]] = []
        """The meetings of an unfinished recovery that are left."""
        self._lane = Worker(f"program-{self.name}-{self.rank}")
        self._order = threading.Lock()
        self._driving = threading.Lock()
        self._watchdog.on_tick.append(self._monitor.tick)
        # After the base class's finalizer was made, so that at exit this thread ends first.
        self._lane_finalizer = finalize_here(self, self._lane.stop, 2.0)
        try:
            self._wait_until_all_have_one()
        except BaseException as error:
            self._monitor.leave(error)
            raise

    def _wait_until_all_have_one(self) -> None:
        """No rank has a group before every rank has: what a rank does first must not wait for another that is still being made."""
        if self._store is None:
            for step in self._two_level.carry_out(build.barrier(label="all here?")):
                self._parts.part(step.where).submit_and_wait(step.op.within(self.timeout))
        else:
            rendezvous = Rendezvous(self._store, self.rank, self.size, timeout=self.timeout, who=self)
            with rendezvous.meeting(rendezvous.next_key("gradwire/made")):
                rendezvous.all_processes()

    @classmethod
    def discover(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        name: str | None = None,
        across: BuildGroup = C10dGroup.gloo,
        inside: BuildGroup = SharedMemoryGroup,
        host: str | None = None,
    ) -> HierarchicalGroup:
        """Find out through `store` which ranks share a host, and make the parts.

        `across(store, rank, size, timeout=…, name=…)` makes a group between hosts, `inside` one in a host; `host` identifies it.
        """
        name = name or "hierarchical"
        timeout_seconds(f"HierarchicalGroup.discover of {name!r}", timeout)  # before any wait
        rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=f"HierarchicalGroup on rank {rank} of {size}")
        base = rendezvous.next_key("gradwire/hierarchical")

        def make(build: BuildGroup, part: str, ranks: Sequence[int]) -> Group:
            at, of = ranks.index(rank), len(ranks)
            return build(PrefixStore(f"{base}/{part}", store), at, of, timeout=timeout, name=f"{name}/{part}")

        with rendezvous.meeting(base):
            layout = discover_hosts(rendezvous, host_identity() if host is None else host)
            made = subgroups.make_parts(layout, rendezvous, inside=partial(make, inside), across=partial(make, across))
            with made as parts:
                return cls(**parts, store=PrefixStore(base, store), name=name, timeout=timeout)

    # -- the one verb --------------------------------------------------------------------------------------------------

    def submit(self, op: Collective) -> Work:
        """Put the operation's steps on the lane; pass a message on."""
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

    def _begin(self, op: Collective) -> Work:
        if op.device.type == "cuda":
            torch.cuda.current_stream(op.device).synchronize()
        work = self.begin(op)
        # Some ranks may not take part in an operation of one scope, so only those in which all do are counted.
        work.place = self._monitor.join(op.scope is Scope.WORLD)
        work.add_done_callback(self._over)
        return work

    def _take_turn(self, work: Work) -> None:
        with self._driving:  # a caller may be taking the steps of an earlier operation itself
            self._carry_out(work)

    def _carry_out(self, work: Work) -> None:
        program = self._two_level.carry_out(work.op)
        work.ledger.started(work, time.perf_counter())
        part, self._known = self.inside, None
        try:
            for step in program:
                left = work.deadline - time.perf_counter()
                if left <= 0:
                    self.ledger.expire(work)
                if work.is_completed():
                    return
                part = self._parts.part(step.where)
                part.submit_and_wait(step.op.within(left))
            if work.op.device.type == "cuda":
                torch.cuda.current_stream(work.op.device).synchronize()
            work.finish()
        except CollectiveTimeout as error:
            self._known = self._parts.in_whole(part, error.joined, error.missing)
            late = self.ledger.timed_out(work, min(work.timeout, time.perf_counter() - work.started))
            work.fail(chained(late, error))
        except Exception as error:
            work.fail(self._in_terms_of_whole(part, error, work))
        except BaseException as error:  # Ctrl-C, in the caller's thread: the others take steps that this rank will not
            work.fail(subgroups.interrupted(work, error))
            if not is_kept(error):
                raise
        finally:
            program.close()

    def _in_terms_of_whole(self, part: Group, error: Exception, work: Work | None) -> Exception:
        members, membership = self._parts.members[part], self._monitor.membership
        return subgroups.in_terms_of_whole(error, members, self.ledger, work, membership)

    def _pass_on(self, op: Collective) -> Work:
        op.check(self.rank, self.size)
        way = self._parts.route(op)
        if way is None:
            raise UsageError(
                f"{op} on {self}: it may concern a rank on another host, and there is no group that joins the two. Make the group "
                "with discover(), or with messages=, a group of all ranks."
            )
        part, step = way
        members = self._parts.members[part]
        work = self.begin(op)
        work.add_done_callback(self._over)

        def settle(inner: Work) -> None:
            error = inner.exception()
            if error is None:
                work.finish(source_rank=None if inner.source is None else members[inner.source])
            elif isinstance(error, CollectiveTimeout) or not isinstance(error, Exception):
                work.fail(self.ledger.timed_out(work, work.timeout))
            else:
                work.fail(self._in_terms_of_whole(part, error, work))

        try:
            part.submit(step).add_done_callback(settle)
        except Exception as error:
            work.fail(self._in_terms_of_whole(part, error, work))
        return work

    # -- memory and members --------------------------------------------------------------------------------------------

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Memory of the host's own group: slices of it are reduced where they lie."""
        return self.inside.allocate(numel, dtype=dtype, device=device)

    def set_timeout(self, timeout: float) -> None:
        super().set_timeout(timeout)
        for part in self._parts.members:
            part.set_timeout(timeout)

    def arrivals(self, work: Work) -> Arrivals | None:
        """Which ranks have joined, by the membership as last read: a slow store must not delay a wait."""
        if work.op.scope is not Scope.WORLD:
            return self._known or self._parts.arrivals(work.op.scope)
        return super().arrivals(work) if work.op.kind.is_p2p else self._monitor.arrivals(work)

    def standing(self, op: Collective) -> tuple[int, int]:
        """This rank's place in its host, or its host's among the hosts."""
        host, index = self.layout.place(self.rank)
        if op.scope is Scope.INSIDE:
            return index, len(self.layout.hosts[host])
        if index >= self.layout.width:
            raise UsageError(
                f"{op} on {self}: it is not a carrier; only the first {self.layout.width} ranks of each host communicate with "
                "other hosts. Submit it on those only: see group.layout."
            )
        return host, len(self.layout.hosts)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        layout = self.layout.within(ranks)
        messages, mates = self.messages, self._parts.members[self.inside]
        if len(layout.hosts) > 1 and messages is None:
            raise UsageError(
                f"sub-group {ranks} of {self}: it spans hosts, and there is no group of all ranks to make its parts of. "
                "Make the group with discover(), or with messages=."
            )
        rank = ranks.index(self.rank)
        store = PrefixStore(name, HashStore() if self._store is None else self._store)
        rendezvous = Rendezvous(store, rank, len(ranks), timeout=self.timeout, who=f"sub-group {ranks} of {self}")

        def inside(part: str, members: Sequence[int]) -> Group:
            return self.inside.subgroup([mates.index(ranks[r]) for r in members], name=f"{name}/{part}")

        def across(part: str, members: Sequence[int]) -> Group:
            assert messages is not None
            return messages.subgroup([ranks[r] for r in members], name=f"{name}/{part}")

        watched = nullcontext() if self._store is None else rendezvous.meeting(rendezvous.next_key("gradwire/parts"))
        with watched, subgroups.make_parts(layout, rendezvous, inside=inside, across=across) as parts:
            return type(self)(**parts, store=None if self._store is None else store, name=name, timeout=self.timeout)

    # -- failures and the end: see Note [One failure] ------------------------------------------------------------------

    def _over(self, work: Work) -> None:
        """An operation is over: if it has failed, ranks may be out of step."""
        error = work.exception()
        if error is None or self.failure is not None or self.closed or isinstance(error, UsageError):
            return
        if work.op.kind.is_p2p and not isinstance(error, (PeerLost, GroupAborted)):
            return
        if isinstance(error, GroupError):
            self.fail(error)
        else:
            why = f"rank {self.rank} failed in {work.op}: {type(error).__name__}: {error}"
            self.fail(GroupAborted(f"{self.ledger.where(work)}: {why}", reason=why))

    def fail(self, error: BaseException) -> None:
        """Fail here, and notify the other ranks: through the membership, then through all parts."""
        first = self.failure is None
        super().fail(error)
        if not first or self.closed or self.forked:
            return
        if not isinstance(error, CollectiveTimeout):
            self._monitor.report(error)
        for part, members in self._parts.members.items():
            part.fail(subgroups.for_part(error, members, self.name))

    def _look_at_peers(self) -> None:
        self._monitor.check_peers()
        for part in () if self.failure is not None else self._parts.members:
            try:
                part.check_peers()
            except GroupError as error:
                self.fail(self._in_terms_of_whole(part, error, None))

    def recover(self, timeout: float | None = None) -> None:
        """Meet all ranks, then recover the parts. A lost peer stays lost."""
        limit = self._recovery_limit(timeout)
        deadline = time.perf_counter() + limit
        if not self._driving.acquire(timeout=limit):
            raise CollectiveTimeout(f"recovery of {self}: an operation is still under way after {limit:.3g} s.")
        try:
            # A rank that gives up resumes where it was: the others may have passed that meeting.
            self._meetings = self._meetings or [self._monitor.recover, *(part.recover for part in self._parts.members)]
            while self._meetings:
                self._meetings[0](max(0.1, deadline - time.perf_counter()))
                del self._meetings[0]
            self.failure = None
        finally:
            self._driving.release()

    def _release(self) -> None:
        self._meetings.clear()
        self._monitor.leave(self.failure)
        # What was in flight has had its time; a step that still is would hold the lane.
        for part in self._parts.members:
            self._close_part(part)
        self._lane_finalizer()
