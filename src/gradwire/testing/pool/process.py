"""The parent's handle of one worker process: one that it started itself, or one that was started for it."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gradwire.errors import GroupError
from gradwire.runtime.fork_server import ForkedProcess, ForkServer
from gradwire.testing.pool.protocol import MESSAGE_LIMIT

WORKER_SETTINGS = {"OMP_NUM_THREADS": "1", "ONEDNN_JIT_PROFILE": "0", "GLOO_SOCKET_IFNAME": "lo"}
"""Variables of a worker in addition to the parent's. All are on this host, so gloo needs only the loopback interface."""

QUICK_START = "import gc; gc.disable(); "
"""The beginning of a warm worker's program: imports create no garbage, and collecting it takes a tenth of the import time."""
WARM = f"{QUICK_START}from gradwire.testing.pool.worker import work_warm as work"
"""The program of a worker that is kept for many jobs."""
FRESH = "from gradwire.testing.pool.worker import work"
"""The program of a worker for a single job, in which nothing is different from any other process of Python."""

ENDED = 256
"""The exit status of a process that is not our child: only its parent can read the real one."""


class WorkerHandle(ABC):
    """A worker as the pool sees it: a socket, a way to detect its end, and a way to read its stacks."""

    control: socket.socket
    pid: int
    alive: int
    """Readable once the process has ended, even if other processes hold its sockets."""

    def __init__(self) -> None:
        self.spoilt = False
        self._stack = os.memfd_create("gradwire-stack")
        self._dumped, self._dumped_there = os.pipe()
        os.set_blocking(self._dumped, False)

    def _take(self, control: socket.socket, pid: int) -> None:
        """The worker has started, and has its ends of all descriptors."""
        os.close(self._dumped_there)
        self.control = control
        self.control.settimeout(MESSAGE_LIMIT)
        self.pid = pid
        self.alive = os.pidfd_open(pid)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What this process holds open for the worker."""
        return self.control.fileno(), self._stack, self._dumped, self.alive

    def wait(self, limit: float) -> int | None:
        """The exit status, if the worker ends within `limit` seconds."""
        return ENDED if select.select([self.alive], [], [], max(0.0, limit))[0] else None

    @abstractmethod
    def kill(self) -> None:
        """End it now."""

    def ask_stack(self) -> None:
        """Make it dump the stacks of all its threads."""
        with suppress(BlockingIOError):  # other signals that the worker handles leave their byte here too
            os.read(self._dumped, 1 << 16)
        os.ftruncate(self._stack, 0)
        os.lseek(self._stack, 0, os.SEEK_SET)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.alive, signal.SIGUSR1)

    def stack(self, limit: float) -> str:
        """What it wrote after `ask_stack`, waiting at most `limit` seconds for it."""
        select.select([self._dumped, self.alive], [], [], limit)
        return os.pread(self._stack, 1 << 20, 0).decode(errors="replace") or f"(no stack within {limit:.3g} s)\n"

    def release(self) -> None:
        """Close what this process holds for it; a worker that still runs ends by itself."""
        self.control.close()
        for fd in (self._stack, self._dumped, self.alive):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Spawn:
    """How a worker is started."""

    program: str = WARM
    """Python code that defines `work`, the main function."""
    output: int | None = None
    """A descriptor for its stdout and stderr, instead of this process's."""
    settings: Mapping[str, str] = field(default_factory=WORKER_SETTINGS.copy)
    """Variables in addition to this process's."""
    command: Callable[[list[str]], list[str]] = list
    """Turns its command line into the one that runs it where it belongs. It must exec, and keep open descriptors."""


class LocalWorker(WorkerHandle):
    """A worker that this process started, or, if there is one, the fork server, whose child it then is."""

    def __init__(self, store: str, spawn: Spawn, server: ForkServer | None = None) -> None:
        super().__init__()
        control, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | ForkedProcess
        try:
            with theirs:
                fds = (theirs.fileno(), self._stack, self._dumped_there)
                self.process = _start(store, spawn, fds) if server is None else _fork(server, store, spawn, fds)
        except BaseException:
            control.close()
            for fd in (self._stack, self._dumped, self._dumped_there):
                os.close(fd)
            raise
        self._take(control, self.process.pid)

    @property
    def descriptors(self) -> tuple[int, ...]:
        status = [self.process.fileno()] if isinstance(self.process, ForkedProcess) else []
        return *super().descriptors, *status

    def wait(self, limit: float) -> int | None:
        if isinstance(self.process, ForkedProcess):
            with suppress(RuntimeError):  # its server has died, and no other process can read the status
                return self.process.poll(limit)
        ended = super().wait(limit)
        return ended if isinstance(self.process, ForkedProcess) else self.process.poll()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.alive, signal.SIGKILL)
        if self.wait(MESSAGE_LIMIT) is None:
            raise GroupError(f"worker process {self.pid} is still running {MESSAGE_LIMIT:.0f} s after SIGKILL.")


def _start(store: str, spawn: Spawn, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """A child of this process. See Note [Who outlives whom] in worker.py."""
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    # Ctrl-C reaches all processes of the terminal. A worker ignores it, and unblocks it once it does.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            spawn.command([sys.executable, "-P", "-c", f"{spawn.program}; work{(fds, store, parent)}"]),
            stdin=subprocess.DEVNULL,
            stdout=spawn.output,
            stderr=spawn.output,
            pass_fds=fds,
            env={**os.environ, **spawn.settings},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(server: ForkServer, store: str, spawn: Spawn, fds: tuple[int, ...]) -> ForkedProcess:
    code = f"import os\n{spawn.program}\nwork((3, 4, 5), {store!r}, os.getppid())"
    streams = (1, 2) if spawn.output is None else (spawn.output, spawn.output)
    with open(os.devnull) as nothing:
        return server.start(code, fds=(nothing.fileno(), *streams, *fds), env=spawn.settings)


@functools.cache
def default_server() -> ForkServer:
    """The server that warm workers are forks of: torch is imported once, not once per rank."""
    return ForkServer(["torch", "torch.distributed", "gradwire.testing.pool.worker"])


def ending(status: int | None) -> str:
    """A description of how a process with this exit status ended."""
    if status == ENDED:
        return "has ended"
    if status is None or status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name} (signal {-status})"
