"""Processes that have torch imported already, for tests in which the process is the point and the import is not.

`import torch` takes seconds of CPU time, and most processes of this suite would spend their lives in it. One server process imports
it once and then forks: a child has memory, threads, signals, exit handlers and an exit status of its own, as any process does. What
it does not have is an interpreter that was started for it; tests of that start one themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from gradwire.lab import Host
from gradwire.testing.mpi import launch
from gradwire.testing.pool.outcome import MESSAGE_LIMIT, START_LIMIT
from gradwire.testing.pool.process import Hold, Spawn
from helpers import fork_client
from helpers.exit_messages import without_leaks_of_triton
from helpers.fork_client import ADDRESS

SERVER = Path(__file__).with_name("fork_server.py")
FORK_CLIENT = [sys.executable, "-I", "-S", fork_client.__file__]
GRADWIRE_RUN = "from helpers.forked_python import launch; launch()"
"""`gradwire run` with the arguments of the process, and ranks that are forks of it. They end by `os._exit`, after exit handlers."""

FORKED_RANKS = """
import subprocess, sys
from helpers.forked_python import ForkedPython
class Forked(ForkedPython):
    def _execute_child(self, args, *how):
        *command, code = args
        super()._execute_child([*command, "import ctypes; ctypes.CDLL(None).prctl(1, 0); " + code], *how)
