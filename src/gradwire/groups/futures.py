"""Threads that complete futures, so that their callbacks may wait for other operations of the same group.

Note [Callbacks that wait]
`future.then(fn)` runs `fn` in the thread that completes the future. That must not be the thread that settles the operation: it may
drive the group, or belong to another rank, and `fn` may wait for a second operation, which then would never run. torch's PowerSGD
hook does that in every step. So a group has a thread for futures, started by the first `get_future()`. One thread, because
callbacks that submit operations must do so in the same order on all ranks, which is the order in which operations are settled.

A callback may also wait for the *future* of an operation that it has submitted itself, as PowerSGD does. The thread that would
complete that future cannot wait for it. So futures created inside a callback belong to a second thread, those created in their
callbacks to a third, and so on: one thread per depth.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import again

Job = Callable[[], None]

_CURRENT = threading.local()
"""`depth`: the nesting depth of future callbacks in the current thread."""


class FutureQueue:
    """The futures of one depth. `put` takes no lock: `abort()` in a signal handler may interrupt any thread anywhere."""

    def __init__(self, name: str, depth: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopped = False
        self._depth = depth
        self._thread = threading.Thread(target=self._run, name=f"{name}-{depth}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Run `job()`, which must not raise, after those put before; at once if the thread has been stopped."""
        self._jobs.put(job)
        if self._stopped:
            self._drain()

    def _run(self) -> None:
        _CURRENT.depth = self._depth + 1
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def stop(self, until: float) -> None:
        """Run what was put so far and end the thread. If the thread is blocked at `until`, the rest is run here."""
        self._jobs.put(None)
        self._stopped = True
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, until - time.perf_counter()))
            self._drain()

    def _drain(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job()
        self._jobs.put(None)


class FutureThreads:
    """The threads that complete the futures of one group on one rank. Holds no reference to the group."""

    def __init__(self, owner: str) -> None:
        self._name = f"gradwire-futures-{owner}"
        self._queues: dict[int, FutureQueue] = {}
        self._stopped = False
        self.lock = threading.Lock()
        """Held while a future is made. Never taken by a thread that settles an operation."""

    def queue_for_caller(self) -> FutureQueue | None:
        """The queue for futures created in the current thread, or None if the group has ended. Call it under `lock`."""
        depth: int = getattr(_CURRENT, "depth", 0)
        if depth not in self._queues and not self._stopped:
            self._queues[depth] = FutureQueue(self._name, depth)
        return self._queues.get(depth)

    def stop(self, timeout: float) -> None:
        """Complete the futures of settled operations, then end the threads."""
        until = time.perf_counter() + timeout
        with self.lock:
            self._stopped = True
            queues = list(self._queues.values())
        for each in queues:
            each.stop(until)


class OutcomeFuture:
    """The torch Future of one operation. The first of several threads completes it. See Note [Callbacks that wait]."""

    def __init__(self, device: torch.device, queue: FutureQueue | None, problems: deque[BaseException]) -> None:
        """`queue` completes it when the operation is settled; without one, the settling thread does."""
        self.torch_future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        self._queue = queue
        self._problems = problems
        self._claim = [None]

    @property
    def completed(self) -> bool:
        """Whether a thread has completed it, or is about to."""
        return not self._claim

    def complete_in_queue(self, error: BaseException | None, outputs: Sequence[Tensor]) -> None:
        """The operation is settled: complete it in its queue."""
        if self._queue is None:
            self.complete(error, outputs)
        else:
            self._queue.put(lambda: self.complete(error, outputs))

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
