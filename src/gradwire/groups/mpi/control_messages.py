"""Small control messages between the ranks of a group: how many collectives a rank has joined, that it aborts, that it leaves.

A receive from any rank is always posted; sending never waits. All under the runtime's lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gradwire.groups.mpi.runtime import MPI, Comm

_ROOM = 2048
_LONGEST = _ROOM // 8
"""Characters of text in a message: each may take six bytes."""

Message = Mapping[str, Any]


class ControlMessages:
    """What one rank sends and receives in one communicator."""

    def __init__(self, mpi: MPI, comm: Comm, tag: int) -> None:
        self._mpi = mpi
        self._comm = comm
        self._tag = tag
        self._room = bytearray(_ROOM)
        self._status = mpi.Status()
        self._receive: Any = None
        self._sends: list[tuple[Any, bytes]] = []
        self._post_receive()

    def _post_receive(self) -> None:
        self._receive = self._comm.Irecv([self._room, self._mpi.BYTE], source=self._mpi.ANY_SOURCE, tag=self._tag)

    def send(self, rank: int, **message: Any) -> None:
        """Send `message` to `rank`."""
        short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in message.items()}
        data = json.dumps(short).encode()
        request = self._comm.Isend([data, len(data), self._mpi.BYTE], dest=rank, tag=self._tag)
        if not request.Test():
            self._sends.append((request, data))

    def receive(self) -> Iterator[tuple[int, Message]]:
        """The messages that have arrived: (source, message)."""
        while self._receive is not None and self._receive.Test(self._status):
            data = bytes(self._room[: self._status.Get_count(self._mpi.BYTE)])
            source = self._status.Get_source()
            self._post_receive()
            yield source, json.loads(data)
        for sending in list(self._sends):  # in place: a signal handler may send in between
            if sending[0].Test():
                self._sends.remove(sending)

    @property
    def sent(self) -> bool:
        """Whether all sends are over."""
        return not self._sends

    def close(self) -> None:
        """Receive no more."""
        if self._receive is not None:
            self._receive.Cancel()
            self._receive.Wait()
            self._receive = None
