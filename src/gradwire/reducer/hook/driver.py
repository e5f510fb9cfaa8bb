"""Drives a reduction against a Group: the one place where hooks meet communication.

Note [Where a reduction runs]
On CUDA, if the group orders streams, it runs straight through in the caller's thread under a side stream: `wait` then does
not block the host, so the whole hook is enqueued while backward continues, from CUDA graphs where it can be captured
(`cuda_graphs.py`). Not so `mean()`, which computes nothing: the engine has a stream of its own, and to switch streams costs more
host time than all the rest of a launch. Elsewhere a hook of no collective is done at once; a hook of one is submitted at once and
finished by its waiter; a hook of several runs on the group's lane, one bucket after another, so that all ranks submit their
collectives in the same order. One backward may reach several models of a group: they share the lane, and while it is busy, a hook
of one collective queues there too. What the lane does on CUDA (gloo takes CUDA tensors and orders no streams) is on the side
stream, behind what the caller had enqueued at launch.

Note [Scopes]
A reduction may yield collectives of the ranks of one host, or of one rank per host. A group with a `layout` runs them in order with
all others. For any other group all ranks are one host, so collectives between hosts have no peers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from gradwire.collectives import Collective, Scope
from gradwire.collectives.aliasing import keep_for
from gradwire.collectives.reference import perform
from gradwire.errors import CollectiveTimeout, HookError
from gradwire.groups.base import Group
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.dense import Mean
from gradwire.hooks.pump import begin, run_by
from gradwire.recorder import writer
from gradwire.reducer.hook.cuda_graphs import CapturedReductions
from gradwire.runtime.threads import Worker


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> Tensor:
        """The averaged gradient, flat; raises what went wrong."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A reduction that has finished."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


Submit = Callable[[Collective], Work]


def _on(group: Group, submit: Submit) -> Callable[[Collective], Any]:
    """`submit` for collectives of any scope; what it returns can be waited for. See Note [Scopes]."""
    if group.layout is not None:
        return submit

    def submit_in_scope(op: Collective) -> Any:
        if op.scope is Scope.WORLD:
            return submit(op)
        op.check(*((group.rank, group.size) if op.scope is Scope.INSIDE else (0, 1)))
        plain = op.among(Scope.WORLD)
        if op.scope is Scope.INSIDE:
            return submit(plain)
        perform([plain])
        return Finished(torch.empty(0))

    return submit_in_scope


def run(reduction: Reduction, group: Group, submit: Submit | None = None) -> Tensor:
    """The value of a reduction; `submit` in place of that of the group."""
    return run_by(_on(group, submit or group.submit), reduction)


def _refuse(hook: CommHook, declared: str) -> Callable[[Collective], NoReturn]:
    def refuse(op: Collective) -> NoReturn:
        raise HookError(f"communication hook {hook!r} declares collectives = {declared} {op}.", hook=repr(hook))

    return refuse


class _LaneThread(Worker):
    failed: weakref.ref[Future[Tensor]] | None = None
    """A reduction that has failed: those behind it fail as it did, and submit nothing where other ranks are still at it. Weak, as
    its error may reach the model, and so the lane."""


class _Lane:
    """The thread of all models of a group. It ends with the last of their drivers, and at exit before the group does."""

    def __init__(self, group: Group) -> None:
        self.worker = _LaneThread(f"reductions-{group.name}-{group.rank}")
        weakref.finalize(self, self.worker.stop)
        _lanes[group.ledger] = weakref.ref(self)


_lanes: weakref.WeakKeyDictionary[Ledger, weakref.ref[_Lane]] = weakref.WeakKeyDictionary()
"""Weak on both sides: the error that a group has failed with may reach the model, and so the lane."""


