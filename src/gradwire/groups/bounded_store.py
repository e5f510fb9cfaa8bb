"""Calls of a rendezvous store that come back in time.

Note [Store calls without a deadline]
A store's own time-out covers waiting for a key, not waiting for an answer: every call of a TCPStore blocks for as long as the
process that hosts it is stopped, or the host has lost its power. torch's FileStore appends records to a file, and reads one to its
end; if a process is killed while it writes, the record has no end, and every call of the others reads forever. So calls are made
on a thread, and given up when the time is over. That thread cannot be ended; it is left behind, and the store is not called again.

At interpreter exit such threads get a moment to come back, after the last group has ended: a thread that comes back from C++ later
takes the process down with it. See Note [The engine's threads and the interpreter's end].
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore

from gradwire.concurrency import BoundedCall
from gradwire.errors import CollectiveTimeout

_THREAD = "gradwire-store-call"
_GRACE = 0.5
"""Seconds more than the time-out, so that a store that can tell more does so first."""
_EXIT_GRACE = 5.0
"""Seconds that calls under way get at interpreter exit."""


def innermost(store: Any) -> Any:
    """What is under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _await_calls() -> None:
    """At interpreter exit: wait until no thread is inside a store, for a moment."""
    deadline = time.monotonic() + _EXIT_GRACE
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(max(0.0, deadline - time.monotonic()))


# Finalizers run in the reverse order of their making: this one after those of all groups, which may still call the store.
weakref.finalize(BoundedCall, _await_calls)


def bounded(store: Any, timeout: float, who: object) -> Any:
    """`store` with calls that take at most `timeout`; itself if it is in this process. `who` waits, for the error."""
    return store if isinstance(innermost(store), HashStore) else _Bounded(store, timeout, who)


class _Bounded:
    def __init__(self, store: Any, timeout: float, who: object) -> None:
        self._store, self._timeout, self._who = store, timeout, who

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            made = BoundedCall(lambda: method(*args), name=_THREAD)
            if not made.wait(self._timeout + _GRACE):
                raise CollectiveTimeout(
                    f"{self._who}: {name}{args} has not come back from the store through which ranks meet within "
                    f"{self._timeout:.3g} s. The process that hosts it is stopped or its host cannot be reached; where it is a "
                    "file, a rank has probably died while it wrote. Look at the others' output, and meet through another store."
                )
            return made.result()

        return call


class StoreCalls:
    """Exchanges with one store, one at a time, that a caller waits for only as long as it wants."""

    def __init__(self, store: Any, *, patience: float, attempts: int = 3) -> None:
        """After `attempts` failures in a row, or one exchange that takes more than `patience` seconds, the store is lost."""
        self._direct = isinstance(innermost(store), HashStore)
        self._patience = patience
        self._attempts = attempts
        self._failures = 0
        self._lock = threading.RLock()  # abort() in a signal handler may interrupt a call of this thread's
        self._call: BoundedCall[None] | None = None
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether the store has stopped answering, or is no longer used."""
        call = self._call
        stuck = call is not None and call.thread.is_alive() and time.monotonic() - call.began > self._patience
        return self._closed or stuck or self._failures >= self._attempts

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        call = self._call
        return call is not None and call.thread.is_alive()

    def run(self, exchange: Callable[[], Any], *, within: float) -> bool:
        """Carry out `exchange` on a thread; whether it went well within so many seconds. It may go well later."""
        deadline = time.monotonic() + within
        if not self._lock.acquire(timeout=max(0.0, within)):
            return False
        try:
            call = self._call
            if self.lost or (call is not None and not call.wait(deadline - time.monotonic())) or self.lost:
                return False
            done: list[bool] = []
            if self._direct:
                self._attempt(exchange, done)
                return bool(done)
            call = self._call = BoundedCall(lambda: self._attempt(exchange, done), name=_THREAD)
            call.wait(deadline - time.monotonic())
            return bool(done)
        finally:
            self._lock.release()

    def _attempt(self, exchange: Callable[[], Any], done: list[bool]) -> None:
        try:
            exchange()
        except (RuntimeError, ValueError):  # c10d's store errors are RuntimeErrors; a torn page is a ValueError
            self._failures += 1
        else:
            self._failures = 0
            done.append(True)

    def close(self) -> None:
        """Call the store no more."""
        self._closed = True
