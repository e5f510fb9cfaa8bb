"""A rendezvous through a file, with a deadline.

Note [A record cut short]
torch's FileStore appends records to a file, and whoever reads one reads to its end. If a process is killed while it writes, the
record has no end: everybody else then reads for ever, in whichever call comes next, and no time-out of the store is looked at. So
calls of a FileStore are made in a thread, and given up when the time is over. That thread cannot be ended; it keeps a core busy
until the process ends, which after such an error is usually soon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore

from gradwire.errors import CollectiveTimeout

_GRACE = 0.5
"""Seconds more than the time-out, so that a store that can tell more does so first."""


def innermost(store: Any) -> Any:
    """What is under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def bounded(store: Any, timeout: float, who: object) -> Any:
    """`store` itself, or where it is a file one whose calls take at most `timeout`. `who` waits, for the error."""
    return _Bounded(store, timeout, who) if isinstance(innermost(store), FileStore) else store


class _Bounded:
    def __init__(self, store: Any, timeout: float, who: object) -> None:
        self._store, self._timeout, self._who = store, timeout, who

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            outcome: list[tuple[bool, Any]] = []

            def work() -> None:
                try:
                    outcome.append((True, method(*args)))
                except BaseException as error:
                    outcome.append((False, error))

            thread = threading.Thread(target=work, name=f"gradwire-file-store-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, and starts no more threads
                return method(*args)
            thread.join(self._timeout + _GRACE)
            if not outcome:
                raise CollectiveTimeout(
                    f"{self._who}: {name}{args} has not come back from the file through which ranks meet within "
                    f"{self._timeout:.3g} s. A rank has probably died while it wrote there. Look at the others' output, and meet "
                    "through a new file or over TCP."
                )
            well, result = outcome[0]
            if not well:
                raise result
            return result

        return call
