"""The record of faults, also injected ones: a file with a JSON object per line, to which many processes append. Without torch."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path

FILE = "faults.jsonl"
"""Its name in the directory of a run."""
LASTING = ("slow", "gil", "shm")
"""Kinds of faults that a member outlives."""


def record_fault(path: str | Path, *, unless: Callable[[set[str]], bool] | None = None, **facts: object) -> bool:
    """Append a fault that is about to happen. One write: a process that is killed after it has lost nothing. False, and nothing is
    appended, if `unless(members)` holds of those that an earlier one has ended: this fault must not happen."""
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        earlier = map(json.loads, file.read().splitlines() if unless else ())
        if unless and unless({fault["member"] for fault in earlier if fault["kind"] not in LASTING}):
            return False
        file.write((json.dumps({"time": time.time(), **facts}) + "\n").encode())
    return True
