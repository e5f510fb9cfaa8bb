"""The record of faults, also of injected ones: a file with a JSON object in each line, to which many processes append. Without
torch."""

from __future__ import annotations

import json
import time
from pathlib import Path

FILE = "faults.jsonl"
"""Its name in the directory of a run."""


def record_fault(path: str | Path, **facts: object) -> None:
    """Append a fault that is about to happen. One write: a process that is killed after it has lost nothing."""
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps({"time": time.time(), **facts}) + "\n").encode())
