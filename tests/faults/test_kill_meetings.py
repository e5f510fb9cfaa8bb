"""A rank that dies or stops while a group is made is named by all others, which then end without delay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_meetings.py")
REPEAT = os.environ.get("KILL_MEETINGS_REPEAT", "1")


@pytest.mark.parametrize("kind", ["gloo", "split", "hierarchical", "shared_memory"])
def test_all_survivors_name_the_rank(kind: str) -> None:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy starts no threads then
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--repeat", REPEAT, "--only", kind],
        env={**os.environ, "KILL_MEETINGS_SLACK": "30", **one_thread},  # a loaded machine breaks no limit
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert sum(report["errors"].values()) == 7 * report["meetings"] > 0
