"""`RankPool`: starts workers, reuses them, runs one call after another on them, and ends them.

Note [The two ends of a job]
A worker answers with a result or an error, and closes its group after a message that all ranks have answered (a failed rank closes
at once). So a rank that returns early does not look like one that left. Errors of closing, and leftovers, are sent later (`Ended`).
"""

from __future__ import annotations

import functools
import itertools
import os
import select
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import ClosedError, GroupError, InternalError, UsageTypeError
from gradwire.groups.store.private_store import PrivateStore
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.fork_server import ForkServer
from gradwire.testing.pool import protocol
from gradwire.testing.pool.process import WARM, LocalWorker, Spawn, WorkerHandle, default_server, ending


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
        job: Callable[[protocol.JobContext], object],
        n: int,
        *,
        timeout: float = 60.0,
        lost: Collection[int] = (),
        leftovers: protocol.LeftBehind = protocol.LeftBehind.RAISE,
        name: str = "ranks",
        on_report: Callable[[Any], object] = lambda progress: None,
    ) -> list[protocol.RankResult]:
        """Run `job(context)`, e.g. a `GroupJob`, on `n` ranks and return each rank's outcome.

        Each report of a rank goes to `on_report` and extends the timeout. Raises only for problems of the pool itself.
        """
        with self._turn():
            if not self._finalizer.alive:
                raise ClosedError(f"{self}: the pool is closed. Make a new one.")
            self._staff(n)
            name = f"{name}-{next(self._numbers)}"
            try:
                blob = protocol.ship(job, self._paths)
            except Exception as problem:
                raise UsageTypeError(
                    f"{job!r} cannot be sent to rank processes: {type(problem).__name__}: {problem}. "
                    "Create what cannot be pickled inside the function, on its rank, instead of passing it along."
                ) from problem
            workers = self._workers[:n]
            try:
                path = os.path.abspath(sys.path[0])  # the directory of the script, or of the notebook
                jobs = [protocol.RankJob(rank, n, name, timeout, blob, path) for rank in range(n)]
                return _Call(workers, lost, timeout, leftovers, on_report).finish(jobs)
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
        if not self._turns.acquire(timeout=protocol.TURN_LIMIT):
            raise GroupError(f"{self}: another call on this pool has not ended within {protocol.TURN_LIMIT:.0f} s.")
        try:
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
        with on_failure(self._discharge, fresh):
            for worker in self._start(n - len(self._workers), self._stores[0].name):
                fresh.append(worker)
                self._workers.append(worker)
            deadline = time.monotonic() + protocol.START_LIMIT
            for worker in fresh:
                self._paths = _greet(worker, self._workers.index(worker), deadline)

    def _start(self, count: int, store: str) -> Iterator[WorkerHandle]:
        """New workers, one by one; `store` is the name of their store."""
        for _ in range(count):
            spawn = self._spawn(len(self._workers))
            if self._server is not None and spawn.program == WARM and spawn.command is list:
                try:
                    yield LocalWorker(store, spawn, self._server)
                    continue
                except RuntimeError:
                    self._server = None  # a module that it imports has started a thread, which it reports
            yield LocalWorker(store, spawn)

    def _discharge(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.kill()
            worker.release()

    def close(self) -> None:
        """End all workers and wait for them. Closing twice is a no-op."""
        with self._turn():
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
    if worker.control in ready:
        with suppress(EOFError, OSError):
            paths: tuple[str, ...] = protocol.receive(worker.control)
            return paths
    status = worker.wait(1.0 if ready else 0.0)
    what = f"did not report within {protocol.START_LIMIT:.0f} s" if status is None else ending(status)
    raise GroupError(f"starting rank processes: that of rank {rank} {what}. Look at its output.")


def _dismiss(workers: list[WorkerHandle], stores: list[PrivateStore], server: ForkServer | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the owner must not end its workers
        return
    for worker in workers:
        worker.control.close()  # all at once, then wait for each
    deadline = time.monotonic() + protocol.ABORT_GRACE
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


# -- one call --------------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """Sends jobs to the workers, receives their answers, stops the others when one fails. Each report extends the deadline."""

    _workers: Sequence[WorkerHandle]
    _lost: Collection[int]
    _timeout: float
    _leftovers: protocol.LeftBehind
    _on_report: Callable[[Any], object]
    _outcomes: dict[int, protocol.RankResult] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _failing = False

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def finish(self, jobs: Sequence[protocol.RankJob]) -> list[protocol.RankResult]:
        """Send the jobs and return each rank's outcome, when all have ended."""
        with selectors.DefaultSelector() as self._selector:
            for rank, worker in enumerate(self._workers):
                self._selector.register(worker.control, selectors.EVENT_READ, (self._receive, rank))
                self._selector.register(worker.alive, selectors.EVENT_READ, (self._process_ended, rank))
                self._send(rank, jobs[rank])
            self._handle_until(self._outcomes, "")
            self._deadline = time.monotonic() + protocol.CLOSE_LIMIT
            for rank in range(len(self._workers)):
                self._send(rank, protocol.Finish())
            what = f"(it had not closed its group {protocol.CLOSE_LIMIT:.0f} s after all ranks had answered)\n"
            self._handle_until(self._ended, what)
        return [self._outcomes[rank] for rank in range(len(self._workers))]

    def _handle_until(self, done: Collection[int], what: str) -> None:
        """Handle messages until every rank is in `done`. At the deadline get the stacks of those that are not, and end them."""
        while len(done) < len(self._workers):
            remaining = self._deadline - time.monotonic()
            ready = self._selector.select(max(0.0, remaining))
            for key, _ in ready:
                handle, rank = key.data
                handle(rank)
            if not ready and remaining <= 0:
                break
        late = [rank for rank in range(len(self._workers)) if rank not in done]
        for rank in late:
            self._workers[rank].ask_stack()
        stacks = [self._workers[rank].stack(limit=2.0) for rank in late]
        for rank, stack in zip(late, stacks, strict=True):
            worker = self._workers[rank]
            self._forget(worker.control, worker.alive)
            worker.kill()
            self._end(rank, protocol.Fate.STUCK, what + stack)

    def _send(self, rank: int, message: object) -> None:
        if rank not in self._ended:
            with suppress(OSError):  # a worker that is gone is reported by its process descriptor
                protocol.send(self._workers[rank].control, message)

    def _receive(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            message = protocol.receive(worker.control)
        except (EOFError, OSError):
            self._forget(worker.control)
            return
        if isinstance(message, protocol.Answer):
            self._note(protocol.unpack(rank, message))
        elif isinstance(message, protocol.ProgressReport):
            if not self._failing:
                self._deadline = time.monotonic() + self._timeout
            self._on_report(message.progress)
        elif isinstance(message, protocol.Ended):
            self._ended.add(rank)
            worker.spoilt = bool(message.left)
            self._review(rank, message)

    def _review(self, rank: int, ended: protocol.Ended) -> None:
        """Errors of closing, and leftovers, are failures too: notes of the function's own error, if there is one."""
        outcome = self._outcomes[rank]
        later = [] if ended.error is None else [protocol.unpack(rank, ended.error)]
        if ended.left and self._leftovers is protocol.LeftBehind.RAISE:
            problem = InternalError(
                f"rank {rank} left behind, {protocol.LEFTOVER_GRACE:.0f} s after its group was closed: {'; '.join(ended.left)}. "
                "End and close what the rank's function, or the group under test, has started and opened.",
                story=ended.left,
            )
            later.append(protocol.RankResult(rank, protocol.Fate.RAISED, error=problem))
        for failure in later:
            if outcome.error is None:
                outcome = failure
            else:
                outcome.error.add_note(f"and then: {type(failure.error).__name__}: {failure.error}")
        self._note(outcome)

    def _process_ended(self, rank: int) -> None:
        worker = self._workers[rank]
        while worker.control in self._selector.get_map() and select.select([worker.control], [], [], 0)[0]:
            self._receive(rank)  # what it sent before it died
        self._forget(worker.control, worker.alive)
        if rank not in self._ended:
            how = ending(worker.wait(protocol.MESSAGE_LIMIT))
            self._end(rank, protocol.Fate.DIED, f"its process {worker.pid} {how}")

    def _forget(self, *sources: socket.socket | int) -> None:
        for source in sources:
            with suppress(KeyError):
                self._selector.unregister(source)

    def _end(self, rank: int, fate: protocol.Fate, detail: str) -> None:
        """The process of a rank has ended without a message. What it raised before counts more."""
        self._ended.add(rank)
        known = self._outcomes.get(rank)
        if known is None or known.fate is protocol.Fate.RETURNED:
            self._note(protocol.RankResult(rank, fate, detail=detail))

    def _note(self, outcome: protocol.RankResult) -> None:
        self._outcomes[outcome.rank] = outcome
        if self._failing or not outcome.failed(self._lost):
            return
        self._failing = True
        self._deadline = min(self._deadline, time.monotonic() + protocol.ABORT_GRACE)
        why = outcome.error or outcome.detail or outcome.fate.value
        for rank in range(len(self._workers)):
            if rank != outcome.rank:
                self._send(rank, protocol.Finish(f"rank {outcome.rank} failed: {why}"))
