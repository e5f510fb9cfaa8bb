"""Processes that start with torch imported: a server imports modules once, and forks a process for each request.

A child runs code as `__main__` at the top level of the server's program, with streams, environment, directory, signals, exit
handlers and exit status of its own, which `multiprocessing`'s server does not offer. The server has one thread and exits when its
owner does. Without torch.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import Any

START_LIMIT = 120.0
"""Seconds that a server has to import its modules and fork the first child."""
EXIT_LIMIT = 30.0
"""Seconds that a server has to end after its socket was closed."""
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Before it forks, the server must not start threads, as numpy does when it is imported, nor initialize CUDA."""
_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from gradwire.runtime.fork_server import serve; exec(*serve())"
)


class ForkedProcess:
    """A child of a server, which reports how it ended."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self, limit: float = 0.0) -> int | None:
        """The exit status as `subprocess` has it, if the process ends within `limit` seconds."""
        if self.returncode is None and select.select([self._status], [], [], max(0.0, limit))[0]:
            status = self._status.recv(100)
            if not status:
                raise RuntimeError(f"waiting for process {self.pid}: its fork server has died.")
            self.returncode = int(status)
            self._status.close()
        return self.returncode

    def fileno(self) -> int:
        """The descriptor on which the status arrives; -1 when it has arrived."""
        return self._status.fileno()


class ForkServer:
    """A server, started when first needed. `preload` are modules it imports; those that are not installed are left out."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.preload = list(preload)
        self.path: list[str] = []
        """Directories that the server and its children can import from, in addition to Python's own."""
        self.address = ""
        """The path of a socket where other processes of this user may ask for forks too; its directory must be private."""
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(
        self, code: str, *args: str, fds: Sequence[int], env: Mapping[str, str], path: str = "<string>"
    ) -> ForkedProcess:
        """Run `code` in a new process as `python -c` would, or as the file `path`, with `env` added to the environment.

        `fds` become its descriptors 0, 1 and so on.
        """
        # Its pid and its status are two messages.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"code": code, "path": path, "args": args, "env": {**os.environ, **env}, "cwd": os.getcwd()}
        with theirs:
            ask(self.run(), request, [theirs.fileno(), *fds])
        if select.select([ours], [], [], START_LIMIT)[0] and (pid := ours.recv(100)):
            return ForkedProcess(int(pid), ours)
        ours.close()
        raise RuntimeError(
            f"starting a process: the fork server did not answer within {START_LIMIT:.0f} s, or has died."
        )

    def run(self) -> socket.socket:
        """The socket for requests of this process to the server, which is started if it does not run."""
        if self._server is not None and self._server.poll() is not None:
            self.close()  # it has died
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs, socket.socket(socket.AF_UNIX) as listener:
                if self.address:
                    listener.bind(self.address)
                    listener.listen(64)
                fds = [theirs.fileno(), listener.fileno()]
                self._server = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *map(str, fds), os.pathsep.join(self.path), *self.preload],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    env={**os.environ, **SETTINGS},
                )
        return self._control

    def close(self) -> None:
        """End the server. Its children end by themselves, or were killed."""
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.wait(EXIT_LIMIT)
            self._server = self._control = None

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` is the server."""
        return self._server is not None and pid == self._server.pid

    def keeps_descriptor(self, fd: int) -> bool:
        """Whether `fd` leads to the server."""
        return self._control is not None and fd == self._control.fileno()


def ask(server: socket.socket, request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Send a request and descriptors: a SOCK_SEQPACKET socket for the child's pid and status, then its standard streams."""
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], fds)
    server.sendall(text)


def next_request(source: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A request and its descriptors; None if the other end has closed."""
    head, fds, _, _ = socket.recv_fds(source, 8, 16)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size and (more := source.recv(size - len(text))):
        text += more
    return json.loads(text) if head and len(text) == size else None, fds


def _serve(control: socket.socket, listener: socket.socket) -> dict[str, Any]:
    """Fork for every request of the owner, or of a client of the listener. Returns in the children only."""
    children: dict[int, tuple[int, socket.socket]] = {}
    sources: list[Any] = [control, *([listener] if listener.getsockname() else [])]
    while True:
        ready, _, _ = select.select([*sources, *children], [], [])
        for pidfd in children.keys() & set(ready):
            pid, status = children.pop(pidfd)
            os.close(pidfd)
            _send(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            status.close()
        request, passed = None, list[int]()
        if control in ready:
            request, passed = next_request(control)
            if request is None:
                os._exit(0)  # the owner has closed the server, or has ended
        elif listener in ready:
            with listener.accept()[0] as client:
                request, passed = next_request(client)
        if request is None:
            for fd in passed:
                os.close(fd)
            continue
        status_fd, *fds = passed
        pid = os.fork()
        if pid == 0:
            for fd in (status_fd, control.detach(), listener.detach(), *children):
                os.close(fd)
            for _, status in children.values():
                status.close()
            become(fds, request["env"])
            return request
        for fd in fds:
            os.close(fd)
        status = socket.socket(fileno=status_fd)
        children[os.pidfd_open(pid)] = pid, status
        _send(status, pid)


def _send(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client has ended
        status.send(str(number).encode())


def become(fds: Sequence[int], env: Mapping[str, str], numbers: Sequence[int] = ()) -> None:
    """Give a child its descriptors, 0, 1 and so on or by other `numbers`, and its environment."""
    numbers = numbers or range(len(fds))
    free = 1 + max(*fds, *numbers)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for i, fd in zip(numbers, high):
        os.dup2(fd, i)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # determined again from the environment
    gc.enable()


def serve() -> tuple[types.CodeType, dict[str, Any]]:
    """The main function of the server. Returns in its children only: the code to execute, and the globals of `__main__`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal
    sys.path += filter(None, sys.argv[3].split(os.pathsep))
    gc.disable()  # nothing of what is imported is garbage
    for name in sys.argv[4:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        sys.exit(f"the fork server has {len(threads)} threads, so it cannot fork: a module that it imports starts them")
    gc.collect()
    gc.freeze()
    request = _serve(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:3]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    path = request["path"]
    sys.argv[:] = ["-c" if path == "<string>" else path, *request["args"]]
    sys.path.insert(0, "" if path == "<string>" else os.path.dirname(os.path.abspath(path)))
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__dict__.update(__builtins__=builtins, __file__=path)
    return compile(request["code"], path, "exec", dont_inherit=True), program.__dict__
