"""Python stacks of a rank that may not answer. Without torch.

In a rank that is recorded, faulthandler writes the stacks of all threads to `rank-N.stacks` when a signal comes. Its handler is
C code that runs at once: in a Python loop, in a system call, and in C code that holds the interpreter's lock. Only a process that
is stopped does not answer.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIGNAL = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else None
"""Not one that programs use."""
_PATIENCE = 1.0
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function}() at {self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Stack:
    """What one thread does, most recent call first."""

    thread: int
    frames: tuple[Frame, ...]


class StackFile:
    """In the rank: writes stacks when the signal comes. Made in the main thread, which alone may say what a signal does."""

    def __init__(self, path: Path) -> None:
        assert SIGNAL is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        try:
            signal.signal(SIGNAL, signal.SIG_IGN)  # what unregistering goes back to: a signal may be under way then
            faulthandler.register(SIGNAL, file=self._fd, all_threads=True)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Stop writing."""
        assert SIGNAL is not None
        faulthandler.unregister(SIGNAL)
        os.close(self._fd)


def can_write_stacks() -> bool:
    """Whether this system has such signals, and this is the main thread."""
    return SIGNAL is not None and threading.current_thread() is threading.main_thread()


def read_stacks(path: Path, header: Mapping[str, Any]) -> list[Stack]:
    """The stacks of the threads of a rank now, the main thread's first. Empty if it does not answer within a second."""
    pid, stacks = int(header["pid"]), path.with_suffix(".stacks")
    if SIGNAL is None or not _handles(pid, SIGNAL):
        return []
    try:
        before = stacks.stat().st_size
        os.kill(pid, SIGNAL)
    except OSError:
        return []
    deadline, text = time.monotonic() + _PATIENCE, ""
    while time.monotonic() < deadline:
        with stacks.open(errors="replace") as file:
            file.seek(before)
            now = file.read()
        if now and now == text:  # nothing was added for a while
            break
        text = now
        time.sleep(0.02)
    return parse_stacks(text, main=int(header["main_thread"]))


def parse_stacks(text: str, *, main: int) -> list[Stack]:
    """What faulthandler has written, the main thread's stack first.

    >>> text = 'Thread 0x00ff (most recent call first):\\n  File "a.py", line 3 in f\\n'
    >>> parse_stacks(text, main=255)
    [Stack(thread=255, frames=(Frame(file='a.py', line=3, function='f'),))]
    """
    stacks: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            stacks.append((int(found[1], 16), []))
        elif stacks and (found := _FRAME.match(line)):
            stacks[-1][1].append(Frame(found[1], int(found[2]) if found[2].isdigit() else 0, found[3]))
    return sorted((Stack(thread, tuple(frames)) for thread, frames in stacks), key=lambda stack: stack.thread != main)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: one without would be ended by it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False


def user_frames(frames: Sequence[Frame], header: Mapping[str, Any]) -> list[Frame]:
    """The frames that are not in files of Python, torch, gradwire or other installed packages: what the user wrote."""
    libraries = tuple(header["libraries"])
    return [frame for frame in frames if not frame.file.startswith((*libraries, "<frozen"))]


def libraries() -> list[str]:
    """Where Python, torch, gradwire and other installed packages are."""
    packages = [sys.modules[name].__file__ for name in ("gradwire", "torch") if name in sys.modules]
    found = [os.path.dirname(file) for file in packages if file]
    found += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [os.path.join(path, "") for path in dict.fromkeys(found)]
