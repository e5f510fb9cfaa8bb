"""Processes that have torch imported already, for tests in which the process is the point and the import is not.

`import torch` takes seconds of CPU time, and most processes of this suite would spend their lives in it. One server process imports
it once and then forks: a child has memory, threads, signals, exit handlers and an exit status of its own, as any process does. What
it does not have is an interpreter that was started for it; tests of that start one themselves.
"""

import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gradwire.lab import Host
from gradwire.runtime.fork_server import EXIT_LIMIT, ForkedProcess
from gradwire.testing import mpi as mpirun
from gradwire.testing.pool.process import default_server
from gradwire.testing.pool.protocol import MESSAGE_LIMIT
from helpers import fork_client
from helpers.exit_messages import without_leaks_of_triton
from helpers.fork_client import ADDRESS

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
from gradwire.testing.pool import pool
pool.default_server = lambda: None
popen = subprocess.Popen
subprocess.Popen = lambda args, **how: (Forked if args[0] == sys.executable else popen)(args, **how)
from gradwire.testing import mpi as mpirun
mpirun.command = lambda mpirun, ranks, plain=mpirun.command: [*plain(mpirun, ranks), *{client}]
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


PRELOADED = (
    "helpers.quick_exit", "torch._dynamo", "numba", "tqdm", "gradwire.hooks", "gradwire.interop", "gradwire.parallel",
    "gradwire.launch", "gradwire.cli.run", "helpers.forked_python", "helpers.compiled_loops",
)  # fmt: skip
"""What the server imports before what ranks of `run_ranks` need."""


class WarmProcess:
    """A child of the server, with what it writes."""

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

    def __init__(self, process: ForkedProcess, outputs: Sequence[int] = ()) -> None:
        self.pid, self.poll = process.pid, process.poll
        self._process = process
        self._outputs = list(outputs)

    @property
    def returncode(self) -> int | None:
        """The exit status, if it is known."""
        return self._process.returncode

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

    def wait(self, timeout: float = EXIT_LIMIT) -> int:
        """The exit status; raises if the process does not end in time."""
        status = self.poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its status has not arrived yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it still runs, and wait for that."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """Ask it to end, if it still runs."""
        self.send_signal(signal.SIGTERM)


def _output(name: str) -> int:
    """A file in memory for the output of a process and its children, which may write at the same time.

    Of such a file the kernel does not guard the position that they share: one would overwrite what another writes.
    """
    fd = os.memfd_create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


class WarmPython:
    """Programs in forks of the server that forks the ranks of `run_ranks`."""

    def __init__(self) -> None:
        self.server = default_server()
        self.server.preload[:0] = PRELOADED
        self.server.path.append(str(Path(__file__).parents[1]))  # where `helpers` and `detection` are
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
        """As `ForkServer.start`, by default with the output of this process; with `capture`, `communicate` returns it."""
        outputs = [_output(name) for name in ("stdout", "stderr")] if capture else []
        with open(os.devnull) as nothing:
            streams = fds or (nothing.fileno(), *(outputs or (1, 2)))
            return WarmProcess(self.server.start(code, *args, fds=streams, env=env or {}, path=path), outputs)

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

    def open_door(self) -> None:
        """Let ranks under mpirun be forks, too: `fork_client.py` asks the server for them."""
        self._folder = tempfile.mkdtemp(prefix="gradwire-forks-")
        os.environ[ADDRESS] = self.server.address = f"{self._folder}/socket"
        plain = mpirun.command

        @functools.wraps(plain)
        def command(mpirun: str, ranks: int) -> list[str]:
            self.server.run()
            return [*plain(mpirun, ranks), *FORK_CLIENT]

        mpirun.command = command

    def close(self) -> None:
        """Remove the socket. The server ends with the pool."""
        if self._folder:
            shutil.rmtree(self._folder)
