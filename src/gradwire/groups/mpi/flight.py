"""`Flight`: the MPI requests of one operation on their way, with all the memory they read and write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gradwire.groups.mpi.runtime import MPI


class Flight:
    """One or several requests that are over together. Tested under the runtime's lock only."""

    __slots__ = ("cancelable", "done", "error", "keep", "on_done", "posted", "requests", "status")

    def __init__(self, requests: Sequence[Any], keep: object, *, status: Any = None) -> None:
        self.requests = list(requests)
        self.keep: object = keep
        self.status = status
        """For a receive: who sent, and how much."""
        self.cancelable = status is not None
        self.posted = time.perf_counter()
        self.done = False
        self.error: Exception | None = None
        self.on_done: Callable[[Flight], None] | None = None

    def test(self, mpi: MPI) -> bool:
        """Whether it is over, well or badly. Also lets MPI make progress."""
        if self.done:
            return True
        try:
            if len(self.requests) == 1:
                self.done = self.requests[0].Test(self.status)
            else:
                self.done = mpi.Request.Testall(self.requests)
        except mpi.Exception as error:
            self.error = error
            self.done = True
        return self.done

    def cancel(self, mpi: MPI) -> bool:
        """Take a receive back that nobody has sent for. Other requests cannot be taken back. Whether it is over."""
        if self.cancelable and not self.test(mpi):
            self.requests[0].Cancel()
        return self.test(mpi)

    def land(self) -> None:
        """Tell its owner that it is over; not under the lock."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self)

    @property
    def age(self) -> float:
        """Seconds since it was posted."""
        return time.perf_counter() - self.posted
