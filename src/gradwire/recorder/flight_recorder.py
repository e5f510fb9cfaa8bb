"""The flight recorder: what happens on a rank, in a ring of small records that others can read without the rank's help.

The ring is a file that is mapped into memory. One call packs a record of 64 bytes into it, so the last actions of a rank can be
read while it runs, when it is stopped or stuck in C, and after it was killed. `gradwire.observe` starts a recorder and reads
rings; the layers below write records: `if (recorder := flight_recorder.active) is not None: recorder.put(...)`.

Without torch: `gradwire run` reads rings too.

Note [Format]
A ring is a page of header, `HEADER` and then JSON, followed by records. Record number n is in slot n modulo the capacity, and a
slot is valid if its number leads there and its kind is not 0. The kind is written last: readers are other processes, and without
that they would see records of which half is missing. Text (groups, labels, errors) is written once, to a file next to the ring:
one line per text, its number and a JSON string. Records hold the number. Number 0 is the empty string. A line that begins with a
word describes what records refer to, as a JSON object: see `FlightRecorder.describe`.

Note [No locks]
Numbers come from counters of one atomic step each, so writing takes no lock. A lock would block forever in a signal handler or a
finalizer that writes a record, e.g. because it aborts a group, while the thread that it interrupts holds that lock.

Note [No errors]
Recording must not end a training: a record with a value that does not fit is left out. The numbers of records that were never
written, also because an exception of a signal handler came between, are gaps that readers skip.

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
import warnings
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

MAGIC = b"GWFLIGHT"
VERSION = 2
HEADER = struct.Struct("<8sIIII")
"""Magic, version, bytes per record, records, length of the JSON that follows."""
RECORD = struct.Struct("<QQBBHIIIIIQQii")
"""Number, time, kind, operation, rank, thread, group, label, sequence number, ordinal, bytes, duration, step, bucket. Times are in
nanoseconds on the system's monotonic clock, which all processes of a host share."""
PAGE = 4096
CAPACITY = 65536
_MOST_NAMES = 65536
_LONGEST_NAME = 1000
_LONGEST_ERROR = 400
_MOST_DESCRIPTIONS = 1000
_MOST_WARNINGS = 200
_LONGEST_DESCRIPTION = 1 << 20
ORDINAL_BITS = 24
"""So many lower bits of an ordinal count collectives; those above count recoveries of the group."""
ON_DEVICE = 1 << 7
"""Added to the operation in records of submissions whose tensors are not in the host's memory."""
_KIND = 16
"""Where the kind is in a record."""
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
    COLLECTIVE_WAITED = 17
    """A caller waits for a collective that has not finished. Until then it is in the background, and nobody misses it."""
    WARNING = 18
    """`label` is what a check has found: see `warn`."""
    SAMPLES = 19
    """This rank has processed `nbytes` samples more: `gradwire.observe.samples`."""


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
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
        self._next_name: Callable[[], int] = itertools.count(1).__next__
        self._descriptions: set[int] = set()
        self._warnings_left = _MOST_WARNINGS
        self.warnings = 0
        """How many were recorded."""
        try:
            # Not truncated: the ring of the run before may be read at this moment.
            names_path(path).unlink(missing_ok=True)
            self._names_file = os.open(
                names_path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            os.write(self._names_file, b'0 ""\n')
        except BaseException:
            new.unlink(missing_ok=True)
            self._ring.close()
            raise
        os.replace(new, path)  # a reader sees the whole header, and its names file exists
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
        try:
            names, thread = self._names, self.thread
            group_number = names.get(group)
            if group_number is None:
                group_number = self._number(group)
            label_number = names.get(label)
            if label_number is None:
                label_number = self._number(label)
            number = self._next()
            slot = PAGE + (number & self._mask) * 64
            RECORD.pack_into(
                self._ring,
                slot,
                number,
                time.monotonic_ns() if at is None else int(at * 1e9),
                0,
                op,
                rank,
                thread.number,
                group_number,
                label_number,
                seq & _LOW,
                ordinal & _LOW,
                nbytes,
                int(duration * 1e9),
                thread.step if step is None else step,
                thread.bucket if bucket is None else bucket,
            )
            self._ring[slot + _KIND] = kind
        except (TypeError, ValueError, OverflowError, struct.error):
            pass  # see Note [No errors]; or another thread has closed the ring in the meantime

    def _number(self, text: str) -> int:
        """The number of a name, written to the file of names when it is seen for the first time. See Note [No locks]."""
        names = self._names
        if len(names) >= _MOST_NAMES:
            text = _TOO_MANY  # a label that is different every time must not fill the disk
            if text in names:
                return names[text]
        number = self._next_name()
        line = f"{number} {json.dumps(text[:_LONGEST_NAME])}\n".encode()
        if self._names_file < 0:
            return 0
        try:
            os.write(self._names_file, line)
        except OSError:  # a full disk: training continues
            return 0
        names[text] = number
        return number

    def describe(self, subject: str, facts: Mapping[str, Any]) -> None:
        """Write what records of `subject` (a word, such as "group") refer to, where no later record overwrites it.

        Equal facts are written once. Like a record, a description that cannot be written is left out.
        """
        try:
            line = f"{subject} {json.dumps(dict(facts))}\n".encode()
            known = self._descriptions
            if hash(line) in known or len(known) >= _MOST_DESCRIPTIONS or len(line) > _LONGEST_DESCRIPTION:
                return
            known.add(hash(line))
            if self._names_file >= 0:
                os.write(self._names_file, line)
        except (TypeError, ValueError, OSError):
            pass  # see Note [No errors]

    def may_name_warning(self) -> bool:
        """Whether the text of another warning may be written: one in every step must not take the names of groups and errors."""
        self.warnings += 1
        return self.warnings <= _MOST_NAMES // 8

    def describe_warning(self, facts: Mapping[str, Any]) -> None:
        """Keep a warning where no later record overwrites it: the first ones, because what was wrong first matters most."""
        if self._warnings_left > 0:
            self._warnings_left -= 1
            self.describe("warning", facts)

    def close(self) -> None:
        """Stop writing. What was written stays in the file."""
        file, self._names_file = self._names_file, -1
        if file >= 0:
            os.close(file)
        self._ring.close()


def warn(text: str, *, rank: int, group: str = "", step: int = -1) -> None:
    """Record what a check has found, for everything that shows warnings of a run. Without a recorder it does nothing.

    Ranks that find the same thing together write the same text, which is then shown once.
    """
    recorder = active
    if recorder is not None:
        label = text if recorder.may_name_warning() else _TOO_MANY
        recorder.put(RecordKind.WARNING, rank, group=group, label=label, step=step, bucket=-1)
        recorder.describe_warning({"text": text, "step": step, "time": time.monotonic_ns()})


def names_path(path: Path) -> Path:
    """The file of a ring's names."""
    return path.with_suffix(".names")


def pack_message(peer: int | None, tag: int, count: int) -> int:
    """What stands in place of the ordinal in records of sends and receives: which message it is, between the same two ranks.

    0 if the peer is not known. See `unpack_message`.
    """
    if peer is None or peer >= (1 << 12) - 1:
        return 0
    return (peer + 1) << 20 | (tag & 63) << 14 | count & ((1 << 14) - 1)


def unpack_message(packed: int) -> tuple[int, int]:
    """The peer, -1 if it is not known, and a number that the send and the receive of one message have in common.

    >>> unpack_message(pack_message(3, tag=7, count=2))
    (3, 114690)
    """
    return (packed >> 20) - 1, packed & ((1 << 20) - 1)


def summary(error: BaseException) -> str:
    """An error as a name in records: its class and the first line of its message, cut.

    >>> summary(ValueError("x" * 900))[-8:]
    'xxxxx...'
    """
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 3].rstrip()}..."


