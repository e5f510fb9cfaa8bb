"""Receives of point-to-point messages: `ReceiveMatcher` passes a receive to MPI only once its message has arrived.

Note [Why a message is matched before it is received]
A message may be larger than the buffer for it: a mistake, but one that must end in an error. Open MPI returns MPI_ERR_TRUNCATE, and
where it moves large messages by remote reads or writes (within a host above 4 KiB, over TCP above 64 KiB) it does so after it has
written the whole message, over whatever lies behind the buffer. So a receive is not posted. A matching probe looks for its
message: it returns the sender and the length, and reserves the message for this receive alone. What fits is received into its
place, straight from the sender's memory; what does not is received into other memory and dropped, so that its sender is done too.

Note [The order of receives]
MPI gives a message to the oldest receive that matches it by source and tag. So the oldest is probed first, and a younger one is
skipped while an older one still waits that could take its message.

MPI has not seen a receive whose message has not arrived: dropping it withdraws it, and it cannot write.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradwire.groups.mpi.runtime import MPI, Comm


class Receive:
    """One expected message."""

    __slots__ = ("discarded", "error", "length", "memory", "place", "request", "sender", "source", "tag")

    def __init__(self, place: Tensor, memory: Any, source: int, tag: int) -> None:
        self.place = place
        self.memory = memory
        """The tensor's memory as an MPI buffer. The tensor is kept here too, so the memory lives as long as this."""
        self.source = source
        self.tag = tag
        self.request: Any = None
        """Set when its message has arrived."""
        self.sender = source
        self.length = 0
        """Bytes of its message."""
        self.discarded: bytearray | None = None
        """Where a message of another length was received."""
        self.error: Exception | None = None
        """What MPI raised while it probed for the message or began to receive it."""

    @property
    def waiting(self) -> bool:
        """Whether its message may still arrive."""
        return self.request is None and self.error is None

    @property
    def fits(self) -> bool:
        """Whether the message that has arrived is as long as its place."""
        return self.discarded is None


class ReceiveMatcher:
    """The receives of one communicator that wait for their message, oldest first. Used under the runtime's lock."""

    def __init__(self, mpi: MPI, comm: Comm) -> None:
        self.comm = comm
        self._mpi = mpi
        self._status = mpi.Status()
        self._waiting: list[Receive] = []

    def add(self, receive: Receive) -> None:
        """Probe for its message from now on."""
        self._waiting.append(receive)

    def remove(self, receive: Receive) -> None:
        """Stop probing for its message."""
        if receive in self._waiting:
            self._waiting.remove(receive)

    def match(self) -> None:
        """Begin to receive every message that has arrived and has a receive. See Note [The order of receives]."""
        claimed: dict[int, set[int]] = {}
        for receive in list(self._waiting):
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
                self._waiting.remove(receive)

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
        if receive.source == any_rank and taken:
            sources = [rank for rank in range(self.comm.size) if rank not in taken]
        else:
            sources = [receive.source]
        for source in sources:
            message = self.comm.Improbe(source=source, tag=receive.tag, status=self._status)
            if message is not None:
                return message
        return None
