"""Which host this is, and which processes on it live."""

from __future__ import annotations

import os
import socket


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def host_identity() -> str:
    """The same for two processes exactly when one can see the other by its process number."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {_read('/proc/sys/kernel/random/boot_id').strip()} {namespace}"


def process_start(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; "" where that cannot be known, None if it is dead or a zombie."""
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    after_name = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if not after_name or after_name[0] in "ZX" else after_name[19]
