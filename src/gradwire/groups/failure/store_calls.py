"""Calls to a rendezvous store with a bounded duration.

Note [Store calls without a deadline]
A store's own timeout covers waiting for a key, not waiting for an answer: every call to a TCPStore blocks for as long as the
process that hosts it is stopped, and every call to a FileStore forever if a process was killed while it wrote. So calls are made on
a thread and abandoned when the time is up; the store is not called again. See Note [Threads in C++ at exit].
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C import _DistNetworkError
from torch._C._distributed_c10d import HashStore, PrefixStore

from gradwire.errors import CollectiveTimeout, GroupError
from gradwire.runtime.threads import BoundedCall

_THREAD = "gradwire-store-call"
_GRACE = 0.5
"""Seconds added to the timeout, so that a store that can report more does so first."""


def innermost(store: Any) -> Any:
    """The store below all PrefixStores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def bounded(store: Any, timeout: float, who: object) -> Any:
    """`store` with calls that take at most `timeout`; unchanged if none waits for another process. Errors begin with `who`."""
    inner = innermost(store)
    direct = isinstance(inner, HashStore) or getattr(type(inner), "has_no_host", False)
    return store if direct else _Bounded(store, timeout, who)


class _Bounded:
    def __init__(self, store: Any, timeout: float, who: object) -> None:
        self._store, self._timeout, self._who = store, timeout, who

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            made = BoundedCall(lambda: method(*args), name=_THREAD)
            if not made.wait(self._timeout + _GRACE):
                raise CollectiveTimeout(
                    f"{self._who}: the rendezvous store has not answered {name}{args} within {self._timeout:.3g} s. The process "
                    "that hosts it is stopped or its host cannot be reached; if the store is a file, a rank has probably died "
                    "while writing. Look at the other ranks' output, and use a new store."
                )
            try:
                return made.result()
            except _DistNetworkError as error:
                raise GroupError(
                    f"{self._who}: the connection to the rendezvous store has failed. The process that hosts it, often rank 0, has "
                    "ended, or its host cannot be reached any more. Look at that rank's output."
                ) from error

        return call


class StoreCalls:
    """Exchanges with one store, one at a time, each with a bounded wait."""

    def __init__(self, store: Any, *, patience: float) -> None:
        """After three failures in a row, or one exchange that takes more than `patience` seconds, the store counts as lost."""
        self._direct = isinstance(innermost(store), HashStore)
        self._patience = patience
        self._failures = 0
        self._lock = threading.RLock()  # abort() in a signal handler may interrupt a call on the same thread
        self._call: BoundedCall[bool] | None = None
        self.closed = False

    @property
    def lost(self) -> bool:
        """Whether the store has stopped answering, or is no longer used."""
        call = self._call
        stuck = call is not None and self.busy and time.monotonic() - call.began > self._patience
        return self.closed or stuck or self._failures >= 3

    @property
    def busy(self) -> bool:
        call = self._call
        return call is not None and call.thread.is_alive()

    def run(self, exchange: Callable[[], Any], *, within: float) -> bool:
        """Run `exchange` on a thread; whether it succeeded `within` that many seconds. It may still succeed later."""
        deadline = time.monotonic() + within
        if not self._lock.acquire(timeout=max(0.0, within)):
            return False
        try:
            call = self._call
            if self.lost or (call is not None and not call.wait(deadline - time.monotonic())) or self.lost:
                return False
            if self._direct:
                return self._attempt(exchange)
            call = self._call = BoundedCall(lambda: self._attempt(exchange), name=_THREAD)
            return call.wait(deadline - time.monotonic()) and call.result()
        finally:
            self._lock.release()

    def _attempt(self, exchange: Callable[[], Any]) -> bool:
        try:
            exchange()
        except Exception:  # c10d's store errors are RuntimeErrors; a torn page, or a user's own store, may raise any
            self._failures += 1
            return False
        self._failures = 0
        return True
