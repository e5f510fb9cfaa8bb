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


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on; raises OSError where it cannot be read."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def is_dead(pid: int, start: str) -> bool:
    """Whether the process that started at `start` has ended. Only on proof: one that cannot be looked at lives."""
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False
    try:
        facts = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process has no file descriptor left, perhaps
        return False
    return bool(facts) and (facts[0] in "ZX" or (bool(start) and facts[19] != start))


def process_start(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; "" where that cannot be known, None if it is dead or a zombie."""
    if is_dead(pid, ""):
        return None
    try:
        return _stat(pid)[19]
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.isdir("/proc/self") else ""
    except (OSError, IndexError):
        return ""
