"""Ranks that start as forks of a process that has imported torch: the launcher's side. `preload_server.py` is the other.

Note [A rank that was forked]
It must not differ from one that was started by itself. The server has the command line of the ranks and all variables that they
have in common, so whatever Python, torch and its libraries read when they start is what each rank would have read. Its streams are
pipes, like theirs; what was written during the import each rank writes again. It forks twice, so that the launcher adopts its
grandchild (`PR_SET_CHILD_SUBREAPER`), which joins the group of its guardian and is from then on a child like any other: signals,
exit status and the end of the launcher need no code of their own. Random states that Python, numpy and torch draw at their start
are drawn again. All ranks have one seed for hashes of strings, where PYTHONHASHSEED sets none.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO

from gradwire.launch.environment import SERVER
from gradwire.launch.preload_server import READY
from gradwire.launch.process import Guardian
from gradwire.runtime.fork_server import ask

ELASTIC_MODULES = (
    *("torch", "encodings.idna", "gradwire.elasticity.preloaded", "gradwire.autograd.compiled.inductor_pass"),
    *("gradwire.launch.elastic_entry", "gradwire.observe.recording"),
)
"""What the server imports for ranks that may be replaced, while others wait."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_CHUNK = 1 << 16
_ANSWER = 20.0
"""Seconds that the server has for a fork. The launcher waits meanwhile."""


class ForkedChild:
    """A child of this process that the server has forked."""

    def __init__(self, pid: int, pipes: Mapping[int, BinaryIO]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = (pipes.get(fd) for fd in (0, 1, 2))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, reap it, and return its exit status as `subprocess` has it."""
        ended = os.pidfd_open(self.pid)
        try:
            if not select.select([ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        finally:
            os.close(ended)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class PreloadedPython:
    """Starts the server when it is created; `start` then forks. Where that is not possible it starts a process: see `reason`."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        directory: str,
        modules: Sequence[str] = ("torch",),
    ) -> None:
        """`modules` are what the server imports."""
        self.reason: str | None = None
        """Why the server cannot fork: empty if it can, None while it starts."""
        self._command = list(command)
        self._output = {1: b"", 2: b""}
        self._guardian = Guardian()
        self._control, theirs = socket.socketpair()
        with theirs:
            common = dict(set.intersection(*(set(environ.items()) for environ in environments)))
            server = {"fd": theirs.fileno(), "modules": modules, "directory": directory}
            self._process = subprocess.Popen(
                self._command,
                env={**common, SERVER: json.dumps(server)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                process_group=self._guardian.pid,
            )
        self._pipes: dict[int, Any] = {1: self._process.stdout, 2: self._process.stderr}
        self.descriptors = [self._control.fileno(), *(pipe.fileno() for pipe in self._pipes.values())]
        """To be watched while `reason` is None, and passed to `read`."""

    def read(self) -> None:
        """Read what has arrived from the server."""
        ready = select.select(self.descriptors, [], [], 0.0)[0]
        for fd, pipe in self._pipes.items():
            if pipe.fileno() in ready:
                self._output[fd] += os.read(pipe.fileno(), _CHUNK)
        if self._control.fileno() in ready and self.reason is None:
            answer = self._control.recv(_CHUNK)
            self.reason = "" if answer == READY else answer.decode() or "the process that imports torch has ended"

    def start(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        process_group: int = 0,
        **streams: Any,
    ) -> Any:
        """Start a process as `subprocess.Popen` does, in milliseconds: one more rank, or other code of Python."""
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
            is_rank = command == self._command
            request = {
                "argv": None if is_rank else command,
                "env": dict(os.environ if env is None else env),
                "group": process_group,
                "fds": [0, 1, 2, *pass_fds],
                "output": [text.decode("latin-1") for text in self._output.values()] if is_rank else [],
            }
            with _adopting_orphans():
                pid = self._fork(request, [*fds, *pass_fds])
        if pid:
            return ForkedChild(pid, pipes)
        for pipe in pipes.values():
            pipe.close()
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, process_group=process_group, **streams)

    def _fork(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        """The process that the server has forked; 0 if it cannot."""
        if self.reason == "":
            with suppress(OSError):
                ask(self._control, request, fds)
                if select.select([self._control], [], [], _ANSWER)[0] and (pid := self._control.recv(100)):
                    return int(pid)
            self._process.kill()  # else it might fork later
            self.reason = "the process that has imported torch has ended"
        return 0

    def close(self) -> None:
        """End the server. What it has forked goes on; what is started later imports torch itself. May be called again."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes.values():
            pipe.close()
        self._guardian.release()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Descendants whose parent ends become children of this process."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
