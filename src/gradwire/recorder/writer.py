"""The flight recorder: what happens on a rank, in a ring of small records that others can read without the rank's help.

The ring is a file that is mapped into memory, so the last actions of a rank can be read while it runs, when it is stopped or stuck
in C, and after it was killed. `gradwire.observe` starts a recorder and reads rings; layers write records through a
`gradwire.recorder.source.EventSource`. No torch. The format is in format.py.

Note [No locks]
Numbers come from counters of one atomic step each. A lock would block forever in a signal handler or a finalizer that writes a
record, e.g. because it aborts a group, while the thread that it interrupts holds that lock.

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
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.recorder.format import (
    CAPACITY,
    HEADER,
    KIND_OFFSET,
    MAGIC,
    NO_PEER,
    PAGE,
    RECORD,
    VERSION,
    RecordKind,
    names_path,
)
from gradwire.runtime.cleanup import on_failure

_MOST_NAMES = 65536
_LONGEST_NAME = 1000
_LONGEST_ERROR = 400
_MOST_DESCRIPTIONS = 4000
_MOST_WARNINGS = 200
_LONGEST_DESCRIPTION = 1 << 20
_SIZE = RECORD.size
_SEQ = (1 << 32) - 1
TOO_MANY = "(too many different names)"


class Place(NamedTuple):
    """The step, bucket and model that a record belongs to; -1 and 0: none."""

    step: int = -1
    bucket: int = -1
    model: int = 0


NOWHERE = Place()


OperationFacts = tuple[int, int, int, int, float, float | None]
"""What is recorded of a collective, a send or a receive: operation, sequence number, ordinal, peer, duration in seconds, and when
it was, in seconds on `time.perf_counter`'s clock (None: now)."""
NO_OPERATION: OperationFacts = (0, 0, 0, NO_PEER, 0.0, None)


class RankInGroup(NamedTuple):
    """A rank of a group, as records name it: the group's identity, the number of its name, and the rank in it."""

    group_id: int = 0
    name: int = 0
    rank: int = 0


class _Thread(threading.local):
    """What the records of a thread have in common. Made by the first record of each thread."""

    def __init__(self) -> None:
        self.number = threading.get_native_id()
        self.place = NOWHERE


