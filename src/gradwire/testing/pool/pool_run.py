"""One call on the workers.

Note [The two ends of a job]
A worker answers with a result or an error, and closes its group after a message that all ranks have answered (a rank that failed
closes at once). So a rank that returns early does not look like one that left. Errors of closing, and leftovers, are sent in a
second answer, `Ended`.
"""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from gradwire.errors import InternalError
from gradwire.testing.pool.process import WorkerHandle, ending
from gradwire.testing.pool.protocol import (
    ABORT_GRACE,
    CLOSE_LIMIT,
    LEFTOVER_GRACE,
    MESSAGE_LIMIT,
    Abort,
    Close,
    Ended,
    Fate,
    LeftBehind,
    Progress,
    Raised,
    RankJob,
    RankResult,
    Returned,
    receive,
    send,
)
from gradwire.testing.pool.shipping import load_result, unpack


class PoolRun:
    """Sends jobs to the workers, receives their answers, stops the others when one fails. Each report extends the deadline."""

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        lost: Collection[int],
        timeout: float,
        leftovers: LeftBehind,
        on_report: Callable[[Any], object],
    ) -> None:
        self._leftovers = leftovers
        self._on_report = on_report
        self._workers = workers
        self._ranks = range(len(workers))
        self._lost = lost
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._outcomes: dict[int, RankResult] = {}
        self._ended: set[int] = set()
        self._failing = False

    def finish(self, jobs: Sequence[RankJob]) -> list[RankResult]:
        """Send the jobs and return each rank's outcome, when all have ended."""
        with selectors.DefaultSelector() as self._selector:
            for rank, worker in enumerate(self._workers):
                self._selector.register(worker.control, selectors.EVENT_READ, (self._heard, rank))
                self._selector.register(worker.alive, selectors.EVENT_READ, (self._died, rank))
                self._tell(rank, jobs[rank])
            self._pump(self._outcomes)
            self._stop([rank for rank in self._ranks if rank not in self._outcomes], "")
            self._deadline = time.monotonic() + CLOSE_LIMIT
            for rank in self._ranks:
                self._tell(rank, Close())
            self._pump(self._ended)
            story = f"(it had not closed its group {CLOSE_LIMIT:.0f} s after all ranks had answered)\n"
            self._stop([rank for rank in self._ranks if rank not in self._ended], story)
        return [self._outcomes[rank] for rank in self._ranks]

    def _pump(self, done: Collection[int]) -> None:
        """Handle answers until every rank is in `done` or the deadline passes."""
        while len(done) < len(self._ranks):
            remaining = self._deadline - time.monotonic()
            ready = self._selector.select(max(0.0, remaining))
            if not ready and remaining <= 0:
                return
            for key, _ in ready:
                handle, rank = key.data
                handle(rank)

    def _tell(self, rank: int, message: object) -> None:
        if rank not in self._ended:
            with suppress(OSError):  # a worker that is gone is reported by its process descriptor
                send(self._workers[rank].control, message)

    def _heard(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            message = receive(worker.control)
        except (EOFError, OSError):
            self._forget(worker.control)
            return
        if isinstance(message, Raised):
            self._note(unpack(rank, message))
        elif isinstance(message, Returned):
            self._note(load_result(rank, message))
        elif isinstance(message, Progress):
            if not self._failing:
                self._deadline = time.monotonic() + self._timeout
            self._on_report(message.progress)
        elif isinstance(message, Ended):
            self._ended.add(rank)
            worker.spoilt = bool(message.left)
            self._review(rank, message)

    def _review(self, rank: int, ended: Ended) -> None:
        """Errors of closing, and leftovers, are failures too, after the function's own."""
        outcome = self._outcomes[rank]
        if ended.raised is not None:
            outcome = _also(outcome, unpack(rank, ended.raised))
        if ended.left and self._leftovers is LeftBehind.RAISE:
            problem = InternalError(
                f"rank {rank} left behind, {LEFTOVER_GRACE:.0f} s after its group was closed: {'; '.join(ended.left)}. "
                "End and close what the rank's function, or the group under test, has started and opened.",
                story=ended.left,
            )
            outcome = _also(outcome, RankResult(rank, Fate.RAISED, time.monotonic(), error=problem))
        self._note(outcome)

    def _died(self, rank: int) -> None:
        worker = self._workers[rank]
        while worker.control in self._selector.get_map() and select.select([worker.control], [], [], 0)[0]:
            self._heard(rank)  # what it sent before it died
        self._forget(worker.control, worker.alive)
        if rank in self._ended:
            return
        self._ended.add(rank)
        known = self._outcomes.get(rank)
        if known is None or known.fate is Fate.RETURNED:
            how = f"its process {worker.pid} {ending(worker.wait(MESSAGE_LIMIT))}"
            self._note(RankResult(rank, Fate.DIED, time.monotonic(), detail=how))

    def _forget(self, *sources: socket.socket | int) -> None:
        for source in sources:
            with suppress(KeyError):
                self._selector.unregister(source)

    def _note(self, outcome: RankResult) -> None:
        self._outcomes[outcome.rank] = outcome
        if self._failing or not outcome.failed(self._lost):
            return
        self._failing = True
        self._deadline = min(self._deadline, time.monotonic() + ABORT_GRACE)
        why = outcome.error or outcome.detail or outcome.fate.value
        for rank in self._ranks:
            if rank != outcome.rank:
                self._tell(rank, Abort(f"rank {outcome.rank} failed: {why}"))

    def _stop(self, ranks: Sequence[int], story: str) -> None:
        """The time of these ranks is up: get their stacks, then end them."""
        for rank in ranks:
            self._workers[rank].ask_stack()
        stacks = [self._workers[rank].stack(limit=2.0) for rank in ranks]
        for rank, stack in zip(ranks, stacks, strict=True):
            worker = self._workers[rank]
            self._forget(worker.control, worker.alive)
            worker.kill()
            self._ended.add(rank)
            known = self._outcomes.get(rank)
            if known is None or known.fate is Fate.RETURNED:
                self._note(RankResult(rank, Fate.STUCK, time.monotonic(), detail=story + stack))


def _also(outcome: RankResult, later: RankResult) -> RankResult:
    """Two failures of one rank: the first is kept, with a note about the second."""
    if outcome.error is None:
        return later
    outcome.error.add_note(f"and then: {type(later.error).__name__}: {later.error}")
    return outcome
