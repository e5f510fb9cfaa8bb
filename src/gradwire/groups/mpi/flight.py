"""`Flight`: the MPI requests of one operation on their way, with all the memory they read and write.

Note [Memory outlives the requests]
MPI writes through an address; it keeps nothing alive. So everything that a request may read or write is in its flight, and a flight
is dropped only when all of its requests are over: the engine holds those on their way, the runtime those that a closed group
leaves (Note [What never completes] in runtime.py). One request that ends badly does not end the others. And when a collective ends
badly, nobody knows what the library still has under way inside; such a flight is kept for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwire.groups.mpi.inbox import Inbox, Receive
from gradwire.groups.mpi.runtime import MPI


class Flight:
    """One or several requests that are over together. Tested under the runtime's lock only."""

    __slots__ = ("cancelable", "done", "error", "inbox", "keep", "kept", "on_done", "posted", "receives", "requests")

    def __init__(self, inbox: Inbox, keep: object, *, cancelable: bool = False) -> None:
        self.inbox = inbox
        self.keep: object = keep
        self.kept: list[Tensor] = []
        """Copies that were made for it."""
        self.requests: list[Any] = []
        self.receives: list[Receive] = []
        """All of them; `requests` has those whose message has come."""
        self.cancelable = cancelable
        """Whether it is a single receive."""
        self.posted = time.perf_counter()
        self.done = False
        self.error: Exception | None = None
        self.on_done: Callable[[Flight], None] | None = None

    def expect(self, receive: Receive) -> None:
        """Add a receive."""
        self.receives.append(receive)
        self.inbox.expect(receive)

    @property
    def misfit(self) -> Receive | None:
        """A receive whose message had another length than its place."""
        return next((receive for receive in self.receives if not receive.fits), None)

    @property
    def begun(self) -> bool:
        """Whether MPI has heard of it."""
        return bool(self.requests) or any(receive.request is not None for receive in self.receives)

    def test(self, mpi: MPI) -> bool:
        """Whether it is over, well or badly. Also lets MPI make progress."""
        if self.done:
            return True
        pending = self.requests
        if self.receives:
            if any(receive.waits for receive in self.receives):
                self.inbox.look()
            pending = pending + [receive.request for receive in self.receives if receive.request is not None]
        over = [self._over(request, mpi) for request in pending]
        for receive in self.receives:
            self.error = self.error or receive.error
            over.append(not receive.waits)
        self.done = all(over)
        return self.done

    def _over(self, request: Any, mpi: MPI) -> bool:
        try:
            return bool(request.Test())
        except mpi.Exception as error:
            self.error = self.error or error
            return True

    def take_back(self) -> None:
        """Expect no more messages than those that have come."""
        for receive in [receive for receive in self.receives if receive.waits]:
            self.inbox.forget(receive)
            self.receives.remove(receive)

    def cancel(self, mpi: MPI) -> bool:
        """Take a receive back that nobody has sent for. Other requests cannot be taken back. Whether it is over."""
        if self.cancelable and not self.test(mpi):
            self.take_back()
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
