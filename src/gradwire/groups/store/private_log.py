"""`PrivateLog`: keys and values in a private file (`private_file.py`) that several processes read and write.

Note [A log that survives its writers]
The file is a log of records: a key and its value, or that it was deleted. Its first page holds two numbers, the start and the end
of the log. A writer locks the file, appends its records, and only then moves the end: one that is killed halfway has written
nothing, its lock is released by the kernel, and the next writer overwrites what it left. torch's FileStore has no such end marker:
a record that a killed process left half-written makes all others read forever. A writer that is stopped while it holds the lock
blocks only other writers, which give up after `_LOCK_PATIENCE` seconds. Between two attempts to lock the file, other threads of
the process can read.

Note [Forked children]
The kernel's lock belongs to an open file description, which a forked child shares with its parent: both could hold the lock at
once, and the lock of a killed parent would be held as long as a child lives. So in a child, before any other code runs, each log
gets its own description and a new mutex: the old one may be locked by a thread that the child does not have.

Note [Readers without a lock]
Everything before the end is immutable, so readers need no lock. The end is written by a separate call: the kernel's lock on the
file orders it after the records. A log that is mostly out of date is rewritten after its end; then the start is moved, and the
memory before it is freed. A reader that finds the start beyond its own position starts again from there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import DistStoreError

from gradwire.runtime.private_file import PAGE, name_of

_RECORD = struct.Struct("<Iq")  # length of the key; of the value, or _DELETED
_WORD = struct.Struct("=Q")
_DELETED = -1
_START, _END = 0, 1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 100e-6, 5e-3
"""Seconds between two polls of the file, a tenth of the time waited so far; a poll takes microseconds."""
_LOCK_PATIENCE = 10.0
_COMPACT_FROM = 1 << 20
"""Bytes of log below which out-of-date records are left alone."""
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class PrivateLog:
    """The latest value of each key. Every call raises DistStoreError once it is closed."""

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        try:
            self._inode = os.fstat(fd).st_ino
            self._map = _map(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._words = memoryview(self._map).cast("Q")
        self._mutex = threading.Lock()  # flock is per file description, which all threads of a process share
        self._closed = ""
        self._values: dict[str, bytes] = {}
        self._live = 0
        self._at = PAGE

    @property
    def name(self) -> str:
        """The name by which other processes open it, while it is open here."""
        return name_of(self._fd)

    def holds(self, fd: int) -> bool:
        """Whether `fd` of this process leads to this log's file."""
        try:
            return os.fstat(fd).st_ino == self._inode and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        except OSError:  # closed meanwhile
            return False

    def close(self) -> None:
        """Release the file. Never waits: garbage collection may call it on a thread that is inside; the last one out closes it."""
        self._closed = self._closed or "is closed: the group or launcher that it belongs to has ended"
        self._let_go()

    def _let_go(self) -> None:
        if not self._mutex.acquire(blocking=False):
            return  # the thread that is inside closes it
        try:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                self._words.release()
                self._map.close()
                if self._leads_to_file(fd):
                    os.close(fd)
        finally:
            self._mutex.release()

    def _leads_to_file(self, fd: int) -> bool:
        """False if our descriptor was closed by other code; its number may belong to another file by now."""
        try:
            return os.fstat(fd).st_ino == self._inode
        except OSError:
            return False

    def renew_in_child(self) -> None:
        """See Note [Forked children]."""
        self._mutex = threading.Lock()
        if self._fd < 0 or not self._leads_to_file(self._fd):
            return
        try:
            own = _reopen(self._fd)
        except OSError as error:
            self._closed = f"could not be opened again in this forked child: {error.strerror}"
            self._let_go()
            return
        os.dup2(own, self._fd, inheritable=False)
        os.close(own)

    @contextmanager
    def _mine(self) -> Iterator[None]:
        """Exclude the other threads of this process."""
        if not self._mutex.acquire(timeout=_LOCK_PATIENCE):
            raise DistStoreError(f"the private store: another thread has held its mutex for {_LOCK_PATIENCE:.0f} s")
        try:
            if self._closed:
                raise DistStoreError(f"the private store {self._closed}")
            yield
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
    def reading(self) -> Iterator[dict[str, bytes]]:
        """The current values."""
        with self._mine():
            self._refresh()
            yield self._values

    @contextmanager
    def locked(self) -> Iterator[dict[str, bytes]]:
        """The current values, with other writers locked out: `append` may be called."""
        began = time.monotonic()
        while True:
            with self._mine():
                self._check_descriptor()
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._refresh()
                    yield self._values
                    return
                except BlockingIOError:
                    pass
                finally:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            if time.monotonic() - began >= _LOCK_PATIENCE:
                raise DistStoreError(
                    f"the private store: another process has had it locked for {_LOCK_PATIENCE:.0f} s; it is probably stopped"
                )
            pause(began)

    def _check_descriptor(self) -> None:
        if not self._leads_to_file(self._fd):
            raise DistStoreError(f"the private store: its descriptor {self._fd} was closed by other code")

    def _refresh(self) -> None:
        """Read what is new. See Note [Readers without a lock]."""
        while True:
            end = max(PAGE, self._words[_END])
            if end == self._at:
                return
            data = self._read(self._at, end)
            start = max(PAGE, self._words[_START])
            if start > self._at:  # the log has been compacted, perhaps while it was read
                self._values.clear()
                self._live, self._at = 0, start
                continue
            self._apply(data)
            self._at = end

    def _read(self, begin: int, end: int) -> bytes:
        self._check_descriptor()
        pieces = []
        while begin < end:
            piece = os.pread(self._fd, end - begin, begin)
            if not piece:
                raise DistStoreError(f"the private store: its file was truncated at byte {begin} of {end}")
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)

    def _apply(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            key_length, length = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            key = data[at : at + key_length].decode()
            at += key_length
            old = self._values.pop(key, None)
            if old is not None:
                self._live -= _RECORD.size + key_length + len(old)
            if length != _DELETED:
                self._values[key] = data[at : at + length]
                at += length
                self._live += _RECORD.size + key_length + length

    def append(self, records: Sequence[tuple[str, bytes | None]]) -> None:
        """Append records. The file must be locked and read to its end."""
        data = b"".join(_record(key, value) for key, value in records)
        self._write(data, self._at)
        os.pwrite(self._fd, _WORD.pack(self._at + len(data)), _WORD.size * _END)
        self._apply(data)
        self._at += len(data)
        if self._at - max(PAGE, self._words[_START]) > max(_COMPACT_FROM, 4 * self._live):
            self._compact()

    def _compact(self) -> None:
        """Rewrite the current values after the end, move the start there, and free the memory before it."""
        start = self._at
        data = b"".join(_record(key, value) for key, value in self._values.items())
        self._write(data, start)
        os.pwrite(self._fd, _WORD.pack(start + len(data)), _WORD.size * _END)
        os.pwrite(self._fd, _WORD.pack(start), _WORD.size * _START)
        self._at = start + len(data)
        size = start // PAGE * PAGE - PAGE
        ctypes.CDLL(None).fallocate(self._fd, _PUNCH_HOLE, ctypes.c_long(PAGE), ctypes.c_long(size))

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written


def _map(fd: int) -> mmap.mmap:
    """The first page. Forked children inherit the mapping: it must not keep the locked file description alive."""
    another = _reopen(fd)
    try:
        return mmap.mmap(another, PAGE)
    finally:
        os.close(another)


def _reopen(fd: int) -> int:
    """The same file through a new open file description."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def pause(began: float) -> None:
    """Sleep between two polls of the file."""
    time.sleep(min(max(_SHORTEST_PAUSE, (time.monotonic() - began) / 10), _LONGEST_PAUSE))


def _record(key: str, value: bytes | None) -> bytes:
    name = key.encode()
    return _RECORD.pack(len(name), _DELETED if value is None else len(value)) + name + (value or b"")
