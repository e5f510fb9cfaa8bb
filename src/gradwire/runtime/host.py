"""The identity of this host, its cores, and which of its processes are alive, and their state. Without torch."""

from __future__ import annotations

import math
import os
import re
import socket
from enum import Enum


def contents(path: str) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def host_identity() -> str:
    """The same for two processes exactly if each can see the other by its pid."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {contents('/proc/sys/kernel/random/boot_id').strip()} {namespace}"


def clock_identity() -> str:
    """Which monotonic clock this process reads: that of its host, or of its time namespace, which containers may have."""
    try:
        return f"{host_identity()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return host_identity()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; raises OSError where it cannot be read."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def is_dead(pid: int, start: str) -> bool:
    """Whether the process that started at `start` has ended. Only on proof: one that cannot be inspected counts as alive."""
    try:
        facts = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        try:  # Perhaps this process has no file descriptors left. A link is read without one, and a zombie has no program.
            return not os.readlink(f"/proc/{pid}/exe")
        except OSError as error:
            return isinstance(error, FileNotFoundError)
    return bool(facts) and (facts[0] in "ZX" or (bool(start) and facts[19] != start))


def process_start(pid: int) -> str | None:
    """When the process started, in clock ticks; "" where that is not available, None if it is dead or a zombie."""
    try:
        facts = _stat(pid)
        return None if facts[0] in "ZX" else facts[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, IndexError):
        return ""


class ProcessState(Enum):
    """The state of a process, as people read it."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked in the kernel"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"


_STATES = dict.fromkeys("SI", ProcessState.SLEEPING) | dict.fromkeys("Tt", ProcessState.STOPPED)
_STATES |= {"R": ProcessState.RUNNING, "D": ProcessState.BLOCKED}


def process_state(pid: int, start: str = "") -> ProcessState:
    """The state of the process that started at `start` (see `process_start`); a zombie is gone."""
    if is_dead(pid, start):
        return ProcessState.GONE
    state = contents(f"/proc/{pid}/stat").rpartition(") ")[2][:1]
    return _STATES.get(state, ProcessState.UNKNOWN)


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: one without would be ended by it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", contents(f"/proc/{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def usable_cores(cgroups: str = "/sys/fs/cgroup") -> int:
    """How many cores this process may run on: its affinity, or its container's CPU quota where that is less."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroups)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(cgroups: str = "/sys/fs/cgroup") -> float | None:
    """Cores' worth of time that the container's cgroup grants, version 2 or 1; None without a limit, or where none is seen."""
    limit, quota, period = (
        contents(f"{cgroups}/{name}").split() for name in ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    )
    limit = limit or quota + period
    if len(limit) != 2 or not all(word.isdigit() for word in limit) or not int(limit[1]):
        return None  # "max", or -1: no limit
    return int(limit[0]) / int(limit[1])