popen = subprocess.Popen
subprocess.Popen = lambda args, **how: (Forked if args[0] == sys.executable else popen)(args, **how)
from gradwire.testing.mpi import launch
launch.command = lambda mpirun, ranks, plain=launch.command: [*plain(mpirun, ranks), *{client}]
""".replace("{client}", repr(FORK_CLIENT))
"""Workers that a pool of the process starts are forks of it, and ranks under mpirun of the server. That Linux kills the first with
their parent is left to themselves."""

_ON_HOST = """
import ctypes, os, socket
libc, new_network, new_name, new_mounts = ctypes.CDLL(None, use_errno=True), 0x40000000, 0x04000000, 0x00020000
slave, recursive, detached = 1 << 19, 1 << 14, 2
if (
    libc.setns(os.open("/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC), new_network)
    or libc.unshare(new_name | new_mounts)
    or libc.mount(b"", b"/", b"none", slave | recursive, None)
    or libc.umount2(b"/sys", detached)
    or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)  # has the interfaces of the network namespace
):
    raise OSError(ctypes.get_errno(), "cannot enter {name}")
socket.sethostname("{name}")
"""


def on_host(host: Host, code: str) -> str:
    """`code` for a process that first moves to one of `gradwire.lab.hosts`, as `host.popen` does."""
    return _ON_HOST.format(name=host.name) + code


SERVER_SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Before it forks, the server must not start threads, as numpy does when it is imported, nor wake CUDA's driver."""


class WarmProcess:
    """A child of the server, which says how it ended."""

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

    def __init__(self, pid: int, status: socket.socket, outputs: Sequence[int] = ()) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._outputs = list(outputs)

    def poll(self, limit: float = 0.0) -> int | None:
        """The exit status as `subprocess` has it, if the process ends within `limit` seconds."""
        if self.returncode is None and select.select([self._status], [], [], max(0.0, limit))[0]:
            told = self._status.recv(100)
            if not told:
                raise RuntimeError("the fork server has died")
            self.returncode = int(told)
            self._status.close()
        return self.returncode

    def wait(self, timeout: float = MESSAGE_LIMIT) -> int:
        """The exit status; raises if the process does not end in time."""
        status = self.poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def communicate(self, timeout: float = MESSAGE_LIMIT) -> tuple[str, str]:
        """What it wrote on stdout and stderr and nobody has read, once it has ended; nothing when asked again."""
        self.wait(timeout)
        said = [os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace") for fd in self._outputs]
        while self._outputs:
            os.close(self._outputs.pop())
        if self.stdin is not None and self.stdout is not None:
            said[:0] = [] if self.stdout.closed else [self.stdout.read()]
            self.stdin.close()
            self.stdout.close()
        return (said[0], without_leaks_of_triton(said[1])) if said else ("", "")

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            self._send(number)

    def terminate(self) -> None:
        """Ask it to end, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, if it still runs, and wait for that."""
        if self.poll() is None:
            self._send(signal.SIGKILL)
            self.wait()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and word of it is on its way
            os.kill(self.pid, number)

    def fileno(self) -> int:
        """Of the socket over which the status comes; -1 when it has come."""
        return self._status.fileno()


def _output(name: str) -> int:
    """A file in memory for the output of a process and its children, which may write at the same time.

    Of such a file the kernel does not guard the position that they share: one would overwrite what another writes.
    """
    fd = os.memfd_create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


class WarmPython:
    """The server, started when first needed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""

    def start(
        self,
        code: str,
        *args: str,
        fds: Sequence[int] = (),
        env: dict[str, str] | None = None,
        path: str = "<string>",
        capture: bool = False,
    ) -> WarmProcess:
        """Run `code` in a new process, as `python -c` would, or as the file `path`.

        `fds` become its descriptors 0, 1 and so on. Without them it has this process's output, or one that `communicate` returns.
        """
        ours, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )  # its id and its status are two messages
        request = {"code": code, "path": path, "args": args, "env": {**os.environ, **(env or {})}, "cwd": os.getcwd()}
        text = json.dumps(request).encode()
        outputs = [_output(name) for name in ("stdout", "stderr")] if capture else []
        with open(os.devnull) as nothing, theirs:
            passed = fds or (nothing.fileno(), *(outputs or (1, 2)))
            control = self._running()
            socket.send_fds(control, [len(text).to_bytes(8, "big")], [theirs.fileno(), *passed])
            control.sendall(text)
        if not select.select([ours], [], [], START_LIMIT)[0]:
            raise RuntimeError("the fork server does not answer")
        return WarmProcess(int(ours.recv(100)), ours, outputs)

    def talk(self, code: str, *args: str, path: str = "<string>") -> WarmProcess:
        """Run `code` in a new process whose standard input and output are pipes, its `stdin` and `stdout`.

        `communicate` returns the rest of what it wrote, and closes both.
        """
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        errors = os.memfd_create("stderr")
        try:
            process = self.start(code, *args, fds=(theirs_in, theirs_out, errors), path=path)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        process._outputs.append(errors)
        process.stdin, process.stdout = open(ours_in, "w"), open(ours_out)  # noqa: SIM115
        return process

    def run(self, code: str, *args: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run `code` to its end, and return what it wrote."""
        return self.run_all([(code, *args)], timeout=timeout)[0]

    def run_file(self, path: Path, *args: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, and return what it wrote."""
        return self.run_all([(path.read_text(), *args)], timeout=timeout, path=str(path))[0]

    def run_all(
        self,
        commands: Sequence[Sequence[str]],
        *,
        timeout: float,
        envs: Sequence[dict[str, str]] = (),
        path: str = "<string>",
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run several at once to their ends; each finds its own of `envs` added to the environment.

        Raises TimeoutExpired, and ends those that still run, after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        started: list[WarmProcess] = []
        done = []
        try:
            for (code, *args), env in zip(commands, envs or [{}] * len(commands), strict=True):
                started.append(self.start(code, *args, env=env, path=path, capture=True))
            for process, (_, *args) in zip(started, commands, strict=True):
                out, err = process.communicate(deadline - time.monotonic())
                done.append(subprocess.CompletedProcess([path, *args], process.wait(), out, err))
        finally:
            for process in started:
                process.kill()
                process.communicate()
        return done

    def _running(self) -> socket.socket:
        if self._server is None or self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs, socket.socket(socket.AF_UNIX) as door:
                door.bind(self._address)  # not from the environment: a test may have removed it there
                door.listen(64)
                fds = [theirs.fileno(), door.fileno()]
                command = [sys.executable, str(SERVER), str(fds[0]), str(os.getpid()), str(fds[1])]
                self._server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    env={**os.environ, ADDRESS: self._address, **SERVER_SETTINGS},
                )
        return self._control

    @property
    def _address(self) -> str:
        """Of the socket on which ranks under mpirun ask for forks."""
        return f"{self._folder}/socket"

    def open_door(self) -> None:
        """Let ranks under mpirun be forks, too: `fork_client.py` asks the server for them."""
        self._folder = tempfile.mkdtemp(prefix="gradwire-forks-")
        os.environ[ADDRESS] = self._address
        plain = launch.command

        @functools.wraps(plain)
        def command(mpirun: str, ranks: int) -> list[str]:
            self._running()
            return [*plain(mpirun, ranks), *FORK_CLIENT]

        launch.command = command

    def close(self) -> None:
        """End the server. Its children end by themselves, or were killed."""
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.wait(MESSAGE_LIMIT)
        if self._folder:
            shutil.rmtree(self._folder)

    # -- for Leftovers -------------------------------------------------------------------------------------------------

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` is the server."""
        return self._server is not None and pid == self._server.pid

    def keeps_descriptor(self, fd: int) -> bool:
        """Whether `fd` leads to the server."""
        return self._control is not None and fd == self._control.fileno()

    # -- for the pool of rank processes --------------------------------------------------------------------------------

    def start_workers(self, count: int, store: str) -> Iterator[Hold]:
        """What `RankPool._start` does, with processes of this server."""
        for _ in range(count):
            yield WarmWorker(self, store, Spawn())


WORKER = """
import os
{program}
work(3, 4, 5, {store!r}, os.getppid())
"""


class WarmWorker(Hold):
    """A worker of the pool that the server forked."""

    def __init__(self, python: WarmPython, store: str, spawn: Spawn) -> None:
        super().__init__()
        control, theirs = socket.socketpair()
        code = WORKER.format(program=spawn.program, store=store)
        streams = (1, 2) if spawn.output is None else (spawn.output, spawn.output)
        with open(os.devnull) as nothing, theirs:
            fds = (nothing.fileno(), *streams, theirs.fileno(), self._stack, self._dumped_there)
            self.process = python.start(code, fds=fds, env=dict(spawn.settings))
        self._take(control, self.process.pid)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What this process holds open for the worker."""
        return *super().descriptors, self.process.fileno()

    def wait(self, limit: float) -> int | None:
        """The exit status, if the worker ends within `limit` seconds."""
        return self.process.poll(limit)

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
