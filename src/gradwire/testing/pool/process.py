"""The parent's hold on one worker process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from gradwire.errors import GroupError
from gradwire.testing.pool.outcome import MESSAGE_LIMIT


class Process:
    """A worker as its parent sees it: a socket to talk over, a way to see it end, and a way to see where it stands."""

    def __init__(self, port: int) -> None:
        self.control, theirs = socket.socketpair()
        self._stack = os.memfd_create("gradwire-stack")
        self._dumped, dumped = os.pipe()
        os.set_blocking(self._dumped, False)
        fds = (theirs.fileno(), self._stack, dumped)
        # See Note [Who outlives whom] in worker.py.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"from gradwire.testing.pool.worker import work; work{(*fds, port, parent)}",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_JIT_PROFILE": "0"},
            )
        finally:
            theirs.close()
            os.close(dumped)
        self.control.settimeout(MESSAGE_LIMIT)
        self.pid = self.process.pid
        self.alive = os.pidfd_open(self.pid)  # readable once the process has ended, whoever else holds its sockets
        self.spoilt = False

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What this process holds open for the worker."""
        return self.control.fileno(), self._stack, self._dumped, self.alive

    def wait(self, limit: float) -> int | None:
        """The exit status, if the worker ends within `limit` seconds."""
        select.select([self.alive], [], [], max(0.0, limit))
        return self.process.poll()

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        if self.wait(MESSAGE_LIMIT) is None:
            raise GroupError(f"worker process {self.pid} is still there {MESSAGE_LIMIT:.0f} s after SIGKILL.")

    def ask_stack(self) -> None:
        """Have it write down where all its threads stand."""
        with suppress(BlockingIOError):  # other signals that the worker handles leave their byte here too
            os.read(self._dumped, 1 << 16)
        os.ftruncate(self._stack, 0)
        os.lseek(self._stack, 0, os.SEEK_SET)
        self.process.send_signal(signal.SIGUSR1)

    def stack(self, limit: float) -> str:
        """What it wrote after `ask_stack`, waiting at most `limit` seconds for it."""
        select.select([self._dumped, self.alive], [], [], limit)
        return os.pread(self._stack, 1 << 20, 0).decode(errors="replace") or f"(no stack within {limit:.3g} s)\n"

    def release(self) -> None:
        """Give back what this process held for it; a worker that still runs ends by itself."""
        self.control.close()
        for fd in (self._stack, self._dumped, self.alive):
            os.close(fd)


def ending(status: int | None) -> str:
    """How a process with this exit status came to its end, in words."""
    if status is None or status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name} (signal {-status})"
