"""A Work over c10d's Work, and the thread that detects when those are done.

Note [Who detects that the engine is done]
The caller, if it waits: it waits inside the engine and settles the Work itself, so a synchronous operation wakes no other
thread. The poller's thread, if something must be called promptly: a future, a done-callback, a completion hook, a listener.
Otherwise the watchdog's tick, which is soon enough for a Work that was dropped. An engine that orders streams has a stream of its
own; only a wait makes the waiter's current stream wait for that one.

Note [Inside a CUDA graph]
What is submitted while a graph is captured runs later, or never: it is over at once, in the order of the current stream. Its
events must not be asked for, and those of earlier operations only by a thread in relaxed capture mode, or the capture fails.

Note [CUDA tensors over a host engine]
Gloo reads CUDA tensors in the order of the calling thread's current stream, and orders the result before later work on that of the
waiting thread. But the lane and the poller do not see the stream on which a gradient was computed, nor the one on which it will be
read. So they use `SideStreams`: a stream that waits for what the submitter had enqueued, and that they synchronize, so the result
of a finished Work is visible to every stream.

Note [Threads for messages]
Messages with different peers and tags finish in any order, gloo's Work of a message can only be waited on, and a wait that times
out closes all connections of the engine. So each message is waited for once, up to its deadline, by a thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from gradwire.collectives import Collective
from gradwire.collectives.aliasing import keep_for
from gradwire.events import is_kept
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.threads import Worker

_SLICE = 0.1


class SideStreams:
    """One side stream per CUDA device. See Note [CUDA tensors over a host engine]."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def __call__(self, device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run the block on that stream after `after`, then synchronize it. No effect on the CPU."""
        if device.type != "cuda":
            yield
            return
        side = self._stream(device)
        with torch.cuda.device(device), torch.cuda.stream(side):
            if after is not None:
                side.wait_event(after)
            yield
            side.synchronize()

    @contextlib.contextmanager
    def behind(self, op: Collective) -> Iterator[None]:
        """Run the block, which works on the tensors of `op`, on that stream after what the current stream has been given so far."""
        side = self._stream(op.device)
        side.wait_stream(torch.cuda.current_stream(op.device))
        for t in op.tensors:
            keep_for(side, t)
        with torch.cuda.stream(side):
            yield

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @staticmethod
    def mark(device: torch.device) -> torch.cuda.Event | None:
        """An event recorded on the current stream of a CUDA device; None for other devices."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_slice(native: Any, limit: float = _SLICE) -> bool:
    """Wait briefly for c10d's Work: True if it has finished, False if it still runs; raises if it failed.

    Note [Waiting in slices]
    A wait that times out looks like a failure; so after one, `is_completed` is checked, and a completed Work is waited on once
    more. Slices let a thread see that its owner is closing: one that is inside the engine at exit may crash the process.
    """
    try:
        native.wait(timedelta(seconds=max(limit, 0.002)))  # c10d rounds to milliseconds, and 0 would mean "forever"
    except RuntimeError:
        if not native.is_completed():
            return False
        native.wait()
    return True


class C10dWork(Work):
    """A Work whose engine can be waited on: by the caller, or by the poller if no caller waits."""

    native: Any = None
    """c10d's Work, while the engine is busy with this one."""
    left_in_engine = False
    """Whether the engine was still busy with it when it failed here."""
    in_graph = False
    """Whether a CUDA graph is captured meanwhile: see Note [Inside a CUDA graph]."""
    _ordered = False  # whether a wait for `native` only orders the current stream
    _event: torch.cuda.Event | None = None
    _stream: int | None = None  # the submitter's, if the operation has nothing to do
    _on_error: Callable[[BaseException], None] | None = None
    _poller: CompletionPoller | None = None
    _polled = False

    def finish_on_stream(self) -> None:
        """Nothing is done, but what the submitter's stream holds comes before what a waiter's stream does next."""
        if not self.op.is_on_host:
            self._stream = torch._C._cuda_getCurrentRawStream(self.op.device.index)
        self.finish()

    def settle_in_graph(self) -> None:
        if not self.settled:
            self._order()
            self.native = self._event = None
            self.finish()

    def watch(
        self, native: Any, on_error: Callable[[BaseException], None], poller: CompletionPoller, *, ordered: bool = False
    ) -> None:
        """The engine is busy with it. `ordered`: a wait for `native` only orders the current stream."""
        self._on_error = on_error
        self._poller = poller
        self._ordered = ordered
        self.native = native
        self._poll_if_needed()

    def watch_stream(self, poller: CompletionPoller) -> None:
        """From now on follow the current CUDA stream: the result is ready when the stream reaches this point."""
        self._poller = poller
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self.op.device))
        self._poll_if_needed()

    def _settle(self, outcome: list[BaseException | None], source_rank: int | None) -> bool:
        settled = super()._settle(outcome, source_rank)
        native, self.native = self.native, None  # a caller that keeps this Work must not keep the engine's sockets open
        if native is not None and not self._ordered and not native.is_completed() and self._poller is not None:
            self.left_in_engine = True
            self._poller.abandon(native)
        self._on_error = None  # it references the group and this Work: a cycle that would keep the tensors alive
        return settled

    def _poll_if_needed(self) -> None:
        needed = self._future is not None or self._callbacks or self.ledger.hooks or self.ledger.events
        if needed and self._poller is not None and not self._polled and not self.in_graph and not self.settled:
            self._polled = True
            self._poller.put(self)

    def add_done_callback(self, fn: Callable[[Work], None]) -> None:
        super().add_done_callback(fn)
        self._poll_if_needed()

    def is_completed(self) -> bool:
        return self.settled or self.look()

    def look(self) -> bool:
        """Settle if the engine is done, without waiting. True once settled."""
        native = self.native
        if not self.in_graph and (self._event is not None or (native is not None and native.is_completed())):
            return self.poll(_SLICE)
        return self.settled

    def poll(self, limit: float) -> bool:
        """Wait briefly; settle if the engine is done. True once settled."""
        native, event = self.native, self._event
        if self.settled:
            return True
        try:
            if event is not None:
                if not event.query():
                    return False
            elif self._ordered:
                if native is None or not native.is_completed():
                    return self.settled
            elif native is None or self._poller is None or not self._poller.wait(native, limit, self.op.device):
                return self.settled
        except BaseException as error:
            if not is_kept(error):
                raise
            self.native = None
            if (on_error := self._on_error) is not None:  # else it is already settled
                on_error(error)
            return True
        self.native = None
        self.finish()
        return True

    def wait_settled(self, limit: float) -> bool:
        """As in Work, but inside the engine; an operation on a CUDA stream orders the current stream instead."""
        if self._order():
            return True
        deadline = time.perf_counter() + limit
        while self.native is not None and (left := deadline - time.perf_counter()) > 0:
            if (self._poller is not None and self._poller.stopping) or self.poll(min(left, _SLICE)):
                break  # when the group or the interpreter ends, no thread should be inside the engine
        return super().wait_settled(max(0.0, deadline - time.perf_counter()))

    def get_future(self) -> torch.futures.Future[Any]:
        """As in Work; with a stream-ordered engine it is completed at once and preserves stream order, as with NCCL."""
        if self._stream is not None:
            self._order()
        future = super().get_future()
        self._poll_if_needed()
        if self._future is not None and not self._future.completed and self._order():
            self._future.complete(self._error, self.op.outputs)
        return future

    def _order(self) -> bool:
        """Make the current stream wait for the engine's, and return True, if the engine orders streams."""
        native, device = self.native, self.op.device
        if self._stream is not None:
            if torch._C._cuda_getCurrentRawStream(device.index) != self._stream:
                torch.cuda.current_stream(device).wait_stream(torch.cuda.ExternalStream(self._stream, device))
        elif self._event is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._event)
            for t in self.op.outputs:
                keep_for(stream, t)
        elif self._ordered and native is not None:  # else the engine is done, or has failed
            try:
                native.wait()
            except Exception as error:
                if (on_error := self._on_error) is not None:
                    on_error(error)
        return self._ordered or self._event is not None or self._stream is not None


