"""Asks the process of a rank which gradients it waits for. Without torch, except in the rank.

Which gradients have arrived is not recorded, because being told of each of them costs more than all other records. So a
hang report asks: it writes a byte to a pipe of the rank, which it finds by the rank's process id, and a thread of the rank writes
the answer to `rank-N.awaited`. A process that is stopped, or whose interpreter is blocked by C code, does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.runtime.private_file import write_private

SUBJECT = "questions"
"""Of the description that has the number of the pipe."""
SUFFIX = ".awaited"
_ASK, _END = b"?", b"."
_PAUSE = 0.01
_STOP_WITHIN = 5.0


class Awaited(NamedTuple):
    """The gradients that a model waits for in a backward."""

    group_id: int
    model: int
    rank: int
    """In the group."""
    step: int
    bucket: int
    """The bucket that is to be launched next."""
    missing: tuple[str, ...]
    """Its parameters without a gradient. None: all are there, and are sent at the end of backward."""


class GradientAnswers:
    """In the rank: a thread that sleeps until it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = os.getpid()
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="gradwire-answers", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> dict[str, int]:
        """How to ask."""
        return {"descriptor": self._writer, "inode": os.fstat(self._writer).st_ino}

    def _run(self) -> None:
        while os.read(self._reader, 1) == _ASK:
            asked = time.monotonic_ns()
            with contextlib.suppress(OSError, RuntimeError):  # a full disk; a model that is being made at this moment
                answer = json.dumps({"time": asked, "models": _awaited()})
                write_private(self._path, answer.encode())

    def remove(self) -> None:
        """End the thread. In a forked child there is none."""
        if self._pid == os.getpid():
            os.write(self._writer, _END)
            self._thread.join(_STOP_WITHIN)
            if self._thread.is_alive():  # it writes to a file system that does not answer, and still needs the pipe
                return
        os.close(self._reader)
        os.close(self._writer)


def _awaited() -> list[dict[str, Any]]:
    """Without an import, whose lock the thread that hangs may hold: a module that is not there has no models."""
    module = sys.modules.get("gradwire.reducer.intake.awaited_gradients")
    return [] if module is None else module.awaited_gradients()


Asked = Mapping[Path, tuple[Mapping[str, Any], Mapping[str, Any]]]
"""By the path of a rank's answers: the header of its ring, and the description by which it can be asked."""


class Question:
    """Asks these ranks which gradients they wait for. They may answer while something else is done."""

    def __init__(self, ranks: Asked) -> None:
        self._since = time.monotonic_ns()
        self._asked = [path for path, (header, how) in ranks.items() if _write(header, how)]

    def answers(self, *, within: float) -> dict[Path, list[Awaited]]:
        """The answers; those that have not come within so many seconds since they were asked are left out."""
        found: dict[Path, list[Awaited]] = {}
        deadline = self._since / 1e9 + within
        while True:
            for path in self._asked:
                if path not in found and (answer := read_answer(path, self._since)) is not None:
                    found[path] = answer
            if len(found) == len(self._asked) or time.monotonic() >= deadline:
                return found
            time.sleep(_PAUSE)


def _write(header: Mapping[str, Any], how: Mapping[str, Any]) -> bool:
    """Whether the rank could be asked."""
    try:
        path = f"/proc/{int(header['pid'])}/fd/{int(how['descriptor'])}"
        if os.stat(path).st_ino != how["inode"]:  # opening something else may have an effect
            return False
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, KeyError, TypeError, ValueError):
        return False
    try:
        # Once the recorder was stopped, its number may be that of a file of the user's.
        return os.fstat(fd).st_ino == how["inode"] and os.write(fd, _ASK) == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def read_answer(path: Path, since: int) -> list[Awaited] | None:
    """An answer that was written after `since`, in nanoseconds on the monotonic clock; None if there is none."""
    try:
        answer = json.loads(path.read_text())
        if answer["time"] < since:
            return None
        return [
            Awaited(
                int(m["group_id"]),
                int(m["model"]),
                int(m["rank"]),
                int(m["step"]),
                int(m["bucket"]),
                tuple(map(str, m["missing"])),
            )
            for m in answer["models"]
        ]
    except (OSError, KeyError, TypeError, ValueError):
        return None
