"""`ForkServer`: starts processes as `subprocess.Popen` does, in milliseconds, as forks of one that has imported torch.

`fork_server.py` is the other side: see Note [A process that was forked] there. Without torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO

from gradwire.runtime import FORK_SERVER
from gradwire.runtime.fork_server import READY, ask

START_LIMIT = 120.0
"""Seconds that a server has to import its modules, and to fork."""
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Before it forks, a server must not start threads, as numpy does when it is imported, nor initialize CUDA."""
_PROGRAM = (  # Ctrl-C goes to the whole terminal
    "import signal, sys; signal.signal(2, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_UNBLOCK, [2]); "
    "sys.flags.safe_path or sys.path.pop(0); from gradwire.runtime.fork_server import serve; program = serve(); "
    "signal.signal(2, signal.default_int_handler); exec(*program)"
)
_ENDED = "the process that imports torch has ended"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_CHUNK = 1 << 16
_adopting = threading.Lock()


class ForkedChild:
    """A child of this process that a server has forked: what is needed of `subprocess.Popen`."""

    def __init__(self, pid: int, pipes: Mapping[int, BinaryIO]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (pipes.get(fd) for fd in (0, 1, 2))

    def poll(self, limit: float | None = 0.0) -> int | None:
        """The exit status as `subprocess` has it, if the process ends within `limit` seconds; it is then reaped."""
        if self.returncode is None:
            try:
                with open(os.pidfd_open(self.pid), "rb", buffering=0) as ended:
                    if select.select([ended], [], [], limit)[0]:
                        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (ProcessLookupError, ChildProcessError):  # reaped elsewhere: `subprocess` assumes 0, too
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, reap it, and return its exit status."""
        status = self.poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status


class ForkServer:
    """A server that imports `modules`, started when first needed. Where it cannot fork, processes are started: see `reason`."""

    def __init__(self, modules: Sequence[str], *, command: Sequence[str] = (), directory: str | None = None) -> None:
        self.modules = list(modules)
        self.settings = dict(SETTINGS)
        """Variables of the server in addition to this process's."""
        self.reason: str | None = None
        """Why the server cannot fork: empty if it can, None while that is not known."""
        self._command = list(command) or [sys.executable, "-c", _PROGRAM]
        """The server's; a process that is started with the same goes on as that command does."""
        self._directory = directory
        self._output = {1: b"", 2: b""}
        """What the server has written, and such a process writes again."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Any = None

    def launch(self, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.Popen[bytes]:
        """Start the server now, with these arguments of `subprocess.Popen`."""
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_LIMIT)
        with theirs:
            server = {"fd": theirs.fileno(), "modules": self.modules, "directory": self._directory}
            env = {**os.environ, **self.settings} if env is None else env
            self._process = subprocess.Popen(
                self._command,
                env={**env, FORK_SERVER: json.dumps(server)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                **how,
            )
        return self._process

    def receive(self) -> None:
        """Wait until the server is ready, or cannot fork."""
        self.reason = _ENDED
        with suppress(OSError):
            answer = self._control.recv(_CHUNK)
            self.reason = "" if answer == READY else answer.decode() or _ENDED

    def can_fork(self) -> bool:
        """Whether the server can fork; it is started if it was not."""
        if self.reason is None:
            self.launch()
            self.receive()
        return self.reason == ""

    def start(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        process_group: int | None = None,
        **streams: Any,
    ) -> Any:
        """Start a process as `subprocess.Popen` does: one with the server's command, or `python -c` with other code."""
        with ExitStack() as stack:
            pipes: dict[int, BinaryIO] = {}
            fds = []
            for fd, stream in enumerate(map(streams.get, ("stdin", "stdout", "stderr"))):
                if stream == subprocess.PIPE:
                    ends = os.pipe()
                    pipes[fd] = open(ends[fd == 0], "wb" if fd == 0 else "rb", buffering=0)  # noqa: SIM115
                    stream = ends[fd != 0]
                    stack.callback(os.close, stream)
                elif stream == subprocess.DEVNULL:
                    stream = os.open(os.devnull, os.O_RDWR)
                    stack.callback(os.close, stream)
                fds.append(fd if stream is None else stream)
            goes_on = command == self._command
            request = {
                "argv": None if goes_on else command,
                "env": dict(os.environ if env is None else env),
                "group": process_group,
                "fds": [0, 1, 2, *pass_fds],
                "output": [text.decode("latin-1") for text in self._output.values()] if goes_on else [],
            }
            pid = self._fork(request, [*fds, *pass_fds])
        if pid:
            return ForkedChild(pid, pipes)
        for pipe in pipes.values():
            pipe.close()
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, process_group=process_group, **streams)

    def _fork(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        """The process that the server has forked; 0 if it cannot."""
        if self.can_fork():
            self.reason = _ENDED
            with suppress(OSError), _adopting_orphans():
                ask(self._control, request, fds)
                if pid := self._control.recv(100):
                    self.reason = ""
                    return int(pid)
        return 0

    def close(self) -> None:
        """End the server. What it has forked goes on; what is started later imports torch itself. May be called again."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` is the server."""
        return self._process is not None and pid == self._process.pid

    def keeps_descriptor(self, fd: int) -> bool:
        """Whether `fd` leads to the server."""
        return self._process is not None and fd == self._control.fileno()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Descendants whose parent ends become children of this process."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _adopting:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
