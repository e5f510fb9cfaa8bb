"""`PrivateStore`: a rendezvous store for the processes of one user on one host, which no other user can read or write; and how
ranks that have met in an open store move to one.

A TCPStore has no authentication: every user of the host can connect to it, list its keys and change them. This store is a file that
only this user's processes can open (`runtime/private_file.py`), so no process hosts it and it survives the exit of any of them.

Note [A log that survives its writers]
The file is a log of records: a key and its value, or that it was deleted. Its first word is the end of the log. A writer locks the
file, appends its records, and only then moves the end: one that is killed halfway has written nothing, and the kernel releases its
lock. (A half-written record in torch's FileStore makes all others read forever.) What lies before the end is immutable, so readers
need no lock. The log only grows, by about 200 bytes for each page that a rank writes.

Note [Kept until closed]
C++ code (a PrefixStore, an engine) keeps the C++ half of a store alive, but calls methods of the Python half. So an open store is
referenced here until `close()`, after which every call raises. A forked child has no open stores: it would share its parent's lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError

from gradwire.errors import GroupError, PrivateFileGone
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.private_file import PAGE, create, name_of, open_private

_RECORD = struct.Struct("<Iq")  # length of the key; of the value, or _DELETED
_END = struct.Struct("=Q")
_DELETED = -1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 100e-6, 5e-3
"""Seconds between two polls of the file, a tenth of the time waited so far; a poll takes microseconds."""
_LOCK_PATIENCE = 10.0


class PrivateStore(Store):
    """A store over a private file. Other processes open it by its `name`.

    >>> with PrivateStore.create() as store, PrivateStore.open(store.name) as other:
    ...     store.set("key", "value")
    ...     other.get("key"), other.add("count", 2), store.add("count", 1)
    (b'value', 2, 3)
    """

    has_no_host = True
    """Calls wait for no other process, so they need no thread: see `bounded`."""

    def __init__(self, fd: int, *, keep: Any = None) -> None:
        """Owns `fd`. `keep` is kept alive while this store is open."""
        super().__init__()
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._mutex = threading.Lock()
        self._closed = ""
        self._values: dict[str, bytes] = {}
        self._at = PAGE
        self._keep = keep
        _OPEN.add(self)

    @classmethod
    def create(cls, *, keep: Any = None) -> PrivateStore:
        return cls(create(), keep=keep)

    @classmethod
    def open(cls, name: str) -> PrivateStore:
        """The store of another process of this user."""
        return cls(open_private(name))

    @property
    def name(self) -> str:
        """The name by which other processes open it, while it is open here."""
        return name_of(self._fd)

    def holds(self, fd: int) -> bool:
        """Whether `fd` of this process leads to this store's file."""
        try:
            return os.fstat(fd).st_ino == self._inode and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        except OSError:  # closed meanwhile
            return False

    def close(self) -> None:
        """Release the file; any other call raises from now on. Closing twice is a no-op. Never waits: garbage collection may call
        it on a thread that is inside the store. The last one out closes the descriptor."""
        self._keep = None
        _OPEN.discard(self)
        self._closed = self._closed or "is closed: the group or launcher that it belongs to has ended"
        self._let_go()

    def _let_go(self) -> None:
        if self._mutex.acquire(blocking=False):
            fd, self._fd = self._fd, -1
            if fd >= 0 and self.holds(fd):
                os.close(fd)
            self._mutex.release()

    def __enter__(self) -> PrivateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- torch's interface ---------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        with self._locked():
            self._append(zip(keys, map(_bytes, values), strict=True))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until all are set."""
        return self._wait(keys, None)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        if amount == 0:
            with self._reading() as values:
                if key in values:
                    return int(values[key])
        with self._locked() as values:
            total = int(values.get(key, b"0")) + amount
            self._append([(key, b"%d" % total)])
            return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._locked() as values:
            self._append([(key, values.get(key, b"") + _bytes(value))])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write the key if its value is `expected`, or `expected` is empty and the key is not set. Returns the resulting value."""
        with self._locked() as values:
            now = values.get(key)
            if now == _bytes(expected) or (now is None and not _bytes(expected)):
                self._append([(key, _bytes(desired))])
                return _bytes(desired)
            return _bytes(expected) if now is None else now

    def delete_key(self, key: str) -> bool:
        return bool(self.delete([key]))

    def delete(self, keys: Sequence[str]) -> int:
        with self._locked() as values:
            known = [key for key in keys if key in values]
            self._append((key, None) for key in known)
            return len(known)

    def check(self, keys: Sequence[str]) -> bool:
        with self._reading() as values:
            return all(key in values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; DistStoreError after `timeout`, by default the store's own."""
        self._wait(keys, timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        own: timedelta = self.timeout  # type: ignore[attr-defined]
        limit = (own if timeout is None else timeout).total_seconds()
        began = time.monotonic()
        while True:
            with self._reading() as values:
                missing = [key for key in keys if key not in values]
                if not missing:
                    return [values[key] for key in keys]
            if time.monotonic() - began >= limit:
                raise DistStoreError(f"wait timeout after {limit * 1e3:.0f}ms, keys: {', '.join(missing)}")
            _pause(began)

    def list_keys(self) -> list[str]:
        with self._reading() as values:
            return list(values)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> PrivateStore:
        """Itself: there is no connection that a blocking call could occupy."""
        return self

    deleteKey = delete_key  # C++ has other names for these two than Python
    getNumKeys = num_keys

    # -- the log: see Note [A log that survives its writers] -----------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[dict[str, bytes]]:
        """The current values, for one thread at a time."""
        if not self._mutex.acquire(timeout=_LOCK_PATIENCE):
            raise DistStoreError(f"the private store: another thread has held its mutex for {_LOCK_PATIENCE:.0f} s")
        try:
            if self._closed:
                raise DistStoreError(f"the private store {self._closed}")
            if not self.holds(self._fd):
                raise DistStoreError(f"the private store: its descriptor {self._fd} was closed by other code")
            self._refresh()
            yield self._values
        except OSError as error:
            raise DistStoreError(
                f"the private store cannot be read or written: {error}. It is a file in memory: check the free memory and "
                "the limit on file size (ulimit -f)."
            ) from error
        finally:
            self._mutex.release()
            if self._closed:
                self._let_go()

    @contextmanager
    def _locked(self) -> Iterator[dict[str, bytes]]:
        """The current values, with other writers locked out. Between two attempts other threads can read."""
        began = time.monotonic()
        while True:
            with self._reading() as values:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._refresh()
                    yield values
                    return
                except BlockingIOError:
                    pass
                finally:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            if time.monotonic() - began >= _LOCK_PATIENCE:
                raise DistStoreError(
                    f"the private store: another process has had it locked for {_LOCK_PATIENCE:.0f} s; it is probably stopped"
                )
            _pause(began)

    def _refresh(self) -> None:
        (end,) = _END.unpack(os.pread(self._fd, _END.size, 0))
        length = max(0, end - self._at)  # a new file has no end yet
        data = os.pread(self._fd, length, self._at)
        if len(data) < length:
            raise DistStoreError(f"the private store: its file was truncated at byte {self._at + len(data)} of {end}")
        self._apply(data)

    def _apply(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            key_length, length = _RECORD.unpack_from(data, at)
            value_at = at + _RECORD.size + key_length
            key = data[at + _RECORD.size : value_at].decode()
            at = value_at + max(0, length)
            if length == _DELETED:
                self._values.pop(key, None)
            else:
                self._values[key] = data[value_at:at]
        self._at += len(data)

    def _append(self, records: Iterable[tuple[str, bytes | None]]) -> None:
        """Append records. The file must be locked and read to its end."""
        data = b""
        for key, value in records:
            name = key.encode()
            data += _RECORD.pack(len(name), _DELETED if value is None else len(value)) + name + (value or b"")
        if os.pwrite(self._fd, data, self._at) < len(data):
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        os.pwrite(self._fd, _END.pack(self._at + len(data)), 0)
        self._apply(data)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(memoryview(value))


def _pause(began: float) -> None:
    """Sleep between two polls of the file."""
    time.sleep(min(max(_SHORTEST_PAUSE, (time.monotonic() - began) / 10), _LONGEST_PAUSE))


_OPEN: set[PrivateStore] = set()
"""See Note [Kept until closed]."""


def _leave_all_to_parent() -> None:
    for store in list(_OPEN):
        store._mutex = threading.Lock()  # another thread of the parent may have it locked
        store._closed = "belongs to the process that this one was forked from. Open it again, by its name"
        store._let_go()


os.register_at_fork(after_in_child=_leave_all_to_parent)


# -- from an open store to a private one ---------------------------------------------------------------------------------
# Until ranks have moved, another user can write to the open store too: the name of that user's own file is refused, and the name of
# another job's store leads to a store with another purpose. From then on nothing is read from the open store.

_PURPOSE = "gradwire/purpose"
_USED = "gradwire/used/"


def move(store: Any, rendezvous: Rendezvous, *, key: str, purpose: str) -> PrivateStore:
    """The private store of ranks that meet in `store`, all on this host. Rank 0 keeps `store` alive: it may host it."""
    deadline = time.monotonic() + rendezvous.timeout
    if rendezvous.rank == 0:
        private = PrivateStore.create(keep=store)
        with on_failure(private.close):
            private.set(_PURPOSE, purpose)
            rendezvous.store.set(key, private.name)
    else:
        while True:
            name = rendezvous.receive(key, source=0, within=deadline - time.monotonic()).decode(errors="replace")
            try:
                private = _open_unused(name, rendezvous.rank)
                break
            except PrivateFileGone:  # left by a failed attempt or an earlier group; rank 0 makes another
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
        if not private.check([_PURPOSE]) or private.get(_PURPOSE).decode() != purpose:
            private.close()
            raise GroupError(
                f"{rendezvous.who}: the private store {name} that the open store names does not belong to {purpose}. It is not "
                "used: the open store was tampered with, or two jobs share it."
            )
    private.set_timeout(timedelta(seconds=rendezvous.timeout))
    return private


def move_if_together(store: Any, rank: int, size: int, *, purpose: str, timeout: float, who: object) -> Any:
    """A private store if `store` is open to other users and all ranks are on one host, else `store`. Waits for all ranks."""
    if size == 1 or not isinstance(innermost(store), TCPStore):
        return store
    rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=who)
    with rendezvous.meeting("gradwire/together", report=False):
        if len({process.host for process in rendezvous.all_processes().values()}) > 1:
            return store
    return move(store, rendezvous, key="gradwire/private", purpose=purpose)


def mark_used(store: Any, rank: int) -> None:
    """Mark that this rank has a group in `store`: if the ranks meet again in the open store, they move to a new private store."""
    inner = innermost(store)
    if isinstance(inner, PrivateStore):
        inner.set(f"{_USED}{rank}", "")


def _open_unused(name: str, rank: int) -> PrivateStore:
    private = PrivateStore.open(name)
    if not private.check([f"{_USED}{rank}"]):
        return private
    private.close()
    raise PrivateFileGone(f"opening the private store {name}: it belongs to an earlier group of rank 0's, still open.")


def release(store: Any) -> None:
    """Close the store below all prefixes if it is a private one."""
    inner = innermost(store)
    if isinstance(inner, PrivateStore):
        inner.close()
