"""Stacks by py-spy, which reads the memory of a process: also of one that is stopped. Only where py-spy is installed.

py-spy is a program, and needs the right to trace: a process may trace those that it has started, so the launcher may; elsewhere
the system decides (`kernel.yama.ptrace_scope`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

K = TypeVar("K")


def program() -> str | None:
    """Where py-spy is: next to this interpreter, or in PATH."""
    installed = Path(sys.executable).with_name("py-spy")
    return str(installed) if os.access(installed, os.X_OK) else shutil.which("py-spy")


def dump_stacks(pids: Mapping[K, int], *, within: float) -> dict[K, str]:
    """What `py-spy dump` writes about each process, as JSON. Those that take longer than `within` seconds are left out."""
    py_spy = program() if pids else None
    if py_spy is None:
        return {}
    started = {
        key: subprocess.Popen(
            [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        for key, pid in pids.items()
    }
    deadline = time.monotonic() + within
    found: dict[K, str] = {}
    for key, process in started.items():
        with process:
            try:
                out, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                continue
            if process.returncode == 0:
                found[key] = out
    return found