class FlightRecorder:
    """Writes the ring of one process."""

    def __init__(self, path: Path, *, header: Mapping[str, Any], capacity: int = CAPACITY) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"FlightRecorder({path}, capacity={capacity}): the capacity must be a power of two")
        text = json.dumps(dict(header)).encode()
        if HEADER.size + len(text) > PAGE:
            raise ValueError(f"FlightRecorder({path}): the header has {len(text)} bytes, of {PAGE - HEADER.size}")
        self.path = path
        size = PAGE + capacity * _SIZE
        new = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with on_failure(new.unlink, missing_ok=True), open(fd, "r+b", buffering=0):
            os.posix_fallocate(fd, 0, size)  # see Note [A full disk]
            self._ring = mmap.mmap(fd, size)
            HEADER.pack_into(self._ring, 0, MAGIC, VERSION, _SIZE, capacity, len(text))
            self._ring[HEADER.size : HEADER.size + len(text)] = text
            names = names_path(path)
            names.unlink(missing_ok=True)  # not truncated: the ring of the run before may be read at this moment
            self._names_file = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._names_file, b'0 ""\n')
        os.replace(new, path)  # a reader sees the whole header, and its names file exists
        self._names = {"": 0}
        self._next_name: Callable[[], int] = itertools.count(1).__next__
        self._descriptions: set[int] = set()
        self.warnings = 0
        """How many were recorded."""
        self._mask = capacity - 1
        self._next: Callable[[], int] = itertools.count().__next__
        self.thread = _Thread()
        """The place that records of the calling thread belong to: see `within`."""

    def put(
        self,
        kind: RecordKind,
        member: RankInGroup,
        operation: OperationFacts = NO_OPERATION,
        *,
        label: str = "",
        nbytes: int = 0,
        place: Place | None = None,
    ) -> None:
        """Write a record. `place` is that of the thread unless given: see `within`."""
        try:
            thread = self.thread
            label_number = self._names.get(label)
            if label_number is None:
                label_number = self.number_of(label)
            op, seq, ordinal, peer, duration, at = operation
            group_id, name, rank = member
            step, bucket, model = thread.place if place is None else place
            number = self._next()
            slot = PAGE + (number & self._mask) * _SIZE
            RECORD.pack_into(
                self._ring,
                slot,
                number,
                time.monotonic_ns() if at is None else int(at * 1e9),
                group_id,
                ordinal,
                nbytes,
                int(duration * 1e9),
                thread.number,
                name,
                label_number,
                seq & _SEQ,
                step,
                bucket,
                0,
                op,
                rank,
                peer,
                model,
            )
            self._ring[slot + KIND_OFFSET] = kind
        except (TypeError, ValueError, OverflowError, struct.error):
            pass  # see Note [No errors]; or another thread has closed the ring in the meantime

    def number_of(self, text: str) -> int:
        """The number of a name, written to the file of names when it is seen for the first time. See Note [No locks]."""
        names = self._names
        if text not in names and len(names) >= _MOST_NAMES:
            text = TOO_MANY  # a label that is different every time must not fill the disk
        if text in names:
            return names[text]
        number = self._next_name()
        try:
            os.write(self._names_file, f"{number} {json.dumps(text[:_LONGEST_NAME])}\n".encode())
        except OSError:  # a full disk, or it was closed: training continues
            return 0
        names[text] = number
        return number

    def describe(self, subject: str, facts: Mapping[str, Any]) -> None:
        """Write what records of `subject` (a word, such as "group") refer to, where no later record overwrites it. Equal facts
        are written once. Like a record, a description that cannot be written is left out."""
        try:
            line = f"{subject} {json.dumps(dict(facts))}\n".encode()
            known = self._descriptions
            if hash(line) in known or len(known) >= _MOST_DESCRIPTIONS or len(line) > _LONGEST_DESCRIPTION:
                return
            known.add(hash(line))
            os.write(self._names_file, line)
        except (TypeError, ValueError, OSError):
            pass  # see Note [No errors]

    def warn(self, text: str, member: RankInGroup, *, step: int = -1) -> None:
        """Record what a check has found. The first warnings are kept where no later record overwrites them, because what was
        wrong first matters most; and one in every step must not take the names of groups and errors."""
        self.warnings += 1
        label = text if self.warnings <= _MOST_NAMES // 8 else TOO_MANY
        self.put(RecordKind.WARNING, member, label=label, place=Place(step))
        if self.warnings <= _MOST_WARNINGS:
            self.describe("warning", {"text": text, "step": step, "time": time.monotonic_ns()})

    def close(self) -> None:
        """Stop writing. What was written stays in the file."""
        file, self._names_file = self._names_file, -1
        if file >= 0:
            os.close(file)
        self._ring.close()


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
    global _has_warned
    report, recorder = reporter, active
    noted = any(str(note).startswith(_REPORT_HEAD) for note in getattr(error, "__notes__", ()))
    if report is None or recorder is None or noted or not _reporting.acquire(blocking=False):
        return
    try:
        if lines := report():
            error.add_note("\n".join([_REPORT_HEAD, *lines]))
    except Exception as failure:  # the error itself is what matters
        text = f"the flight recorders of other ranks could not be read for an error: {summary(failure)}"
        recorder.warn(text, RankInGroup())
        if not _has_warned:
            _has_warned = True
            with contextlib.suppress(Warning):  # a filter that raises must not replace the error
                warnings.warn(f"gradwire: {text}. This is shown once.", RuntimeWarning, stacklevel=2)
    finally:
        _reporting.release()


_NULL_CONTEXT = contextlib.nullcontext()


def within(place: Place) -> contextlib.AbstractContextManager[None]:
    """Records of this thread belong to `place` inside. Costs next to nothing without a recorder."""
    recorder = active  # which another thread may stop at any time
    return _NULL_CONTEXT if recorder is None else _Within(recorder.thread, place)


class _Within(contextlib.AbstractContextManager[None]):
    __slots__ = ("_before", "_place", "_thread")

    def __init__(self, thread: _Thread, place: Place) -> None:
        self._thread, self._place = thread, place

    def __enter__(self) -> None:
        self._before, self._thread.place = self._thread.place, self._place

    def __exit__(self, *exc: object) -> None:
        self._thread.place = self._before


def current_place() -> Place:
    """The place that records of this thread belong to, to be passed to another thread."""
    recorder = active
    return NOWHERE if recorder is None else recorder.thread.place


def _forget() -> None:
    """In a forked child: the ring is the parent's."""
    global active, reporter, _reporting
    active = reporter = None
    _reporting = threading.Lock()


os.register_at_fork(after_in_child=_forget)
