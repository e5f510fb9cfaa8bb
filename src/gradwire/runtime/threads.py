"""A thread that runs jobs in order, a call with a bounded wait, and a callback that does not keep its object alive."""

from __future__ import annotations

import ctypes
import queue
import signal
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, ParamSpec, TypeVar

Job = Callable[[], None]
P = ParamSpec("P")
R = TypeVar("R")


class Worker:
    """A thread that runs jobs in FIFO order, started by the first job. Only the jobs hold references to its owner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self.unfinished: deque[None] = deque()
        self.stopping = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether every job put so far is done. Exact only in the thread that puts them."""
        return not self.unfinished

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is one of the worker's jobs."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread now instead of with the first job."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"gradwire-{self._name}", daemon=True)
                if self._thread is None:  # a signal handler may have put a job meanwhile
                    self._thread = thread
                    thread.start()

    def put(self, job: Job) -> None:
        """Run `job()` after those put before it. A job handles its own errors. Takes no lock once the thread runs: a signal handler
        that calls `abort()` may interrupt any thread anywhere, even in here."""
        if self._thread is None:
            self.start()
        self.unfinished.append(None)
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job
                self.unfinished.popleft()

    def stop(self, timeout: float = 5.0) -> bool:
        """Finish the jobs put so far and end the thread. False if it has not ended after `timeout` seconds."""
        self.stopping.set()
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._jobs.put(None)
        if thread is threading.current_thread():  # the last job held the last reference to the worker's owner
            return True
        thread.join(timeout)
        return not thread.is_alive()


class BoundedCall(Generic[R]):
    """One call on its own thread. A thread that does not return in time is abandoned: it cannot be stopped.

    Note [Threads in C++ at exit]
    Before Python 3.14, a thread that returns from C++ while the interpreter shuts down is unwound, which makes C++ abort the
    program. So at exit, after all groups have ended, calls get a moment to return; threads still in one are then suspended in a
    signal handler.
    """

    def __init__(self, job: Callable[[], R], *, name: str) -> None:
        self._job = job
        self._future: Future[R] = Future()
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self.thread.start()
            _CALLS.add(self.thread)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._run()

    def _run(self) -> None:
        try:
            self._future.set_result(self._job())
        except BaseException as error:
            self._future.set_exception(error)

    def wait(self, timeout: float) -> bool:
        """Whether the call finished within `timeout` seconds."""
        if self.thread.ident is not None:
            self.thread.join(max(0.0, timeout))
        return not self.thread.is_alive()

    def abandon(self) -> None:
        """The result is no longer of use: the interpreter's exit does not wait for it."""
        _ABANDONED.add(self.thread)

    def result(self) -> R:
        """Return what the call returned, or raise what it raised. The call must have finished."""
        return self._future.result()


_CALLS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ABANDONED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_EXIT_GRACE, _ABANDONED_GRACE = 1.0, 0.1
"""Seconds that calls in progress, and abandoned ones, get at interpreter exit."""


def _leave_calls() -> None:
    """See Note [Threads in C++ at exit]."""
    began = time.monotonic()
    stuck = [thread for thread in list(_CALLS) if thread.is_alive()]
    for thread in stuck:
        grace = _ABANDONED_GRACE if thread in _ABANDONED else _EXIT_GRACE
        thread.join(max(0.0, began + grace - time.monotonic()))
    stuck = [thread for thread in stuck if thread.is_alive() and thread.ident is not None]
    if stuck and sys.version_info < (3, 14) and hasattr(signal, "SIGRTMAX"):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGRTMAX, ctypes.cast(libc.pause, ctypes.c_void_p))
        for thread in stuck:
            signal.pthread_kill(thread.ident, signal.SIGRTMAX)  # type: ignore[arg-type]


# Finalizers run in reverse order of creation: this one after those of all groups, which may still make calls.
_at_exit = weakref.finalize(BoundedCall, _leave_calls)


def weakly(fn: Callable[P, R]) -> Callable[P, R | None]:
    """A bound method that does not keep its object alive: once that is gone, calls return None. Functions are returned as is."""
    if not isinstance(fn, types.MethodType):
        return fn
    owner, method = weakref.ref(fn.__self__), fn.__func__

    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        alive = owner()
        result: R | None = None if alive is None else method(alive, *args, **kwargs)
        return result

    return call