active: FlightRecorder | None = None
"""The recorder of this process."""
reporter: Callable[[], list[str]] | None = None
"""Returns the report of all ranks' recorders on a collective that does not finish; takes up to a second. Set by `observe`."""
_REPORT_HEAD = "From the flight recorders:"
_reporting = threading.Lock()
_has_warned = False


def add_report(error: BaseException) -> None:
    """Add the report of the other ranks' recorders to an error, once, as a note. Without a recorder nothing happens."""
    report = reporter
    noted = any(str(note).startswith(_REPORT_HEAD) for note in getattr(error, "__notes__", ()))
    if report is None or active is None or noted or not _reporting.acquire(blocking=False):
        return
    try:
        if lines := report():
            error.add_note("\n".join([_REPORT_HEAD, *lines]))
    except Exception as failure:  # the error itself is what matters
        _report_failed(failure)
    finally:
        _reporting.release()


def _report_failed(failure: Exception) -> None:
    """Record why an error has no report, and show it once."""
    global _has_warned
    text = f"the flight recorders of other ranks could not be read for an error: {summary(failure)}"
    warn(text, rank=0)
    if not _has_warned:
        _has_warned = True
        with contextlib.suppress(Warning):  # a filter that raises must not replace the error
            warnings.warn(f"gradwire: {text}. This is shown once.", RuntimeWarning, stacklevel=3)


_NOWHERE = contextlib.nullcontext()


def within(step: int, bucket: int) -> contextlib.AbstractContextManager[None]:
    """Records of this thread belong to `bucket` of `step` in here. Costs next to nothing without a recorder."""
    recorder = active  # which another thread may stop at any time
    return _NOWHERE if recorder is None else _Within(recorder.thread, step, bucket)


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
    recorder = active
    return (-1, -1) if recorder is None else (recorder.thread.step, recorder.thread.bucket)


def _forget() -> None:
    """In a forked child: the ring is the parent's."""
    global active, reporter, _reporting
    active = reporter = None
    _reporting = threading.Lock()


os.register_at_fork(after_in_child=_forget)
