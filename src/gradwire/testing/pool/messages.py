"""The messages between the pool and its workers, and how they are sent over a socket."""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker: I have started, and import from these paths."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Parent: be this rank. `blob` holds a function of a `JobContext`, which may import from `path` too."""

    rank: int
    size: int
    name: str
    timeout: float
    blob: bytes
    path: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent: another rank has failed; stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Parent: all ranks have answered; close your group."""


@dataclass(frozen=True, slots=True)
class Report:
    """Worker: progress."""

    progress: Any


@dataclass(frozen=True, slots=True)
class Returned:
    """Worker: the function returned this."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Worker: this was raised, with this traceback."""

    when: float
    blob: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Worker: my group is closed. With what closing it raised, and the leftovers."""

    raised: Raised | None
    left: tuple[str, ...]


def send(sock: socket.socket, message: object) -> None:
    """Write one message."""
    data = pickle.dumps(message)
    sock.sendall(len(data).to_bytes(8, "little") + data)


def receive(sock: socket.socket) -> Any:
    """Read one message; EOFError or OSError when the other side is gone."""
    return pickle.loads(_exactly(sock, int.from_bytes(_exactly(sock, 8), "little")))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = sock.recv_into(view[done:])
        if not got:
            raise EOFError("the other side has closed the connection")
        done += got
    return data