class Driver:
    """Launches reductions of one group, in bucket order."""

    def __init__(self, group: Group) -> None:
        self.group = group
        lane = _lanes.get(group.ledger)
        self._owned: _Lane | None = (lane and lane()) or _Lane(group)
        self._lane = self._owned.worker
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.captured = CapturedReductions()

    def launch(self, hook: CommHook, grad: Tensor, state: Any, turn: Turn) -> Pending:
        """Start reducing `grad`; never waits for another rank, except on groups that block in `submit`."""
        if type(hook) is not Mean and grad.device.type == "cuda" and self.group.orders_streams(grad.device):
            return self._launch_on_stream(hook, grad, state, turn)
        reduction = begin(hook, hook.reduce, grad, state, turn, like=grad)
        if hook.collectives == 1 and not self._lane.unfinished and self._lane.failed is None:
            return SingleCollective(reduction, self.group, hook)
        if hook.collectives == 0:
            return Finished(run_by(_refuse(hook, "0 but yielded"), reduction))
        ordered = _Ordered(grad, self.side_stream(grad.device)) if grad.is_cuda else None
        return _OnLane(reduction, self.group, self._lane, turn, ordered)

    def _launch_on_stream(self, hook: CommHook, grad: Tensor, state: Any, turn: Turn) -> Pending:
        ordered = _Ordered(grad, self.side_stream(grad.device))
        with ordered.here():
            start = partial(begin, hook, hook.reduce, grad, state, like=grad)
            ordered.value = self.captured.run(start, hook, grad, state, turn, _on(self.group, self.group.submit))
        return ordered

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        return side

    def drain(self, timeout: float) -> None:
        """Wait until no reduction is at work on the lane. After a failure the group is first drained, then recovered: a reduction
        left over from the failed step would submit its next collective to the recovered group, where no rank expects it."""
        if not self._lane.idle:
            done = threading.Event()
            self._lane.put(done.set)
            if not done.wait(timeout):
                raise CollectiveTimeout(
                    f"reductions of a failed step on {self.group}: a hook is still at work after {timeout:.3g} s. "
                    "Find out what it computes between its collectives."
                )
        self._lane.failed = None

    def close(self) -> None:
        self._owned = None
        self.captured.drop()


class SingleCollective:
    """A reduction of one collective, submitted at once; what follows it runs in the waiter's thread."""

    def __init__(self, reduction: Reduction, group: Group, hook: CommHook) -> None:
        self._reduction = reduction
        self._hook = hook
        op = next(reduction, None)
        if op is None:
            raise HookError(f"communication hook {hook!r} declares collectives = 1 but yielded none.", hook=repr(hook))
        self._work = _on(group, group.submit)(op)

    def wait(self) -> Tensor:
        self._work.wait()
        return run_by(_refuse(self._hook, "1 but yielded a second one,"), self._reduction)


class _OnLane:
    """Several collectives, on the lane."""

    def __init__(
        self, reduction: Reduction, group: Group, lane: _LaneThread, turn: Turn, ordered: _Ordered | None
    ) -> None:
        self._future: Future[Tensor] = Future()
        self._ordered = ordered
        # Collectives have deadlines of their own; this one is for a hook that computes forever.
        self._timeout = 10 * group.timeout
        self._turn = turn
        place = writer.current_place()

        def job() -> None:
            if lane.failed is not None and (earlier := lane.failed()) is not None:
                self._future.set_exception(earlier.exception())
                return
            try:
                there = ordered.here() if ordered else contextlib.nullcontext()
                with torch.no_grad(), there, writer.within(place):
                    value = run_by(_on(group, group.run), reduction)
            except BaseException as error:
                lane.failed = weakref.ref(self._future)
                self._future.set_exception(error)
            else:  # not before `there` has recorded the event for which the stream of the waiter waits
                self._future.set_result(value)

        lane.put(job)

    def wait(self) -> Tensor:
        if not futures.wait([self._future], self._timeout).done:
            raise CollectiveTimeout(
                f"reduction of {self._turn.spec} on rank {self._turn.rank}: the hook has not finished after {self._timeout:.3g} s."
            )
        value = self._future.result()
        if self._ordered is None:
            return value
        self._ordered.value = value
        return self._ordered.wait()


class _Ordered:
    """Work on a side stream between what this thread has enqueued on a CUDA device and what it enqueues next.

    The thread that waits may be another one than that of the work. See Note [Where a reduction runs].
    """

    def __init__(self, grad: Tensor, side: torch.cuda.Stream) -> None:
        self.value: Tensor
        self._side = side
        self._ready = torch.cuda.current_stream(grad.device).record_event()
        keep_for(side, grad)
        self._done = torch.cuda.Event()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """On the side stream, after the caller's work."""
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._ready)
            try:
                yield
            finally:
                self._done.record(self._side)

    def wait(self) -> Tensor:
        """The value, for whatever the current stream does next."""
        stream = torch.cuda.current_stream(self._side.device)
        stream.wait_event(self._done)
        if self.value.is_cuda:
            keep_for(stream, self.value)
        return self.value
