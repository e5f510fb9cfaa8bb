"""`Hub`: the one arbiter of a run. It keeps records that are set once, in memory and in a file, and serves them to members.

Note [The hub]
A record is a line of the file before it is a reply, so a hub that is killed and started again with the same file, at the same
address, has everything that it ever confirmed. Only changes of members need it. A request may be repeated when its reply was lost:
`compare_set` then returns the sender's own value. Messages are JSON, and both sides prove that they know the key before the first
one (`multiprocessing.connection`); each connection has a thread, so one that stays silent keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from gradwire.elastic.machine import HubState, Standing, View
from gradwire.errors import GroupError, UsageError

Address = tuple[str, int]
_HANDSHAKE = 5.0
"""Seconds that a client has to prove that it knows the key."""
_PAUSE = 0.05
"""Seconds between two attempts to reach a hub."""
_LONGEST = 2**20
"""Bytes of a request."""


class Records:
    """Text by key, in a file that only grows. Only one process can have it open."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, str] = {}
        self.version = 0
        """How many changes there were."""
        self._changed = threading.Condition()
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load(path)
        except BlockingIOError as error:
            self.close()
            raise UsageError(
                f"hub with {path}: another hub has the file open. End that one, or use another file."
            ) from error
        except (ValueError, TypeError) as error:
            self.close()
            raise UsageError(
                f"hub with {path}: line {self.version + 1} is no record. Use the file of a hub, or a new one."
            ) from error

    def _load(self, path: Path) -> None:
        *lines, rest = path.read_bytes().split(b"\n")
        for line in lines:
            key, value = json.loads(line)
            self.values[key] = value
            self.version += 1
        assert self._fd is not None
        self._size = os.fstat(self._fd).st_size - len(rest)
        os.ftruncate(self._fd, self._size)  # a hub that was killed while it wrote a line has not confirmed it

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set `key` if its value is `expected`, which is "" for a new one. Returns the value that it has now."""
        if not all(isinstance(text, str) for text in (key, expected, value)):
            raise TypeError("keys and values are text")
        with self._changed:
            now = self.values.get(key, "")
            if now != expected or now == value:
                return now
            self._append(json.dumps([key, value]).encode() + b"\n")
            self.values[key] = value
            self.version += 1
            self._changed.notify_all()
            return value

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            raise OSError("the hub is closed")
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError("the disk is full")
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def read(self, prefix: str, after: int = -1, wait: float = 0.0) -> tuple[int, dict[str, str]]:
        """All records whose keys begin so, and the version of the whole; waits at most so long for one later than `after`."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > after or self._fd is None, wait)
            return self.version, {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def close(self) -> None:
        with self._changed:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            self._changed.notify_all()


class Hub:
    """Serves records at an address; with port 0, at one that is free."""

    def __init__(self, path: str | Path, *, key: bytes, address: Address = ("127.0.0.1", 0)) -> None:
        self.records = Records(Path(path))
        self._key = key
        self._connections: set[Connection] = set()
        try:
            self._listener = socket.create_server(address)
        except OSError as error:
            self.records.close()
            where = f"{address[0]}:{address[1]}"
            raise UsageError(
                f"hub at {where}: {error.strerror}. Choose an address of this host that is free."
            ) from error
        self.address: Address = self._listener.getsockname()[:2]
        self._threads = [threading.Thread(target=self._accept, name=f"gradwire-hub-{self.address[1]}", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # closed
                time.sleep(_PAUSE)  # too many open files, or a client that has gone again
                continue
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(accepted.detach())
            self._connections.add(connection)
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            thread = threading.Thread(target=self._serve, args=(connection,), name="gradwire-hub-member", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: Connection) -> None:
        # Whatever a client does wrong ends its connection, and nothing else.
        with connection, contextlib.suppress(OSError, EOFError, ValueError, TypeError, KeyError, AuthenticationError):
            _prove(connection, self._key, first=True)
            while True:
                name, *arguments = json.loads(connection.recv_bytes(_LONGEST))
                verbs: dict[str, Callable[..., Any]] = {
                    "compare_set": self.records.compare_set,
                    "read": self.records.read,
                }
                connection.send_bytes(json.dumps(verbs[name](*arguments)).encode())
        self._connections.discard(connection)

    def close(self, timeout: float = 5.0) -> None:
        """End all connections. The file keeps the records."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(timeout)
        self.records.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout)


class HubClient:
    """A member's or a launcher's connection to the hub, made when it is first needed and again when it breaks. For one thread."""

    def __init__(self, address: Address, *, key: bytes, timeout: float = 60.0) -> None:
        self.address = address
        self.timeout = timeout
        """Seconds for which a call tries to reach the hub."""
        self._key = key
        self._connection: Connection | None = None

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """As `Records.compare_set`."""
        return str(self._call(self.timeout, "compare_set", key, expected, value))

    def read(self, prefix: str, after: int = -1, wait: float = 0.0) -> tuple[int, dict[str, str]]:
        """As `Records.read`."""
        version, records = self._call(self.timeout + wait, "read", prefix, after, wait)
        return version, records

    def _call(self, seconds: float, *request: Any) -> Any:
        deadline, problem = time.monotonic() + seconds, "it does not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection = self._connect(left)
                connection.send_bytes(json.dumps(request).encode())
                if not connection.poll(left):
                    break
                return json.loads(connection.recv_bytes())
            except AuthenticationError as error:
                self.close()
                raise UsageError(
                    f"{request[0]} at {self}: the keys differ. Give this process the key of the hub."
                ) from error
            except (OSError, EOFError) as error:  # it may be started again
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                self.close()
                time.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
        self.close()
        raise GroupError(
            f"{request[0]} at {self}: no answer in {seconds:.3g} s ({problem}). Training goes on without the hub, but members "
            "cannot change. Start it again with its file, at the same address."
        )

    def _connect(self, seconds: float) -> Connection:
        if self._connection is None:
            made = socket.create_connection(self.address, timeout=seconds)
            made.settimeout(None)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(made.detach())
            try:
                _prove(connection, self._key, first=False, seconds=seconds)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __repr__(self) -> str:
        return f"the hub {self.address[0]}:{self.address[1]}"


def _prove(connection: Connection, key: bytes, *, first: bool, seconds: float = _HANDSHAKE) -> None:
    """Both sides show that they know the key."""
    for challenge in (first, not first):
        if challenge:
            # What it waits for comes in one message, in answer to the challenge.
            deliver_challenge(_Answering(connection, seconds), key)  # type: ignore[arg-type]
        else:
            answer_challenge(_Answering(connection, seconds), key)  # type: ignore[arg-type]


class _Answering:
    """A connection whose messages must come in time."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds
        self.send_bytes = connection.send_bytes

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
            raise TimeoutError("the other side has not shown that it knows the key")
        return self._connection.recv_bytes(maxlength)


class RunRecords:
    """What members and launchers write into the hub and read from it: views, standings, the gone and the lobby."""

    def __init__(self, hub: HubClient | Records) -> None:
        self._hub = hub

    def publish(self, epoch: int, me: str, standing: Standing) -> None:
        self._hub.compare_set(f"standing/{epoch}/{me}", "", json.dumps(standing))

    def propose(self, view: View) -> View:
        """Record the view, unless there is one of its epoch: returns that which is recorded."""
        return _view(self._hub.compare_set(f"view/{view.epoch}", "", json.dumps(view)))

    def enter_lobby(self, me: str) -> None:
        self._hub.compare_set(f"lobby/{me}", "", "ready")

    def mark(self, member: str, *, gone: bool) -> None:
        """Its process has ended or its host cannot be reached; or, not `gone`, it can be reached again."""
        self._hub.compare_set(f"gone/{member}", "" if gone else "gone", "gone" if gone else "")

    def look(self, epoch: int, after: int = -1, wait: float = 0.0) -> tuple[int, HubState]:
        """What concerns the members of the view of this epoch; waits at most so long for anything later than version `after`."""
        version, records = self._hub.read("", after, wait)
        views = dict(_views(records))
        taken = {member for view in views.values() for member in view.members}
        standings = {key: Standing(*json.loads(value)) for key, value in _under(f"standing/{epoch}/", records)}
        gone = frozenset(key for key, value in _under("gone/", records) if value)
        lobby = tuple(key for key, _ in _under("lobby/", records) if key not in taken)
        return version, HubState(standings, gone, lobby, views.get(epoch + 1))

    def last_view(self) -> View | None:
        """The view of the latest epoch, for a process that has none."""
        views = dict(_views(self._hub.read("view/")[1]))
        return views[max(views)] if views else None


def _under(prefix: str, records: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((key[len(prefix) :], value) for key, value in records.items() if key.startswith(prefix))


def _view(text: str) -> View:
    epoch, members, step, fresh = json.loads(text)
    return View(epoch, tuple(members), step, tuple(fresh))


def _views(records: dict[str, str]) -> Iterator[tuple[int, View]]:
    return ((int(epoch), _view(text)) for epoch, text in _under("view/", records))
