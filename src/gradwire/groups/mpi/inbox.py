"""`Inbox`: receives of one communicator, of which MPI hears when their message has come and fits.

Note [Why a message is matched before it is received]
A message may be larger than the room for it: a mistake, but one that must end in an error. Open MPI says MPI_ERR_TRUNCATE, and
where it moves large messages by remote reads or writes (within a host above 4 KiB, over TCP above 64 KiB) it says so when it has
written the whole message, over whatever lies behind the room. So a receive is not posted. Its message is looked for by a matching
probe, which tells who sent it and how long it is, and keeps it for this receive alone. What fits is received into its place,
straight from the sender's memory; what does not is received aside and thrown away, so that its sender is done too.

Note [The order of receives]
MPI gives a message to the oldest receive that it fits by source and tag. So the oldest is looked after first, and a younger one
is passed over while an older one still waits that could take its message.

A receive that no message has come for is nothing to MPI: it is taken back by forgetting it, and cannot write.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradwire.groups.mpi.runtime import MPI, Comm


class Receive:
    """One expected message."""

    __slots__ = ("aside", "error", "length", "memory", "place", "request", "sender", "source", "tag")

    def __init__(self, place: Tensor, memory: Any, source: int, tag: int) -> None:
        self.place = place
        self.memory = memory
        """The tensor's memory as MPI wants it told. The tensor is here too, so the memory is as long as this is."""
        self.source = source
        self.tag = tag
        self.request: Any = None
        """From the moment that its message has come."""
        self.sender = source
        self.length = 0
        """Bytes of its message."""
        self.aside: bytearray | None = None
        """Where a message went that does not fit."""
        self.error: Exception | None = None
        """What MPI said when it was to look for the message or to receive it."""

    @property
    def waits(self) -> bool:
        """Whether its message may still come."""
        return self.request is None and self.error is None

    @property
    def fits(self) -> bool:
        """Whether the message that has come is as long as its place."""
        return self.aside is None


class Inbox:
    """The receives of one communicator that wait for their message, oldest first. Used under the runtime's lock."""

    def __init__(self, mpi: MPI, comm: Comm) -> None:
        self.comm = comm
        self._mpi = mpi
        self._status = mpi.Status()
        self._waiting: list[Receive] = []

    def expect(self, receive: Receive) -> None:
        """Look for its message from now on."""
        self._waiting.append(receive)

    def forget(self, receive: Receive) -> None:
        """Do not look for its message any more."""
        if receive in self._waiting:
            self._waiting.remove(receive)

    def look(self) -> None:
        """Begin to receive every message that has come and is expected. See Note [The order of receives]."""
        claimed: dict[int, set[int]] = {}
        for receive in list(self._waiting):
            taken = claimed.setdefault(receive.tag, set())
            try:
                message = self._match(receive, taken)
                if message is not None:
                    self._begin(receive, message)
            except self._mpi.Exception as error:
                receive.error = error
            if receive.waits:
                taken.add(receive.source)
            else:
                self._waiting.remove(receive)

    def _begin(self, receive: Receive, message: Any) -> None:
        receive.sender = self._status.Get_source()
        receive.length = self._status.Get_elements(self._mpi.BYTE)
        if receive.length == receive.place.nbytes:
            receive.request = message.Irecv(receive.memory)
        else:
            receive.aside = bytearray(receive.length)
            receive.request = message.Irecv([receive.aside, self._mpi.BYTE])

    def _match(self, receive: Receive, taken: set[int]) -> Any:
        """The message for this receive, if it has come; not one that an older receive waits for."""
        anybody = self._mpi.ANY_SOURCE
        if receive.source in taken or anybody in taken:
            return None
        if receive.source == anybody and taken:
            sources = [rank for rank in range(self.comm.size) if rank not in taken]
        else:
            sources = [receive.source]
        for source in sources:
            message = self.comm.Improbe(source=source, tag=receive.tag, status=self._status)
            if message is not None:
                return message
        return None
