"""`Stream`: how a member that joins receives the state while the others train.

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


class _End:
    """One end of a channel between two members, with what it sends or receives: on a thread of its own."""

    def __init__(
        self, group: Group, ranks: Sequence[int], job: Callable[[Group, Callable[[float], object]], Any]
    ) -> None:
        self._aborted = threading.Event()
        self._channel: Group | None = None
        self._call = BoundedCall(lambda: self._run(group, list(ranks), job), name=f"gradwire-state-{ranks[1]}")

    def _run(self, group: Group, ranks: list[int], job: Callable[[Group, Callable[[float], object]], Any]) -> Any:
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
        self._call.abandon()
        if self._channel is not None:
            self._channel.abort(_OVER)

    def wait(self, timeout: float = 0.0) -> bool:
        """Whether it has ended."""
        return self._call.wait(timeout)

    def result(self) -> Any:
        """What was received."""
        return self._call.result()


class Joining:
    """A member on its way to the state of the others: what it has received, and what it has kept of the steps since then."""

    def __init__(self, end: _End, room: int) -> None:
        self.room = room
        """How many averages it may keep; -1 if it cannot commit even one."""
        self._end = end
        self._kept: deque[Kept] = deque()
        self._loaded = self._repeated = False
        self.next_room = room // 4
        """How many it keeps if it has to begin again."""

    @property
    def lag(self) -> int:
        """How many steps it is behind. At least 1 until it has shown that it can commit what it has kept."""
        return len(self._kept) + (not self._repeated)

    def keep(self, kept: Kept) -> None:
        """A step was committed."""
        self._kept.append(kept)

    def fail(self, why: str) -> None:
        """It is not exact here to catch up."""
        self.next_room = -1
        text = f"update= cannot repeat here what the others have committed ({why})"
        warnings.warn(f"joining the run: {text}. They wait until this member has received their state.", stacklevel=2)

    def advance(
        self, load: Callable[[Any], object], commit: Callable[[Kept, int], object], lost: Callable[[], bool]
    ) -> bool:
        """Between two steps: take what has come, and catch up. True: it has the state, and the others have waited for it."""
        while not self._loaded and len(self._kept) >= self.room and not self._end.wait(_PAUSE):
            if lost():
                raise GroupAborted(_OVER, reason=_OVER)
        if not self._loaded and self._end.wait():
            load(self._end.result())
            self._loaded, self._repeated = True, not self.room
        for _ in range(min(_REPEATED, len(self._kept)) if self._loaded else 0):
            try:
                commit(self._kept[0], len(self._kept))
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")
                raise GroupAborted(_OVER, reason=_OVER) from error
            self._kept.popleft()
            self._repeated = True
        return self.room < 0


class Stream:
    """The part of one member in the joins of one view."""

    def __init__(self, view: View, group: Group, state: Callable[[], Any], room: int) -> None:
        """`state` returns what is to be sent. A collective of all members with the state."""
        pairs, me = donors(view), group.rank
        self.joining: Joining | None = None
        """None on a member that has the state."""
        self.group = group
        """That of the members with the state, on those."""
        self._ends: list[_End] = []
        fresh = [rank for _, rank in pairs]
        if me in fresh:
            pair = next(pair for pair in pairs if pair[1] == me)
            self._ends.append(_End(group, pair, lambda channel, _: receive(channel, 0, paced=True)))
            self.joining = Joining(self._ends[0], room)
            return
        computing = [rank for rank in range(group.size) if rank not in fresh]
        if len(computing) == 1:
            (self.group,) = ThreadGroup.world(1, timeout=group.timeout, name=group.name)
        else:
            self.group = group.subgroup(computing, name=f"{group.name}/computing")
        mine = [pair for pair in pairs if pair[0] == me]
        copy = copied(state()) if mine else None
        for pair in mine:
            self._ends.append(_End(group, pair, lambda channel, pause: send(channel, 1, copy, pause=pause)))

    def abort(self) -> None:
        """Members change. Never waits; may be called from any thread."""
        for end in self._ends:
            end.abort()
        if self.joining is None:
            self.group.abort(_OVER)

    def close(self) -> None:
        """Nothing of this view is used any more."""
        for end in self._ends:
            end.abort()
        if self.joining is None:
            with suppress(HookError):
                self.group.close(0.0)


class Joins:
    """The part of one member in the joins of a run: it sends what it has, or receives it and catches up."""

    def __init__(
        self,
        replica: Replica,
        state: Callable[[], Any],
        load: Callable[[Any], object],
        update: Callable[[int], object],
    ) -> None:
        """`state` returns what is sent, `load` takes it, and `update(step)` commits the averages in `.grad`."""
        self.allowed = True
        """Whether members may join while the others train."""
        self._replica = replica
        self._state, self._load, self._update = state, load, update
        self._stream: Stream | None = None
        self._room = ROOM

    def stream_in(self, view: View) -> bool:
        """Whether the fresh members of this view receive the state while the others train. The same on all members."""
        large = sum(p.nbytes for p in self._replica.module.parameters()) >= LARGE
        return bool(view.fresh) and not view.begins and self.allowed and large

    def enter(self, view: View, group: Group) -> None:
        """All members of the view have the hook's state."""
        if self.stream_in(view):
            self._stream = Stream(view, group, self._state, self._room)

    @property
    def streams(self) -> bool:
        """Whether members receive the state in the present view."""
        return self._stream is not None

    @property
    def group(self) -> Group | None:
        """That of the members with the state, if not all have it."""
        return None if self._stream is None else self._stream.group

    @property
    def _joining(self) -> Joining | None:
        return None if self._stream is None else self._stream.joining

    @property
    def lag(self) -> int | None:
        """How many steps this member is behind while it receives the state; None if it computes."""
        return None if self._joining is None else self._joining.lag

    def keep(self) -> bool:
        """A step is committed: keep its averages if this member cannot use them yet."""
        if self._joining is None or not self.lag:
            return False
        averages = [None if p.grad is None else p.grad.to("cpu", copy=True) for p in self._replica.parameters]
        self._joining.keep((averages, self._replica.state.copied_buffers()))
        return True

    def catch_up(self, committed: int, lost: Callable[[], bool]) -> bool:
        """So many steps are committed: commit some of those that were kept. True: it has the state, for which all have waited."""
        assert self._joining is not None
        return self._joining.advance(self._load, lambda kept, behind: self._repeat(kept, committed - behind), lost)

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

    def begin_again(self) -> None:
        """This member has caught up, and differs from the others: they are to wait until it has received their state."""
        if self._joining is not None:
            self._joining.fail("its state differs from theirs then: is something missing in register=?")

    def abort(self) -> None:
        """The members change: nothing more is sent. Called by any thread; does not wait."""
        if self._stream is not None:
            self._stream.abort()

    def close(self) -> None:
        """Nothing of the present view is used any more."""
        before, self._stream = self._stream, None
        if before is not None:
            before.close()
            if before.joining is not None:
                self._room = before.joining.next_room
