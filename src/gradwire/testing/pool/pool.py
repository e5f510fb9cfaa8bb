"""`RankPool`: starts workers, reuses them, serializes calls, and ends them."""

from __future__ import annotations

import functools
import itertools
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gradwire.errors import ClosedError, GroupError, UsageTypeError
from gradwire.groups.store.private_store import PrivateStore
from gradwire.runtime.fork_server import ForkServer
from gradwire.testing.pool.pool_run import PoolRun
from gradwire.testing.pool.process import WARM, LocalWorker, Spawn, WorkerHandle, default_server, ending
from gradwire.testing.pool.protocol import (
    ABORT_GRACE,
    START_LIMIT,
    TURN_LIMIT,
    JobContext,
    LeftBehind,
    RankJob,
    RankResult,
    receive,
    ship,
)


class RankPool:
    """Rank processes, warm ones by default: `spawn(rank)` is how each is started. Warm ones are forks of `server`, if there is one.

    Workers are started when first needed, all missing ones at once, and end with `close()`, at interpreter exit, or when the pool
    is freed. Calls are serialized.
    """

    def __init__(
        self, spawn: Callable[[int], Spawn] = lambda rank: Spawn(), *, server: ForkServer | None = None
    ) -> None:
        self._spawn = spawn
        self._server = server
        self._turns = threading.Lock()
        self._numbers = itertools.count()
        self._workers: list[WorkerHandle] = []
        self._paths: tuple[str, ...] = ()
        self._stores: list[PrivateStore] = []
        """The store in which the groups of the workers meet, once there are any."""
        self._finalizer = weakref.finalize(self, _dismiss, self._workers, self._stores, server, os.getpid())

    @property
    def pids(self) -> list[int]:
        """The workers' process ids; ranks are assigned in this order."""
        return [worker.pid for worker in self._workers]

    def run(
        self,
        job: Callable[[JobContext], object],
        n: int,
        *,
        timeout: float = 60.0,
        lost: Collection[int] = (),
        leftovers: LeftBehind = LeftBehind.RAISE,
        name: str = "ranks",
        on_report: Callable[[Any], object] = lambda progress: None,
    ) -> list[RankResult]:
        """Run `job(context)`, e.g. a `GroupJob`, on `n` ranks and return each rank's outcome.

        Each report of a rank goes to `on_report` and extends the timeout. Raises only for problems of the pool itself.
        """
        with self._turn():
            self._staff(n)
            name = f"{name}-{next(self._numbers)}"
            try:
                blob = ship(job, self._paths)
            except Exception as problem:
                raise UsageTypeError(
                    f"{job!r} cannot be sent to rank processes: {type(problem).__name__}: {problem}. "
                    "Create what cannot be pickled inside the function, on its rank, instead of passing it along."
                ) from problem
            workers = self._workers[:n]
            try:
                path = os.path.abspath(sys.path[0])  # the directory of the script, or of the notebook
                jobs = [RankJob(rank, n, name, timeout, blob, path) for rank in range(n)]
                return PoolRun(workers, lost, timeout, leftovers, on_report).finish(jobs)
            except BaseException:  # Ctrl-C, a test's own timeout: the state of the workers is unknown
                for worker in workers:
                    worker.spoilt = True
                raise
            finally:
                self._discharge([worker for worker in workers if worker.spoilt or worker.wait(0) is not None])
                for store in self._stores:
                    store.delete([key for key in store.list_keys() if key.startswith(f"{name}/")])

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=TURN_LIMIT):
            raise GroupError(f"{self}: waited {TURN_LIMIT:.0f} s for the calls of other threads on this pool to end.")
        try:
            if not self._finalizer.alive:
                raise ClosedError(f"{self}: the pool is closed. Make a new one.")
            yield
        finally:
            self._turns.release()

    # -- starting and ending workers -----------------------------------------------------------------------------------

    def _staff(self, n: int) -> None:
        """Make sure that there are at least `n` workers."""
        if not self._stores:
            self._stores.append(PrivateStore.create())
        self._discharge([worker for worker in self._workers if worker.wait(0) is not None])
        fresh: list[WorkerHandle] = []
        try:
            for worker in self._start(n - len(self._workers), self._stores[0].name):
                fresh.append(worker)
                self._workers.append(worker)
            deadline = time.monotonic() + START_LIMIT
            for worker in fresh:
                self._paths = _greet(worker, self._workers.index(worker), deadline)
        except BaseException:
            self._discharge(fresh)
            raise

    def _start(self, count: int, store: str) -> Iterator[WorkerHandle]:
        """New workers, one by one; `store` is the name of their store."""
        for _ in range(count):
            spawn = self._spawn(len(self._workers))
            server = self._server if spawn.program == WARM and spawn.command is list else None
            try:
                worker = LocalWorker(store, spawn, server)
            except RuntimeError:
                if server is None:
                    raise
                self._server = None  # a module that it imports has started a thread, which it reports
                worker = LocalWorker(store, spawn)
            yield worker

    def _discharge(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.kill()
            worker.release()

    def close(self) -> None:
        """End all workers and wait for them. Closing twice is a no-op."""
        with suppress(ClosedError), self._turn():
            self._finalizer()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{len(self._workers)} workers" if self._finalizer.alive else "closed"
        return f"<RankPool, {state}>"

    # -- for Leftovers -------------------------------------------------------------------------------------------------

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` is one of the workers, or the server."""
        return pid in self.pids or (self._server is not None and self._server.keeps_process(pid))

    def keeps_descriptor(self, fd: int) -> bool:
        """Whether `fd` leads to a worker, to the store or to the server."""
        if self._server is not None and self._server.keeps_descriptor(fd):
            return True
        return any(fd in worker.descriptors for worker in self._workers) or any(s.holds(fd) for s in self._stores)


def _greet(worker: WorkerHandle, rank: int, deadline: float) -> tuple[str, ...]:
    """Wait until the new worker for `rank` has started; returns the paths that it imports from."""
    sources: list[Any] = [worker.control, worker.alive]
    ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
    try:
        if worker.control in ready:
            paths: tuple[str, ...] = receive(worker.control)
            return paths
    except (EOFError, OSError):
        pass
    status = worker.wait(1.0 if ready else 0.0)
    what = f"did not report within {START_LIMIT:.0f} s" if status is None else ending(status)
    raise GroupError(f"starting rank processes: that of rank {rank} {what}. Look at its output.")


def _dismiss(workers: list[WorkerHandle], stores: list[PrivateStore], server: ForkServer | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the owner must not end its workers
        return
    for worker in workers:
        worker.control.close()  # all at once, then wait for each
    deadline = time.monotonic() + ABORT_GRACE
    try:
        while workers:
            worker = workers.pop()
            if worker.wait(deadline - time.monotonic()) is None:
                worker.kill()
            worker.release()
    finally:
        while stores:
            stores.pop().close()
        if server is not None:
            server.close()


@functools.cache
def default_pool() -> RankPool:
    """The pool that `run_ranks` uses. It costs nothing until something is run on it."""
    return RankPool(server=default_server())
