"""A world of rank processes for one benchmark: started, monitored and ended by this process, with or without mpirun.

`run_world(task, ranks)` calls `task(context)` on every rank and returns what each returned. Every way in which ranks can fail to
answer ends in one error that names the rank, and leaves no process behind: see `rank_main.py` for their side.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gradwire.cli.experiment.barrier import Barrier
from gradwire.cli.experiment.mpi import Launcher
from gradwire.cli.experiment.rank_context import RankContext
from gradwire.errors import CollectiveTimeout, GroupError, PeerLost
from gradwire.groups.private_store import PrivateStore
from gradwire.lab import Host
from gradwire.testing.pool.process import WORKER_SETTINGS
from gradwire.testing.private_socket import PrivateListener

TIMEOUT = 120
"""Default seconds without a report from any rank after which a benchmark gives up."""
TIMEOUT_HELP = "give up when no rank has reported progress for this long (default: %(default)s)"
_START = 120.0
"""Minimum seconds that ranks get to connect: they import torch."""
_LEAVE = 20.0
"""Seconds that ranks get to exit by themselves once all have answered."""
_STOP = 3.0
"""Seconds that ranks get to end after a stop message."""
_LAST_LINES = 60
HOSTED_PORT = 29_500
"""Port of the store that rank 0 hosts if ranks are on separate hosts, where all ports are free."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Rank: I have connected."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Start:
    """Starter: run this. `task` is a pickled function of a `RankContext`. The store is the private one of that name; if ranks are
    on separate hosts there is none, and rank 0 hosts one at `address`."""

    size: int
    private: str
    address: str
    timeout: float
    task: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """Starter: dump your stacks, and end."""


@dataclass(frozen=True, slots=True)
class Report:
    """Rank: progress."""

    progress: Any


@dataclass(frozen=True, slots=True)
class Done:
    """Rank: the task returned this."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Rank: the task raised this."""

    error: str
    text: str
    timed_out: bool


def run_world(
    task: Callable[[RankContext], Any],
    ranks: int,
    *,
    name: str,
    on: Launcher | Sequence[Host] = (),
    timeout: float = TIMEOUT,
    on_report: Callable[[Any], object] = lambda progress: None,
) -> list[Any]:
    """Call `task(context)` in `ranks` new processes and return the results in rank order.

    A Launcher as `on` starts them under mpirun. Over hosts, of `gradwire.lab`, ranks are distributed, and reach each other only
    over their links. `on_report` is called with what ranks report. The world is ended after `timeout` seconds without a report.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        launcher, hosts = (on, ()) if isinstance(on, Launcher) else (None, tuple(on))
        world = _World(Path(folder), ranks, name, timeout, hosts)
        try:
            world.start(launcher)
            results = world.listen(cloudpickle.dumps(task), on_report)
            world.let_leave()
            return results
        except GroupError as error:
            if isinstance(error, CollectiveTimeout):
                world.stop()
            if said := world.last_lines():
                error.add_note(said)
            raise
        finally:
            world.end()


@dataclass(slots=True)
class _Rank:
    """The starter's state of a rank that has connected."""

    number: int
    pidfd: int
    answer: Done | None = None


@dataclass(frozen=True, slots=True)
class _Process:
    """A process that was started, and the ranks it is or starts."""

    program: str
    popen: subprocess.Popen[bytes]
    ranks: frozenset[int]


