"""A Work over MPI requests, which the caller itself tests while it waits."""

from __future__ import annotations

import time

from gradwire.collectives import Collective
from gradwire.groups.ledger import Ledger
from gradwire.groups.mpi.engine import Engine
from gradwire.groups.mpi.pending_requests import PendingRequests
from gradwire.groups.work import Work


class MPIWork(Work):
    """An operation that is one PendingRequests; one that is a program of several has none, and is settled by the lane."""

    def __init__(self, op: Collective, ledger: Ledger, *, seq: int, timeout: float) -> None:
        super().__init__(op, ledger, seq=seq, timeout=timeout)
        self._pending: tuple[Engine, PendingRequests] | None = None

    def watch(self, engine: Engine, pending: PendingRequests) -> None:
        """From now on, `pending` settles it."""
        self._pending = engine, pending
        if self.settled:
            self._pending = None

    def _settle(self, outcome: list[BaseException | None], source_rank: int | None) -> bool:
        self._pending = None  # a caller that keeps this Work must not keep the requests
        return super()._settle(outcome, source_rank)

    def is_completed(self) -> bool:
        """Whether it is over, done or failed."""
        watched = self._pending
        if watched is not None and not self.settled:
            engine, pending = watched
            engine.poll(pending)
        return self.settled

    def is_success(self) -> bool:
        """Whether it is over and the outputs hold the result."""
        return self.is_completed() and self._error is None

    def wait_settled(self, limit: float) -> bool:
        """As in Work, inside the engine."""
        until = time.perf_counter() + limit
        watched = self._pending
        if watched is not None:
            engine, pending = watched
            engine.wait(pending, until, lambda: self.settled)
        return super().wait_settled(max(0.0, until - time.perf_counter()))
