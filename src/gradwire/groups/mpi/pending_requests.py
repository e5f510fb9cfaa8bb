"""`PendingRequests`: the MPI requests of one operation under way, with all the memory they read and write; and its receives.

Note [Memory outlives the requests]
MPI writes through an address; it keeps nothing alive. So a PendingRequests holds everything that its requests may read or write,
and is dropped only when all of them are over: the engine holds those under way, the runtime those that a closed group leaves (Note
[What never completes] in runtime.py). If one fails, there is no way to know what MPI still has under way: it is kept for good.

Note [Why a message is matched before it is received]
A message may be larger than its buffer, by mistake. Open MPI may then write all of it, over whatever lies behind the buffer, before
it returns MPI_ERR_TRUNCATE. So a receive is not posted. A matching probe returns the sender and the length of its message, and
reserves it for this receive. What does not fit is received into other memory and dropped, so that its sender is done too. A receive
whose message has not arrived is unknown to MPI: dropping it withdraws it.

Note [The order of receives]
MPI gives a message to the oldest receive that matches it by source and tag. So the oldest is probed first, and a younger one is
skipped while an older one still waits that could take its message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.groups.mpi.runtime import MPI, Comm


@dataclass(slots=True, eq=False)
class Receive:
    """One expected message."""

    place: Tensor
    memory: Any
    """The tensor's memory as an MPI buffer. The tensor is kept here too, so the memory lives as long as this."""
    source: int
    tag: int
    request: Any = None
    """Set when its message has arrived."""
    sender: int = -1
    length: int = 0
    """Bytes of its message."""
    discarded: bytearray | None = None
    """Where a message of another length was received."""
    error: Exception | None = None
    """What MPI raised while it probed for the message or began to receive it."""

    @property
    def waiting(self) -> bool:
        return self.request is None and self.error is None


class ReceiveMatcher:
    """Passes a receive to MPI once its message has arrived. Used under the runtime's lock."""

    def __init__(self, mpi: MPI, comm: Comm) -> None:
        self.comm = comm
        self.waiting: list[Receive] = []
        """The receives of the communicator that wait for their message, oldest first."""
        self._mpi = mpi
        self._status = mpi.Status()

    def match(self) -> None:
        """Begin to receive every message that has arrived and has a receive. See Note [The order of receives]."""
        claimed: dict[int, set[int]] = {}
        for receive in list(self.waiting):
            taken = claimed.setdefault(receive.tag, set())
            try:
                message = self._probe(receive, taken)
                if message is not None:
                    self._begin(receive, message)
            except self._mpi.Exception as error:
                receive.error = error
            if receive.waiting:
                taken.add(receive.source)
            else:
                self.waiting.remove(receive)

    def _begin(self, receive: Receive, message: Any) -> None:
        receive.sender = self._status.Get_source()
        receive.length = self._status.Get_elements(self._mpi.BYTE)
        if receive.length == receive.place.nbytes:
            receive.request = message.Irecv(receive.memory)
        else:
            receive.discarded = bytearray(receive.length)
            receive.request = message.Irecv([receive.discarded, self._mpi.BYTE])

    def _probe(self, receive: Receive, taken: set[int]) -> Any:
        """The message for this receive, if it has arrived; not one that an older receive waits for."""
        any_rank = self._mpi.ANY_SOURCE
        if receive.source in taken or any_rank in taken:
            return None
        sources = [receive.source]
        if receive.source == any_rank and taken:
            sources = [rank for rank in range(self.comm.size) if rank not in taken]
        for source in sources:
            message = self.comm.Improbe(source=source, tag=receive.tag, status=self._status)
            if message is not None:
                return message
        return None


@dataclass(slots=True, eq=False)
class PendingRequests:
    """One or several requests that make one operation. Tested only under the runtime's lock."""

    matcher: ReceiveMatcher
    op: Collective
    kept: list[Tensor] = field(default_factory=list)
    """Copies that were made for it."""
    requests: list[Any] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    """Those whose message has arrived have a request of their own."""
    posted: float = field(default_factory=time.perf_counter)
    done: bool = False
    error: Exception | None = None
    on_done: Callable[[PendingRequests], None] | None = None

    def add_receive(self, receive: Receive) -> None:
        self.receives.append(receive)
        self.matcher.waiting.append(receive)

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
            self.matcher.waiting.remove(receive)
            self.receives.remove(receive)

    def cancel(self, mpi: MPI) -> bool:
        """Withdraw a receive whose message has not arrived. Other requests cannot be withdrawn. True if it is over."""
        if self.op.kind is OpKind.RECV and not self.test(mpi):
            self.withdraw()
        return self.test(mpi)

    def notify(self) -> None:
        """Call `on_done`; not under the lock."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self)