@dataclass(slots=True)
class _World:
    """The processes and their state."""

    folder: Path
    size: int
    name: str
    timeout: float
    hosts: tuple[Host, ...] = ()
    processes: dict[int, _Process] = field(default_factory=dict)
    """By a descriptor that becomes readable when the process has ended."""
    strangers: list[Connection] = field(default_factory=list)
    """Connections of ranks that have not identified themselves yet."""
    ranks: dict[Connection, _Rank] = field(default_factory=dict)
    store: PrivateStore = field(default_factory=PrivateStore.create)
    """The store in which the groups of the ranks meet, unless they are on separate hosts."""
    server: PrivateListener = field(init=False)

    def __post_init__(self) -> None:
        self.server = PrivateListener(self.folder, backlog=self.size)

    # -- beginning -----------------------------------------------------------------------------------------------------------

    def start(self, launcher: Launcher | None) -> None:
        """Start the processes; they will connect."""
        Barrier.prepare(self.folder / "barrier", size=self.size)
        cores = len(os.sched_getaffinity(0))
        command = [sys.executable, "-P", "-m", "gradwire.cli.experiment.rank_main", str(self.folder)]
        environment = {**os.environ, **WORKER_SETTINGS}
        if launcher is not None:
            environment |= launcher.environment(self.size, cores=cores)
            self._spawn("mpirun", [*launcher.command(self.size, cores=cores), *command], environment, range(self.size))
        else:
            for rank in range(self.size):
                line = [*command, str(rank)]
                if self.hosts:
                    host = self.hosts[rank % len(self.hosts)]
                    line, environment = host.command(line), environment | {"GLOO_SOCKET_IFNAME": host.interface}
                self._spawn(f"the process of rank {rank}", line, environment, [rank])

    def _spawn(self, program: str, command: Sequence[str], environment: dict[str, str], ranks: Iterable[int]) -> None:
        with open(self.folder / "output", "ab") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the starter, which then ends the ranks
            )
        self.processes[os.pidfd_open(popen.pid)] = _Process(program, popen, frozenset(ranks))

    # -- listening -----------------------------------------------------------------------------------------------------------

    def listen(self, task: bytes, on_report: Callable[[Any], object]) -> list[Any]:
        """Every rank's result; raises one error for whatever failed."""
        private, address = ("", self.hosts[0].address) if self.hosts else (self.store.name, "")
        start = Start(self.size, private, address, self.timeout, task)
        running = list(self.processes)
        while len(done := [r for r in self.ranks.values() if r.answer is not None]) < self.size:
            open_ends = [c for c, r in self.ranks.items() if r.answer is None]
            limit = self.timeout if len(self.ranks) == self.size else max(self.timeout, _START)
            ready = wait([self.server.socket, *self.strangers, *open_ends, *running], limit)
            if not ready:
                raise self._silent([r.number for r in done], limit)
            for item in ready:
                if item is self.server.socket:
                    if (accepted := self.server.accept()) is not None:
                        self.strangers.append(Connection(accepted[0].detach()))
                elif isinstance(item, Connection) and item in self.strangers:
                    self._welcome(item, start)
                elif isinstance(item, Connection):
                    self._hear(item, on_report)
                elif isinstance(item, int):
                    running.remove(item)
                    self._process_ended(self.processes[item])
        return [r.answer.value for r in sorted(done, key=lambda r: r.number) if r.answer is not None]

    def _welcome(self, connection: Connection, start: Start) -> None:
        try:
            hello: Hello = connection.recv()
            rank = _Rank(hello.rank, os.pidfd_open(hello.pid))
        except (EOFError, OSError):
            raise PeerLost(
                f"{self.name} with {self.size} ranks: a rank died while starting. Its output, if any, is below."
            ) from None
        self.strangers.remove(connection)
        self.ranks[connection] = rank
        with suppress(OSError):  # one that died in the meantime is detected when it should answer
            connection.send(start)

    def _hear(self, connection: Connection, on_report: Callable[[Any], object]) -> None:
        rank = self.ranks[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            raise PeerLost(
                f"{self.name} with {self.size} ranks: rank {rank.number} died. Its output, if any, is below; "
                "if there is none, check whether the machine ran out of memory.",
                rank=rank.number,
            ) from None
        if isinstance(message, Report):
            on_report(message.progress)
        elif isinstance(message, Done):
            rank.answer = message
        elif isinstance(message, Failed):
            kind = CollectiveTimeout if message.timed_out else GroupError
            error = kind(f"{self.name} with {self.size} ranks: rank {rank.number} failed: {message.error}")
            error.add_note(message.text.rstrip())
            raise error

    def _process_ended(self, process: _Process) -> None:
        """Ranks that have connected are handled on their connections; the others will never connect."""
        status = process.popen.wait()
        missing = sorted(process.ranks - {r.number for r in self.ranks.values()})
        if missing and not self.strangers:
            raise GroupError(
                f"{self.name} with {self.size} ranks: {process.program} ended with status {status} before ranks {missing} had "
                "connected. Its output is below."
            )

    def _silent(self, done: Sequence[int], limit: float) -> CollectiveTimeout:
        missing = [rank for rank in range(self.size) if rank not in done]
        return CollectiveTimeout(
            f"{self.name} with {self.size} ranks: no rank has reported for {limit:.3g} s, and ranks {missing} have not "
            "finished. Their stacks are below; allow more time with --timeout if the machine is just slow.",
            joined=done,
            missing=missing,
        )

    def last_lines(self) -> str:
        """The end of what the ranks and mpirun have printed."""
        file = self.folder / "output"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        return "\n".join(lines[-_LAST_LINES:])

    # -- ending --------------------------------------------------------------------------------------------------------------

    def let_leave(self) -> None:
        """Give the ranks time to exit by themselves: MPI needs all of them for that."""
        self._await_end(_LEAVE)

    def stop(self) -> None:
        """Make every rank dump its stacks, and end."""
        for connection in self.ranks:
            with suppress(OSError):
                connection.send(Stop())
        self._await_end(_STOP)

    def _await_end(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        for pidfd in [*(r.pidfd for r in self.ranks.values()), *self.processes]:
            wait([pidfd], max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End what still runs, and release everything."""
        for rank in self.ranks.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        for connection in [*self.ranks, *self.strangers]:
            connection.close()
        for process in self.processes.values():
            process.popen.terminate()
        self._await_end(_STOP)
        for pidfd, process in self.processes.items():
            process.popen.kill()
            process.popen.wait()
            os.close(pidfd)
        for rank in self.ranks.values():
            os.close(rank.pidfd)
        self.server.close()
        self.store.close()
