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
    Answer,
    Ended,
    Fate,
    Finish,
    LeftBehind,
    ProgressReport,
    RankJob,
    RankResult,
    receive,
    send,
    unpack,
)


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
                self._selector.register(worker.control, selectors.EVENT_READ, (self._receive, rank))
                self._selector.register(worker.alive, selectors.EVENT_READ, (self._process_ended, rank))
                self._send(rank, jobs[rank])
            self._handle_until(self._outcomes, "")
            self._deadline = time.monotonic() + CLOSE_LIMIT
            for rank in range(len(self._workers)):
                self._send(rank, Finish())
            what = f"(it had not closed its group {CLOSE_LIMIT:.0f} s after all ranks had answered)\n"
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
            self._end(rank, Fate.STUCK, what + stack)

    def _send(self, rank: int, message: object) -> None:
        if rank not in self._ended:
            with suppress(OSError):  # a worker that is gone is reported by its process descriptor
                send(self._workers[rank].control, message)

    def _receive(self, rank: int) -> None:
        worker = self._workers[rank]
        try:
            message = receive(worker.control)
        except (EOFError, OSError):
            self._forget(worker.control)
            return
        if isinstance(message, Answer):
            self._note(unpack(rank, message))
        elif isinstance(message, ProgressReport):
            if not self._failing:
                self._deadline = time.monotonic() + self._timeout
            self._on_report(message.progress)
        elif isinstance(message, Ended):
            self._ended.add(rank)
            worker.spoilt = bool(message.left)
            self._review(rank, message)

    def _review(self, rank: int, ended: Ended) -> None:
        """Errors of closing, and leftovers, are failures too: notes of the function's own error, if there is one."""
        outcome = self._outcomes[rank]
        later = [] if ended.error is None else [unpack(rank, ended.error)]
        if ended.left and self._leftovers is LeftBehind.RAISE:
            problem = InternalError(
                f"rank {rank} left behind, {LEFTOVER_GRACE:.0f} s after its group was closed: {'; '.join(ended.left)}. "
                "End and close what the rank's function, or the group under test, has started and opened.",
                story=ended.left,
            )
            later.append(RankResult(rank, Fate.RAISED, time.monotonic(), error=problem))
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
            self._end(rank, Fate.DIED, f"its process {worker.pid} {ending(worker.wait(MESSAGE_LIMIT))}")

    def _forget(self, *sources: socket.socket | int) -> None:
        for source in sources:
            with suppress(KeyError):
                self._selector.unregister(source)

    def _end(self, rank: int, fate: Fate, detail: str) -> None:
        """The process of a rank has ended without a message. What it raised before counts more."""
        self._ended.add(rank)
        known = self._outcomes.get(rank)
        if known is None or known.fate is Fate.RETURNED:
            self._note(RankResult(rank, fate, time.monotonic(), detail=detail))

    def _note(self, outcome: RankResult) -> None:
        self._outcomes[outcome.rank] = outcome
        if self._failing or not outcome.failed(self._lost):
            return
        self._failing = True
        self._deadline = min(self._deadline, time.monotonic() + ABORT_GRACE)
        why = outcome.error or outcome.detail or outcome.fate.value
        for rank in range(len(self._workers)):
            if rank != outcome.rank:
                self._send(rank, Finish(f"rank {outcome.rank} failed: {why}"))