_relaxed = threading.local()


def _relax_capture_mode() -> None:
    """For this thread: see [Inside a CUDA graph]. torch has no function for it, so the driver is called."""
    if torch.cuda.is_initialized() and not getattr(_relaxed, "done", False):
        _relaxed.done = True
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))


class CompletionPoller:
    """The thread that settles Works no caller waits for. Started with the first; holds no reference to the group."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(f"poller-{name}")
        self._lock = threading.RLock()  # abort() in a signal handler may interrupt this thread under it
        self._side_stream = SideStreams()
        self._inside = 0
        self.stopping = False
        self.abandoned: list[Any] = []
        """c10d's Works that the engine was still busy with when ours failed."""

    def put(self, work: C10dWork) -> None:
        """Make sure that `work` is settled when its engine is done. Called in submission order."""
        self._worker.put(lambda: self._settle(work))

    @staticmethod
    def settle_finished(ledger: Ledger) -> None:
        """Settle the operations in flight whose engine is done."""
        _relax_capture_mode()
        for work in list(ledger.pending.values()):
            if isinstance(work, C10dWork):
                work.look()

    def abandon(self, native: Any) -> None:
        """Keep a Work that is no longer waited for until the engine is done with it."""
        with self._lock:
            self.abandoned = [*self.take_abandoned(), native]

    def take_abandoned(self) -> list[Any]:
        """Those that the engine is still busy with."""
        with self._lock:
            self.abandoned = [native for native in self.abandoned if not native.is_completed()]
            return list(self.abandoned)

    def wait(self, native: Any, limit: float, device: torch.device) -> bool:
        """`wait_slice`, counted, so that `stop` knows when no thread is inside the engine."""
        if self.stopping:
            return False
        with self._lock:
            self._inside += 1
        try:
            with self._side_stream(device):
                return wait_slice(native, limit)
        finally:
            with self._lock:
                self._inside -= 1

    def _settle(self, work: C10dWork) -> None:
        _relax_capture_mode()
        while not self.stopping and not work.poll(_SLICE):
            if work._event is not None or work._ordered:
                time.sleep(0.0005)  # CUDA events can only be waited for without a timeout; polling can be stopped

    def stop(self, timeout: float) -> None:
        """End the thread; what is not settled by then is no longer watched."""
        self.stopping = True
        self._worker.stop(timeout)
        deadline = time.perf_counter() + timeout
        while self._inside and time.perf_counter() < deadline:
            time.sleep(0.005)


class MessageThreads:
    """See Note [Threads for messages]."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.running: dict[threading.Thread, Any] = {}
        """The threads, and c10d's Work that each waits for in the engine."""

    def start(self, native: Any, finish: Callable[[], None]) -> None:
        """Call `finish`, which waits for the engine's `native`, on a thread."""

        def run() -> None:
            finish()
            self.running.pop(threading.current_thread(), None)

        thread = threading.Thread(target=run, name=f"gradwire-messages-{self._name}", daemon=True)
        self.running[thread] = native
        with on_failure(self.running.pop, thread):
            thread.start()

    def stop(self, timeout: float) -> bool:
        """Wait until the threads have left the engine. Whether they have."""
        deadline = time.monotonic() + timeout
        threads = [thread for thread in list(self.running) if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
