"""The flight recorder: what happens on a rank, in a ring of small records that others can read without the rank's help.

The ring is a file that is mapped into memory. One call packs a record of 64 bytes into it, so the last actions of a rank can be
read while it runs, when it is stopped or stuck in C, and after it was killed. `gradwire.observe` starts a recorder and reads
rings; the layers below write records: `if (recorder := flight_recorder.active) is not None: recorder.put(...)`.

Without torch: `gradwire run` reads rings too.

Note [Format]
A ring is a page of header, `HEADER` and then JSON, followed by records. Record number n is in slot n modulo the capacity, and a
slot is valid if its number leads there and its kind is not 0. Text (groups, labels, errors) is written once, to a file next to the
ring: one JSON string per line, and records hold the number of the line. Line 0 is the empty string.

Note [Several threads]
Numbers come from one counter, and packing is one call, so threads need no lock of ours: the interpreter's makes both atomic.

Note [A full disk]
Writing to a mapped file whose disk is full ends the process with SIGBUS. So the blocks of the file are reserved when it is made,
and where that fails there is no recorder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

MAGIC = b"GWFLIGHT"
VERSION = 1
HEADER = struct.Struct("<8sIIII")
"""Magic, version, bytes per record, records, length of the JSON that follows."""
RECORD = struct.Struct("<QQBBHIIIIIQQii")
"""Number, time, kind, operation, rank, thread, group, label, sequence number, ordinal, bytes, duration, step, bucket. Times are in
nanoseconds on the system's monotonic clock, which all processes of a host share."""
PAGE = 4096
CAPACITY = 65536
_MOST_NAMES = 65536
_LOW = (1 << 32) - 1
_TOO_MANY = "(too many different names)"


class RecordKind(IntEnum):
    """What a record is about. 0 is an empty slot."""

    COLLECTIVE_SUBMITTED = 1
    COLLECTIVE_STARTED = 2
    COLLECTIVE_FINISHED = 3
    """`duration` counts from submission."""
    COLLECTIVE_FAILED = 4
    """`label` is the error."""
    FORWARD_BEGAN = 5
    FORWARD_ENDED = 6
    BUCKET_FULL = 7
    BUCKET_LAUNCHED = 8
    BUCKET_REDUCED = 9
    BACKWARD_ENDED = 10
    STEP_ENDED = 11
    STEP_FAILED = 12
    """`label` is the error."""
    OPTIMIZER_BEGAN = 13
    OPTIMIZER_ENDED = 14
    GROUP = 15
    """This rank takes part in a group of `nbytes` ranks."""
    MARK = 16
    """A note of the user's: `gradwire.observe.mark`."""


class _Thread(threading.local):
    """What the records of a thread have in common. Made by the first record of each thread."""

    def __init__(self) -> None:
        self.number = threading.get_native_id()
        self.step = -1
        self.bucket = -1


class FlightRecorder:
    """Writes the ring of one process."""

    def __init__(self, path: Path, *, header: Mapping[str, Any], capacity: int = CAPACITY) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"FlightRecorder({path}, capacity={capacity}): the capacity must be a power of two")
        text = json.dumps(dict(header)).encode()
        if HEADER.size + len(text) > PAGE:
            raise ValueError(f"FlightRecorder({path}): the header has {len(text)} bytes, of {PAGE - HEADER.size}")
        self.path = path
        self.pid = os.getpid()
        size = PAGE + capacity * RECORD.size
        new = path.with_name(f".{path.name}.{self.pid}")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # see Note [A full disk]
            self._ring = mmap.mmap(fd, size)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        HEADER.pack_into(self._ring, 0, MAGIC, VERSION, RECORD.size, capacity, len(text))
        self._ring[HEADER.size : HEADER.size + len(text)] = text
        self._names = {"": 0}
        self._names_lock = threading.Lock()
        self._names_file = os.open(
            names_path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        os.write(self._names_file, b'""\n')
        os.replace(new, path)  # whoever reads it sees all of the header, and its names are there
        self._mask = capacity - 1
        self._next: Callable[[], int] = itertools.count().__next__
        self.thread = _Thread()
        """The step and bucket that records of the calling thread belong to."""

    def put(
        self,
        kind: RecordKind,
        rank: int,
        *,
        at: float | None = None,
        op: int = 0,
        group: str = "",
        label: str = "",
        seq: int = 0,
        ordinal: int = 0,
        nbytes: int = 0,
        duration: float = 0.0,
        step: int | None = None,
        bucket: int | None = None,
    ) -> None:
        """Write a record, of now or of `at` (seconds on `time.perf_counter`'s clock).

        `step` and `bucket` are those of the thread (see `within`) unless given.
        """
        names, thread = self._names, self.thread
        group_number = names.get(group)
        label_number = names.get(label)
        try:
            number = self._next()
            RECORD.pack_into(
                self._ring,
                PAGE + (number & self._mask) * 64,
                number,
                time.monotonic_ns() if at is None else int(at * 1e9),
                kind,
                op,
                rank,
                thread.number,
                self._number(group) if group_number is None else group_number,
                self._number(label) if label_number is None else label_number,
                seq & _LOW,
                ordinal & _LOW,
                nbytes,
                int(duration * 1e9),
                thread.step if step is None else step,
                thread.bucket if bucket is None else bucket,
            )
        except (TypeError, ValueError):  # closed in the meantime, by another thread
            if not self._ring.closed:
                raise

    def _number(self, text: str) -> int:
        """The number of a name, written down when it is seen for the first time."""
        with self._names_lock:
            known = self._names.get(text)
            if known is not None:
                return known
            if len(self._names) >= _MOST_NAMES:
                text = _TOO_MANY  # a label that is different every time must not fill the disk
                if text in self._names:
                    return self._names[text]
            if self._names_file < 0:
                return 0
            try:
                os.write(self._names_file, json.dumps(text).encode() + b"\n")
            except OSError:  # a full disk: training goes on
                return 0
            number = self._names[text] = len(self._names)
            return number

    def close(self) -> None:
        """Write no more. What was written stays in the file."""
        with self._names_lock:
            if self._names_file >= 0:
                os.close(self._names_file)
                self._names_file = -1
        self._ring.close()


def names_path(path: Path) -> Path:
    """The file of a ring's names."""
    return path.with_suffix(".names")


def summary(error: BaseException) -> str:
    """An error as a name in records: its class and the first line of its message, cut."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


active: FlightRecorder | None = None
"""The recorder of this process."""


_NOWHERE = contextlib.nullcontext()


def within(step: int, bucket: int) -> contextlib.AbstractContextManager[None]:
    """Records of this thread belong to `bucket` of `step` in here. Costs next to nothing without a recorder."""
    return _NOWHERE if active is None else _Within(active.thread, step, bucket)


class _Within(contextlib.AbstractContextManager[None]):
    __slots__ = ("_before", "_step_and_bucket", "_thread")

    def __init__(self, thread: _Thread, step: int, bucket: int) -> None:
        self._thread, self._step_and_bucket = thread, (step, bucket)

    def __enter__(self) -> None:
        thread = self._thread
        self._before = thread.step, thread.bucket
        thread.step, thread.bucket = self._step_and_bucket

    def __exit__(self, *exc: object) -> None:
        self._thread.step, self._thread.bucket = self._before


def place() -> tuple[int, int]:
    """The step and bucket that records of this thread belong to, to be taken to another thread."""
    return (-1, -1) if active is None else (active.thread.step, active.thread.bucket)


def _forget() -> None:
    """In a forked child: the ring is the parent's."""
    global active
    active = None


os.register_at_fork(after_in_child=_forget)
