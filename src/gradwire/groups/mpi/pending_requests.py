"""`PendingRequests`: the MPI requests of one operation under way, with all the memory they read and write.

Note [Memory outlives the requests]
MPI writes through an address; it keeps nothing alive. So a PendingRequests holds everything that its requests may read or write,
and is dropped only when all of them are over: the engine holds those under way, the runtime those that a closed group leaves (Note
[What never completes] in runtime.py). One request that fails does not end the others. And when a collective fails, there is no
way to know what the library still has under way inside; its PendingRequests is kept for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwire.groups.mpi.receive_matcher import Receive, ReceiveMatcher
from gradwire.groups.mpi.runtime import MPI


class PendingRequests:
    """One or several requests that make one operation. Tested only under the runtime's lock."""

    __slots__ = ("cancelable", "done", "error", "keep", "kept", "matcher", "on_done", "posted", "receives", "requests")

    def __init__(self, matcher: ReceiveMatcher, keep: object, *, cancelable: bool = False) -> None:
        self.matcher = matcher
        self.keep: object = keep
        self.kept: list[Tensor] = []
        """Copies that were made for it."""
        self.requests: list[Any] = []
        self.receives: list[Receive] = []
        """Those whose message has arrived have a request of their own."""
        self.cancelable = cancelable
        """Whether it is a single receive."""
        self.posted = time.perf_counter()
        self.done = False
        self.error: Exception | None = None
        self.on_done: Callable[[PendingRequests], None] | None = None

    def add_receive(self, receive: Receive) -> None:
        """Add a receive."""
        self.receives.append(receive)
        self.matcher.add(receive)

    @property
    def mismatched(self) -> Receive | None:
        """A receive whose message had another length than its place."""
        return next((receive for receive in self.receives if not receive.fits), None)

    def test(self, mpi: MPI) -> bool:
        """Whether it is over, done or failed. Also lets MPI make progress."""
        if self.done:
            return True
        pending = self.requests
        if self.receives:
            if any(receive.waiting for receive in self.receives):
                self.matcher.match()
            pending = pending + [receive.request for receive in self.receives if receive.request is not None]
        over = [self._over(request, mpi) for request in pending]
        for receive in self.receives:
            self.error = self.error or receive.error
            over.append(not receive.waiting)
        self.done = all(over)
        return self.done

    def _over(self, request: Any, mpi: MPI) -> bool:
        try:
            return bool(request.Test())
        except mpi.Exception as error:
            self.error = self.error or error
            return True

    def withdraw(self) -> None:
        """Drop the receives whose message has not arrived."""
        for receive in [receive for receive in self.receives if receive.waiting]:
            self.matcher.remove(receive)
            self.receives.remove(receive)

    def cancel(self, mpi: MPI) -> bool:
        """Withdraw a receive whose message has not arrived. Other requests cannot be withdrawn. True if it is over."""
        if self.cancelable and not self.test(mpi):
            self.withdraw()
        return self.test(mpi)

    def notify(self) -> None:
        """Call `on_done`; not under the lock."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self)

    @property
    def age(self) -> float:
        """Seconds since it was posted."""
        return time.perf_counter() - self.posted
