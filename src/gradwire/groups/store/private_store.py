"""`PrivateStore`: a rendezvous store for the processes of one user on one host, which no other user can read or write.

A TCPStore has no authentication: every user of the host can connect to it, list its keys and change them. This store is a file that
only this user's processes can open (`private_log.py`), so no process hosts it and it survives the exit of any of them. This module
implements torch's Store interface over it.

Note [Kept until closed]
C++ code (a PrefixStore, an engine) keeps the C++ half of a store alive, but calls methods of the Python half. So an open store is
referenced here until `close()`, after which every call raises. `close()` never waits: garbage collection may call it on a thread
that is inside the store. The descriptor is closed when no thread is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from gradwire.groups.store.private_log import PrivateLog, pause
from gradwire.runtime.private_file import create, open_private


class PrivateStore(Store):
    """A store over a private file. Other processes open it by its `name`.

    >>> with PrivateStore.create() as store, PrivateStore.open(store.name) as other:
    ...     store.set("key", "value")
    ...     other.get("key"), other.add("count", 2), store.add("count", 1)
    (b'value', 2, 3)
    """

    def __init__(self, fd: int, *, keep: Any = None) -> None:
        """Owns `fd`. `keep` is kept alive while this store is open."""
        super().__init__()
        self._log = PrivateLog(fd)
        self._keep = keep
        _OPEN.add(self)

    @classmethod
    def create(cls, *, keep: Any = None) -> PrivateStore:
        """A new store."""
        return cls(create(), keep=keep)

    @classmethod
    def open(cls, name: str) -> PrivateStore:
        """The store of another process of this user."""
        return cls(open_private(name))

    @property
    def name(self) -> str:
        """The name by which other processes open it, while it is open here."""
        return self._log.name

    def holds(self, fd: int) -> bool:
        """Whether `fd` of this process leads to this store's file."""
        return self._log.holds(fd)

    def close(self) -> None:
        """Release the file. Closing twice is a no-op; any other call raises from now on. See Note [Kept until closed]."""
        self._keep = None
        _OPEN.discard(self)
        self._log.close()

    def __enter__(self) -> PrivateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Write one key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys at once."""
        with self._log.locked():
            self._log.append([(key, _bytes(value)) for key, value in zip(keys, values, strict=True)])

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until all are set."""
        return self._wait(keys, None)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        if amount == 0:
            with self._log.reading() as values:
                if key in values:
                    return int(values[key])
        with self._log.locked() as values:
            total = int(values.get(key, b"0")) + amount
            self._log.append([(key, b"%d" % total)])
            return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the key's value."""
        with self._log.locked() as values:
            self._log.append([(key, values.get(key, b"") + _bytes(value))])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write the key if its value is `expected`, or `expected` is empty and the key is not set. Returns the resulting value."""
        with self._log.locked() as values:
            now = values.get(key)
            if now == _bytes(expected) or (now is None and not _bytes(expected)):
                self._log.append([(key, _bytes(desired))])
                return _bytes(desired)
            return _bytes(expected) if now is None else now

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        return bool(self.delete([key]))

    def delete(self, keys: Sequence[str]) -> int:
        """Delete several keys at once; how many existed."""
        with self._log.locked() as values:
            deletions = [(key, None) for key in keys if key in values]
            if deletions:
                self._log.append(deletions)
            return len(deletions)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        with self._log.reading() as values:
            return all(key in values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; DistStoreError after `timeout`, by default the store's own."""
        self._wait(keys, timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        own: timedelta = self.timeout  # type: ignore[attr-defined]
        limit = (own if timeout is None else timeout).total_seconds()
        began = time.monotonic()
        while True:
            with self._log.reading() as values:
                missing = [key for key in keys if key not in values]
                if not missing:
                    return [values[key] for key in keys]
            if time.monotonic() - began >= limit:
                raise DistStoreError(f"wait timeout after {limit * 1e3:.0f}ms, keys: {', '.join(missing)}")
            pause(began)

    def list_keys(self) -> list[str]:
        """All keys."""
        with self._log.reading() as values:
            return list(values)

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self.list_keys())

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are implemented."""
        return True

    def clone(self) -> PrivateStore:
        """Itself: there is no connection that a blocking call could occupy."""
        return self

    deleteKey = delete_key  # C++ has other names for these two than Python
    getNumKeys = num_keys


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(memoryview(value))


_OPEN: set[PrivateStore] = set()
"""See Note [Kept until closed]."""


def _renew_in_child() -> None:
    for store in list(_OPEN):
        store._log.renew_in_child()


os.register_at_fork(after_in_child=_renew_in_child)
