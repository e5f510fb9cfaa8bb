"""What is called when an operation is over, on threads of its own: completion hooks, and the callbacks of futures.

Hooks are called for every finished operation, in completion order. torch's PythonOnCompletionHook lets an exception escape into the
engine's thread. Here one thread per group, started with the first hook, calls them. What a hook raises is kept; the group's next
wait raises it, chained and with the hook's name.

Note [Callbacks that wait]
`future.then(fn)` runs `fn` in the thread that completes the future. That must not be the thread that settles the operation: it
may wait for a second one, as torch's PowerSGD hook does, which then would never run. So a group has a thread for futures; one,
because callbacks that submit operations must do so in the same order on all ranks, the order in which operations are settled.
A callback may also wait for the *future* of an operation that it has submitted itself. So futures created inside a callback belong
to a second thread, those created in their callbacks to a third, and so on: one thread per depth.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Signature
from gradwire.errors import HookError, UsageTypeError, again
from gradwire.events import Callbacks, Handle
from gradwire.runtime.threads import Worker


@dataclass(frozen=True, slots=True)
class WorkInfo:
    """A finished operation: what completion hooks receive."""

    op: Signature
    group: str
    rank: int
    seq: int
    bytes: int
    started: float
    finished: float
    error: BaseException | None

    @property
    def kind(self) -> str:
        """The operation's name, such as "all_reduce"."""
        return str(self.op.kind.value)

    @property
    def label(self) -> str:
        return self.op.label

    @property
    def duration(self) -> float:
        return self.finished - self.started


CompletionHook = Callable[[WorkInfo], None]


def name_of(fn: object) -> str:
    """A hook's name as torch gives it: its `__name__` when that is a string."""
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    return name if isinstance(name, str) else f"<{type(fn).__name__}>"


class CompletionHooks:
    """The hooks of one group and the thread that calls them. Holds no reference to the group."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._hooks: Callbacks[CompletionHook] = Callbacks()
        self._worker = Worker(f"completion-{owner}")
        self.errors: deque[HookError] = deque(maxlen=16)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, fn: CompletionHook) -> Handle:
        """Call `fn(info)` for every operation that finishes from now on."""
        if not callable(fn):
            raise UsageTypeError(
                f"on_completion of {self._owner}: {fn!r} is not callable. Pass a function of a WorkInfo."
            )
        self._worker.start()
        return self._hooks.add(fn)

    def put(self, info: WorkInfo) -> None:
        """Queue one finished operation. One that finishes after the group has ended is not reported."""
        if not self._worker.stopping.is_set():
            self._worker.put(lambda: self._call(info))

    def _call(self, info: WorkInfo) -> None:
        for fn in self._hooks:
            try:
                fn(info)
            except BaseException as error:  # a hook must not kill the thread, whatever it raises
                wrapped = HookError(
                    f"completion hook {name_of(fn)!r} of {self._owner} raised {type(error).__name__}: {error} when called for "
                    f"operation #{info.seq}, {info.op}. The operation itself is not affected; fix or remove the hook.",
                    hook=name_of(fn),
                )
                wrapped.__cause__ = error
                self.errors.append(wrapped)

    def flush(self, timeout: float) -> bool:
        """Wait until the hooks have been called for everything queued so far. False on timeout."""
        if self._worker.idle or self._worker.is_current_thread or self._worker.stopping.is_set():
            return True
        reached = threading.Event()
        self._worker.put(reached.set)
        return reached.wait(timeout)

    def stop(self, timeout: float) -> None:
        """Call the hooks for what is queued, then end the thread."""
        self._worker.stop(timeout)


_CURRENT = threading.local()
"""`depth`: the nesting depth of future callbacks in the current thread."""


class FutureThreads:
    """The threads that complete the futures of one group on one rank, by depth. Holds no reference to the group."""

    def __init__(self, owner: str) -> None:
        self._name = f"futures-{owner}"
        self._workers: list[Worker] = []
        self._unfinished: dict[OutcomeFuture, tuple[BaseException | None, Sequence[Tensor]]] = {}
        self._stopped = False
        self.lock = threading.Lock()
        """Held while a future is made. Never taken by a thread that settles an operation."""

    def new_future(self, device: torch.device, problems: deque[BaseException]) -> OutcomeFuture:
        """A future for the caller. Call it under `lock`."""
        depth: int = getattr(_CURRENT, "depth", 0)
        while depth >= len(self._workers) and not self._stopped:
            self._workers.append(Worker(f"{self._name}-{len(self._workers)}"))
            self._workers[-1].start()
        return OutcomeFuture(device, depth, problems)

    def put(self, future: OutcomeFuture, error: BaseException | None, outputs: Sequence[Tensor]) -> None:
        """Complete `future` after those put before; at once if the threads have been stopped. Takes no lock: `abort()` in a signal
        handler may interrupt any thread anywhere."""
        self._unfinished[future] = error, outputs
        if not self._stopped:
            self._workers[future.depth].put(lambda: self._complete(future))
        if self._stopped:  # perhaps since then
            self._complete(future)

    def _complete(self, future: OutcomeFuture) -> None:
        outer, _CURRENT.depth = getattr(_CURRENT, "depth", 0), future.depth + 1
        try:
            if (outcome := self._unfinished.pop(future, None)) is not None:
                future.complete(*outcome)
        finally:
            _CURRENT.depth = outer

    def stop(self, timeout: float) -> None:
        """Complete the futures of settled operations, then end the threads. What a blocked thread leaves is completed here."""
        until = time.perf_counter() + timeout
        with self.lock:
            self._stopped = True
        for worker in self._workers:
            worker.stop(max(0.0, until - time.perf_counter()))
        for future in list(self._unfinished):
            self._complete(future)


class OutcomeFuture:
    """The torch Future of one operation. The first of several threads completes it. See Note [Callbacks that wait]."""

    def __init__(self, device: torch.device, depth: int, problems: deque[BaseException]) -> None:
        devices: list[Any] | None = [device] if device.type == "cuda" else None
        self.torch_future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self.depth = depth
        self._problems = problems
        self._claim = [None]

    @property
    def completed(self) -> bool:
        """Whether a thread has completed it, or is about to."""
        return not self._claim

    def complete(self, error: BaseException | None, outputs: Sequence[Tensor]) -> None:
        """Complete it here; a second call does nothing."""
        try:
            self._claim.pop()
        except IndexError:
            return
        try:
            if isinstance(error, Exception):
                self.torch_future.set_exception(again(error))
            elif error is not None:
                self.torch_future.set_exception(RuntimeError(repr(error)))
            else:
                self.torch_future.set_result(list(outputs))
        except Exception as problem:  # the caller has completed it, which is not allowed
            self._problems.append(problem)
