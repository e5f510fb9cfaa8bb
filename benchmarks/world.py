"""A world of rank processes for one benchmark: fresh processes, with or without mpirun, and their progress.

`run_world(task, ranks)` calls `task(context)` on every rank and returns what each returned. Every way in which ranks can fail to
answer ends in one error that names the rank, and leaves no process behind.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch._C._distributed_c10d import Store, TCPStore

from benchmarks.barrier import Barrier
from benchmarks.mpi import OpenMPI
from gradwire.errors import CollectiveTimeout, GroupError, PeerLost
from gradwire.lab import Host
from gradwire.testing import mpi
from gradwire.testing.mpi import MPIPool
from gradwire.testing.pool.pool import RankPool
from gradwire.testing.pool.process import FRESH, WORKER_SETTINGS, Spawn
from gradwire.testing.pool.protocol import JobContext, RankResult, RemoteTraceback
from gradwire.testing.ranks import root_failure

_ROOT = Path(__file__).resolve().parent.parent
_LAST_LINES = 60
_HOSTED_PORT = 29_500
"""Port of the store that rank 0 hosts if ranks are on separate hosts, where all ports are free."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank process of a benchmark is given."""

    rank: int
    size: int
    store: Store
    """Where groups of all kinds meet."""
    barrier: Barrier
    """Where ranks wait for each other between turns."""
    timeout: float
    """Seconds that any wait may take."""
    report: Callable[[Any], None]
    """Send progress to the process that started the world."""


def run_world(
    task: Callable[[RankContext], Any],
    ranks: int,
    *,
    name: str,
    on: OpenMPI | Sequence[Host] = (),
    timeout: float = 120.0,
    on_report: Callable[[Any], object] = lambda progress: None,
) -> list[Any]:
    """Call `task(context)` in `ranks` new processes and return the results in rank order.

    With Open MPI as `on` they are started under mpirun. Over hosts, of `gradwire.lab`, ranks are distributed, and reach each other
    only over their links. `on_report` is called with what ranks report. After `timeout` seconds without a report, all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as name_of_folder:
        folder = Path(name_of_folder)
        Barrier.prepare(folder / "barrier", size=ranks)
        address = on[0].address if not isinstance(on, OpenMPI) and on else ""
        job = functools.partial(_be_rank, task, folder, address)
        with open(folder / "output", "ab") as output:
            pool = _pool(on, output.fileno())
            try:
                outcomes = pool.run(job, ranks, timeout=timeout, on_report=on_report, name="bench")
                return _results(outcomes, f"{name} with {ranks} ranks", timeout)
            except GroupError as error:
                files = ("stacks", "output") if isinstance(error, CollectiveTimeout) else ("output",)
                for lines in filter(None, (_last_lines(folder / file) for file in files)):
                    error.add_note(lines)
                raise
            finally:
                with suppress(GroupError):  # ranks that fail as they exit have returned their results
                    pool.close()


def _pool(on: OpenMPI | Sequence[Host], output: int) -> RankPool:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = WORKER_SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)}  # ranks import benchmarks, too
    if isinstance(on, OpenMPI):
        return MPIPool(Spawn(mpi.FRESH, output, settings))

    def spawn(rank: int) -> Spawn:
        if not on:
            return Spawn(FRESH, output, settings)
        host = on[rank % len(on)]
        return Spawn(FRESH, output, settings | {"GLOO_SOCKET_IFNAME": host.interface}, host.command)

    return RankPool(spawn)


def _last_lines(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return "\n".join(lines[-_LAST_LINES:])


# -- on a rank -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Process:
    """What a rank owns. Its task may wait in anything, gloo or MPI; so if another rank fails, this one's process ends."""

    barrier: Barrier
    stacks: Path

    def abort(self, reason: str) -> None:
        """Leave the stacks, and end."""
        with open(self.stacks, "a") as file:
            faulthandler.dump_traceback(file)
        os._exit(1)

    def close(self) -> None:
        """The task has ended."""
        self.barrier.close()


def _be_rank(task: Callable[[RankContext], Any], folder: Path, address: str, job: JobContext) -> Any:
    """Call `task` on one rank. Ranks on separate hosts meet in a store that rank 0 hosts at `address`."""
    store, limit = job.store, timedelta(seconds=job.timeout)
    if address:
        store = TCPStore(address, _HOSTED_PORT, is_master=job.rank == 0, wait_for_workers=False, timeout=limit)
    store.set_timeout(limit)
    barrier = Barrier(folder / "barrier", rank=job.rank, size=job.size, timeout=job.timeout)
    job.own(process := _Process(barrier, folder / "stacks"))
    try:
        return task(RankContext(job.rank, job.size, store, barrier, job.timeout, job.report))
    finally:
        job.own(None)
        process.close()


# -- what the outcomes mean ----------------------------------------------------------------------------------------------------


def _results(outcomes: Sequence[RankResult], who: str, timeout: float) -> list[Any]:
    failures = [outcome for outcome in outcomes if outcome.failed(())]
    if not failures:
        return [outcome.value for outcome in outcomes]
    first = root_failure(failures)
    if first is None:
        missing = [outcome.rank for outcome in failures]
        error: GroupError = CollectiveTimeout(
            f"{who}: no rank has reported for {timeout:.3g} s, and ranks {missing} have not finished. Their stacks are below; "
            "allow more time with --timeout if the machine is just slow.",
            joined=[outcome.rank for outcome in outcomes if outcome.rank not in missing],
            missing=missing,
        )
        for outcome in failures:
            error.add_note(f"stack of rank {outcome.rank}:\n{outcome.detail}")
    elif first.error is not None:
        kind = CollectiveTimeout if isinstance(first.error, CollectiveTimeout) else GroupError
        error = kind(f"{who}: rank {first.rank} failed: {type(first.error).__name__}: {first.error}")
        if isinstance(first.error.__cause__, RemoteTraceback):
            error.add_note(first.error.__cause__.args[0].rstrip())
    else:
        error = PeerLost(
            f"{who}: rank {first.rank} died: {first.detail}. Its output, if any, is below; if there is none, check whether the "
            "machine ran out of memory.",
            rank=first.rank,
        )
    raise error


# -- progress -------------------------------------------------------------------------------------------------------------------


@contextmanager
def bar(console: Console, what: str, rounds: int, unit: str = "rounds") -> Iterator[Callable[[int], None]]:
    """A progress bar; call the yielded function with the number of finished rounds, or other units. It disappears at the end.

    It is drawn when a round ends, not continuously by a thread: the ranks need the cores. If the console is not a terminal,
    about ten lines are printed to standard error instead.
    """
    if not console.is_terminal:
        print(f"{what}: starting", file=sys.stderr, flush=True)
        yield lambda done: _line(what, done, rounds, unit)
        return
    progress = Progress(
        TextColumn(f"{what}: {{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with progress:
        task = progress.add_task("starting", total=rounds)
        progress.refresh()
        yield lambda done: progress.update(task, description=unit, completed=done, refresh=True)


def _line(what: str, done: int, rounds: int, unit: str) -> None:
    if done and done * 10 // rounds > (done - 1) * 10 // rounds:
        print(f"{what}: {done} of {rounds} {unit}", file=sys.stderr, flush=True)


def warn_if_crowded(ranks: int) -> None:
    """Warn early if there are more ranks than cores: the figures then take long, and mean little."""
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        print(
            f"benchmarks: {ranks} ranks share {cores} cores. Starting may take minutes, and times reflect the scheduler more "
            "than communication.",
            file=sys.stderr,
            flush=True,
        )
