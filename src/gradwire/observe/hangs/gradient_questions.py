"""Asks the process of a rank which gradients it waits for, or what its threads do. Without torch, except in the rank.

Which gradients have arrived is not recorded, because being told of each of them costs more than all other records. So a
hang report asks: it writes a byte to a pipe of the rank, which it finds by the rank's process id, and a thread of the rank writes
the answer to `rank-N.awaited`, or the stacks to `rank-N.stacks`. A process that is stopped, or whose interpreter is blocked by C
code, does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.runtime.private_file import write_private

SUBJECT = "questions"
"""Of the description that has the number of the pipe."""
SUFFIX = ".awaited"
STACKS = b"!"
_ASK, _END = b"?", b"."
_PAUSE = 0.01
_STOP_WITHIN = 5.0


class Awaited(NamedTuple):
    """The gradients that a model waits for in a backward, on a rank of its group."""

    group_id: int
    model: int
    rank: int
    step: int
    bucket: int
    """The bucket that is to be launched next."""
    missing: tuple[str, ...]
    """Its parameters without a gradient. None: all are there, and are sent at the end of backward."""


@contextlib.contextmanager
def answer_questions(path: Path) -> Iterator[dict[str, int]]:
    """In the rank: a thread that sleeps until it is asked, and writes its answers to `path`. Yields how to ask."""
    pid = os.getpid()
    reader, writer = os.pipe()
    thread = threading.Thread(target=_answer, args=(reader, path), name="gradwire-answers", daemon=True)
    thread.start()
    try:
        yield {"descriptor": writer, "inode": os.fstat(writer).st_ino}
    finally:
        if pid == os.getpid():  # in a forked child there is no thread
            os.write(writer, _END)
            thread.join(_STOP_WITHIN)
        if pid != os.getpid() or not thread.is_alive():  # it may write to a file system that does not answer
            os.close(reader)
            os.close(writer)


def _answer(reader: int, path: Path) -> None:
    while (question := os.read(reader, 1)) in (_ASK, STACKS):
        asked = time.monotonic_ns()
        # Not imported, as the thread that hangs may hold the lock of imports: a module that is not there has no models.
        intake = sys.modules.get("gradwire.reducer.intake.intake")
        with contextlib.suppress(OSError, RuntimeError):  # a full disk; a model that is being made at this moment
            if question == STACKS:
                with path.with_suffix(".stacks").open("r+b") as file:
                    file.seek(0, os.SEEK_END)
                    faulthandler.dump_traceback(file)
                continue
            models = [] if intake is None else intake.awaited_gradients()
            write_private(path, json.dumps({"time": asked, "models": models}).encode())


def ask(header: Mapping[str, Any], how: Mapping[str, Any], question: bytes = _ASK) -> bool:
    """Ask the rank with this header, as it has described; returns whether that was possible."""
    try:
        path = f"/proc/{header['pid']}/fd/{how['descriptor']}"
        if os.stat(path).st_ino != how["inode"]:  # opening something else may have an effect
            return False
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Once the recorder was stopped, its number may be that of a file of the user's.
            return os.fstat(fd).st_ino == how["inode"] and os.write(fd, question) == 1
        finally:
            os.close(fd)
    except OSError:
        return False


def read_answers(paths: Mapping[int, Path], *, since: int, within: float) -> dict[int, list[Awaited]]:
    """By rank: the answers in these files that are given within so many seconds after `since`, in nanoseconds on the monotonic
    clock, when the ranks were asked."""
    found: dict[int, list[Awaited]] = {}
    while True:
        for rank, path in paths.items():
            if rank not in found and (answer := _read_answer(path, since)) is not None:
                found[rank] = answer
        if len(found) == len(paths) or time.monotonic() >= since / 1e9 + within:
            return found
        time.sleep(_PAUSE)


def _read_answer(path: Path, since: int) -> list[Awaited] | None:
    try:
        answer = json.loads(path.read_text())
        if answer["time"] < since:
            return None
        found = [Awaited(*(model[name] for name in Awaited._fields)) for model in answer["models"]]
        return [one._replace(missing=tuple(one.missing)) for one in found]
    except (OSError, KeyError, TypeError, ValueError):
        return None
