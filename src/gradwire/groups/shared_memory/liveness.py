"""Whether the other ranks' processes are alive.

A process that has died, even if its parent has not waited for it yet, makes its pidfd readable, and a number that was given to
another process in the meantime cannot be mistaken for it. Where there are no pidfds, the process's entry in /proc is read.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from gradwire.runtime.host import is_dead, process_start


class Pulse:
    """Watches which of the other ranks' processes have died."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids` maps each rank to its process."""
        self._lock = threading.RLock()  # `close` may run in a finalizer, in the middle of `dead`
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._starts: dict[int, tuple[int, str | None]] = {}
        self._dead: set[int] = set()
        for rank, pid in pids.items():
            if pid == os.getpid():
                continue  # a rank of this very process lives as long as we do
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(rank)
                continue
            except (AttributeError, OSError):
                self._starts[rank] = pid, process_start(pid)
                continue
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        """The ranks whose processes have died. Never waits."""
        with self._lock:
            if self._ranks:
                self._dead.update(self._ranks[fd] for fd, _ in self._poll.poll(0) if fd in self._ranks)
            for rank, (pid, start) in self._starts.items():
                if start is None or is_dead(pid, start):
                    self._dead.add(rank)
            return sorted(self._dead)

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            for fd in self._ranks:
                self._poll.unregister(fd)
                os.close(fd)
            self._ranks = {}
            self._starts = {}
