"""`Joins`: how a member that joins receives the state while the others train.

Note [Stream]
A member without the state is in the view from its first step on. It contributes zeros to every reduction and votes, so that it has
the averages of every step, and keeps them. Meanwhile a member with the state sends a copy of what it had when the view began, over
a group of these two and at half the speed of the link. When the copy has arrived, the other commits the steps that it has kept, two
in each step of the others, by the same `update` of the same averages. When none is left and its digest is that of the others' vote,
its next vote asks for a change of members, after which it computes as they do, and `run.group` has all members again.

While somebody joins, all votes are of the hosts and contain the digest, and nobody else joins. If members change for another
reason, it begins again, and keeps fewer averages. The others wait for one that has no room for more. If it fails to commit what it
has kept, or has another digest then, it is not exact to repeat `update` here: it keeps none, and the others wait for the state.

The state of the hook is exact without this: it is sent before the first step, without what is owed, and a member with gradients
of zero is like any other. States that are small, or that not all members have committed a step with, are sent while all wait.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from gradwire.elasticity.machine import View
from gradwire.elasticity.run_records import launcher_of
from gradwire.elasticity.state import copied, receive, send
from gradwire.errors import GroupAborted, HookError
from gradwire.groups.base import Group
from gradwire.groups.store.rendezvous import watching
from gradwire.groups.threads_group import ThreadGroup
from gradwire.parallel.replica import Replica
from gradwire.runtime.threads import BoundedCall

LARGE = 2**22
"""Bytes of parameters from which on the others do not wait for a member that receives them."""
ROOM = 16
"""How many averages a member keeps while it receives the state."""
_REPEATED = 2
_PAUSE = 0.05
_OVER = "the members of the run change"

Job = Callable[[Group, Callable[[float], object]], Any]
"""Sends or receives over a channel; the function pauses for so many seconds."""
Kept = tuple[list[Tensor | None], dict[str, Tensor]]
"""Of a committed step: the averages, on the CPU, and the buffers."""


def donors(view: View) -> list[tuple[int, int]]:
    """(who gives, who receives), by rank."""
    ranks = range(len(view.members))
    fresh = [rank for rank in ranks if view.members[rank] in view.fresh]
    return pairs(view, [rank for rank in ranks if rank not in fresh], fresh)


def pairs(view: View, holders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """A holder for each that receives, in turns: if there are some of the same host, one of them."""
    host = {rank: launcher_of(view.members[rank]) for rank in (*holders, *receivers)}
    near = ([one for one in holders if host[one] == host[rank]] or holders for rank in receivers)
    return [(some[number % len(some)], rank) for number, (rank, some) in enumerate(zip(receivers, near, strict=True))]


class _End(BoundedCall[Any]):
    """One end of a channel between two members, with what it sends or receives: on a thread of its own."""

    def __init__(self, group: Group, ranks: Sequence[int], job: Job) -> None:
        self._aborted = threading.Event()
        self._channel: Group | None = None
        super().__init__(lambda: self._use_channel(group, list(ranks), job), name=f"gradwire-state-{ranks[1]}")

    def _use_channel(self, group: Group, ranks: list[int], job: Job) -> Any:
        with watching(lambda: GroupAborted(_OVER, reason=_OVER) if self._aborted.is_set() else None):
            self._channel = channel = group.subgroup(ranks, name=f"{group.name}/state-{ranks[1]}")
        if self._aborted.is_set():
            self.abort()
        try:
            return job(channel, self._aborted.wait)
        finally:
            with suppress(HookError):
                channel.close(1.0)

    def abort(self) -> None:
        """End it. Never waits; may be called from any thread."""
        self._aborted.set()
        self.abandon()
        if self._channel is not None:
            self._channel.abort(_OVER)


class Joins:
    """The part of one member in the joins of a run: it sends what it has; or it receives that, keeps what the others commit
    meanwhile, and catches up."""

    def __init__(
        self, replica: Replica, state: Callable[[], Any], load: Callable[[Any], object], update: Callable[[int], object]
    ) -> None:
        """`state` returns what is sent, `load` takes it, and `update(step)` commits the averages in `.grad`."""
        self.allowed = True
        """Whether members may join while the others train."""
        self._replica = replica
        self.group: Group | None = None
        """While others receive the state, that of the members that have it, on those."""
        self._state, self._load, self._update = state, load, update
        self._ends: list[_End] = []
        self._receives = self._loaded = self._repeated = False
        self._kept: deque[Kept] = deque()
        self._room = self._next_room = ROOM
        """How many averages it may keep, now and if it has to begin again; -1 if it cannot commit even one."""

    def stream_in(self, view: View) -> bool:
        """Whether the fresh members of this view receive the state while the others train. The same on all members."""
        large = sum(p.nbytes for p in self._replica.module.parameters()) >= LARGE
        return bool(view.fresh) and not view.begins and self.allowed and large

    def enter(self, view: View, group: Group) -> None:
        """All members of the view have the hook's state. A collective of those with the state of the model."""
        if not self.stream_in(view):
            return
        pairs, me = donors(view), group.rank
        computing = sorted({*range(group.size)} - {rank for _, rank in pairs})
        if me not in computing:
            pair = next(pair for pair in pairs if pair[1] == me)
            self._ends.append(_End(group, pair, lambda channel, _: receive(channel, 0, paced=True)))
            self._receives, self._next_room = True, self._room // 4
            return
        if len(computing) == 1:
            (self.group,) = ThreadGroup.world(1, timeout=group.timeout, name=group.name)
        else:
            self.group = group.subgroup(computing, name=f"{group.name}/computing")
        mine = [pair for pair in pairs if pair[0] == me]
        copy = copied(self._state()) if mine else None
        for pair in mine:
            self._ends.append(_End(group, pair, lambda channel, pause: send(channel, 1, copy, pause=pause)))

    @property
    def streams(self) -> bool:
        """Whether members receive the state in the present view."""
        return self.group is not None or self._receives

    @property
    def lag(self) -> int | None:
        """How many steps this member is behind while it receives the state, at least 1 until it has shown that it can commit what
        it has kept; None if it computes."""
        return len(self._kept) + (not self._repeated) if self._receives else None

    def keep(self) -> bool:
        """A step is committed: keep its averages if this member cannot use them yet."""
        if not self.lag:
            return False
        averages = [None if p.grad is None else p.grad.to("cpu", copy=True) for p in self._replica.parameters]
        self._kept.append((averages, self._replica.state.copied_buffers()))
        return True

    def catch_up(self, committed: int, lost: Callable[[], bool]) -> bool:
        """So many steps are committed: take what has come, and commit some of those that were kept. True: it has the state, for
        which all have waited."""
        (end,) = self._ends
        while not self._loaded and len(self._kept) >= self._room and not end.wait(_PAUSE):
            if lost():
                raise GroupAborted(_OVER, reason=_OVER)
        if not self._loaded and end.wait(0.0):
            self._load(end.result())
            self._loaded, self._repeated = True, not self._room
        for _ in range(min(_REPEATED, len(self._kept)) if self._loaded else 0):
            try:
                self._repeat(self._kept[0], committed - len(self._kept))
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
                raise GroupAborted(_OVER, reason=_OVER) from error
            self._kept.popleft()
            self._repeated = True
        return self._room < 0

    def begin_again(self) -> None:
        """This member has caught up, and differs from the others: they are to wait until it has received their state."""
        self._fail("its state differs from theirs then: is something missing in register=?")

    def _fail(self, why: str) -> None:
        """It is not exact here to catch up."""
        self._next_room = -1
        text = f"update= cannot repeat here what the others have committed ({why})"
        warnings.warn(f"joining the run: {text}. They wait until this member has received their state.", stacklevel=2)

    def _repeat(self, kept: Kept, step: int) -> None:
        gradients, buffers = kept
        self._replica.state.restore_buffers(buffers)
        for parameter, gradient in zip(self._replica.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self._update(step)

    def contribute_zeros(self) -> None:
        """Take part in the reductions of a step, and get the averages."""
        runner, reducer = self._replica.runner, self._replica.reducer
        weight, runner.weight = runner.weight, 0.0
        try:
            reducer.prepare(range(len(reducer.parameters)), all_call=True)
            reducer.reductions.launch(reducer.machine.nothing_arrived())
            reducer.finish()
        finally:
            runner.weight = weight

    def abort(self) -> None:
        """The members change: nothing more is sent. Called by any thread; does not wait."""
        for end in self._ends:
            end.abort()
        if (group := self.group) is not None:
            group.abort(_OVER)

    def close(self) -> None:
        """Nothing of the present view is used any more."""
        for end in self._ends:
            end.abort()
        if self.group is not None:
            with suppress(HookError):
                self.group.close(0.0)
        self._ends, self.group, self._room = [], None, self._next_room
        self._receives = self._loaded = self._repeated = False
        self._kept.clear()
