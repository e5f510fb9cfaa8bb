"""`Hub`: the one arbiter of a run. It keeps records that are set once, in memory and in a file, and serves them to members.

Note [The hub]
A record is a line of the file before it is a reply, so a hub that is killed and started again with the same file, at the same
address, has everything that it ever confirmed. Only changes of members need it. A request may be repeated when its reply was lost:
`compare_set` then returns the sender's own value. Beats and stores are in memory only: see Note [Leases] and `MeetingStores`.
Messages are JSON, and both sides prove that they know the key before the first one (`multiprocessing.connection`); each connection
has a thread, so one that stays silent keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from gradwire.elasticity.leases import Leases
from gradwire.errors import GroupError, UsageError
from gradwire.runtime.cleanup import on_failure

Address = tuple[str, int]
_HANDSHAKE = 5.0
"""Seconds that a client has to prove that it knows the key."""
_PAUSE, _LOOK = 0.05, 0.1
"""Seconds between two attempts to reach a hub, and between two looks at leases."""
_SILENCE = 2.0
"""Seconds after which a connection to a host that does not answer is broken: TCP itself waits as long again as the cut lasted."""
_LONGEST = 2**20
"""Bytes of a request."""


class Records:
    """Text by key, in a file that only grows. Only one process can have it open."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, str] = {}
        self._changes: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with on_failure(self.close):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._load(path)
        except BlockingIOError as error:
            raise UsageError(
                f"hub with {path}: another hub has the file open. End that one, or use another file."
            ) from error
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"hub with {path}: line {self.version + 1} is no record. Use the file of a hub, or a new one."
            ) from error

    def _load(self, path: Path) -> None:
        *lines, rest = path.read_bytes().split(b"\n")
        for line in lines:
            key, value = json.loads(line)
            self.values[key] = value
            self._changes.append((key, value))
        assert self._fd is not None
        self._size = os.fstat(self._fd).st_size - len(rest)
        os.ftruncate(self._fd, self._size)  # a hub that was killed while it wrote a line has not confirmed it

    @property
    def version(self) -> int:
        """How many changes there were: the same after a restart."""
        return len(self._changes)

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
            self._changes.append((key, value))
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
        """The version, and records that have changed since version `after` whose keys begin so, in this order; waits at most so
        long for a change. All of them if there never was such a version: the file has lost something since."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != after or self._fd is None, wait)
            since = after if 0 < after <= self.version else 0
            return self.version, {key: value for key, value in self._changes[since:] if key.startswith(prefix)}

    def close(self) -> None:
        with self._changed:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            self._changed.notify_all()


class MeetingStores:
    """The hub's side of `HubStore`. A store that a restart has lost is None: its members meet again in the next view."""

    def __init__(self) -> None:
        self._stores: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def use(self, name: str, verb: str, keys: list[str], value: str = "", expected: str | None = None) -> Any:
        """The value of the first key after it is set, if it was `expected`, or added to, once per `expected`; or those of all."""
        with self._lock:
            if verb == "make":
                self._stores = dict([*self._stores.items(), (name, {})][-4:])  # nobody uses those of earlier views
            store = self._stores.get(name)
            if store is None or verb not in ("set", "add"):
                return store if store is None else [store.get(key) for key in keys]
            before = store.get(keys[0], "")
            if verb == "add":
                once = f"{keys[0]} {expected}"
                if once not in store:
                    store[keys[0]] = store[once] = str(int(before or "0") + int(value))
                return store[once]
            if expected in (None, before):
                store[keys[0]] = value
            return store.get(keys[0], expected)


class Hub:
    """Serves records at an address, with port 0 at one that is free; or at a socket that listens already."""

    def __init__(self, path: str | Path, *, key: bytes, address: Address | socket.socket = ("127.0.0.1", 0)) -> None:
        self.records = Records(Path(path))
        self._key = key
        self._connections: set[Connection] = set()
        try:
            self._listener = address if isinstance(address, socket.socket) else socket.create_server(address)
        except OSError as error:
            self.records.close()
            where = ":".join(map(str, address)) if isinstance(address, tuple) else "a socket"
            raise UsageError(
                f"hub at {where}: {error.strerror}. Choose an address of this host that is free."
            ) from error
        self.address: Address = self._listener.getsockname()[:2]
        self._leases = Leases()
        self._verbs: dict[str, Callable[..., Any]] = {
            "compare_set": self.records.compare_set,
            "read": self.records.read,
            "beat": self._beat,
            "store": MeetingStores().use,
        }
        self._closing = threading.Event()
        loops = {f"gradwire-hub-{self.address[1]}": self._accept, "gradwire-hub-leases": self._check_leases}
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]
        for thread in reversed(self._threads):
            thread.start()

    def _beat(self, launcher: str, before: str = "", after: str = "here") -> None:
        self._leases.beat(launcher)
        self.records.compare_set(f"launcher/{launcher}", before, after)

    def _check_leases(self) -> None:
        while not self._closing.wait(_LOOK):
            launchers = self.records.read("launcher/")[1]
            here = [key.removeprefix("launcher/") for key, state in launchers.items() if state == "here"]
            for launcher, silent in self._leases.silent(here).items():
                with contextlib.suppress(OSError):  # the disk is full: at the next look
                    self.records.compare_set(f"silent/{launcher}", *(("", "silent") if silent else ("silent", "")))

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # closed
                time.sleep(_PAUSE)  # too many open files, or a client that has gone again
                continue
            connection = _connection(accepted)
            self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="gradwire-hub-member", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads: the client tries again
                self._connections.discard(connection)
                connection.close()
            self._threads = [t for t in (*self._threads, thread) if t.is_alive()]

    def _serve(self, connection: Connection) -> None:
        # Whatever a client does wrong ends its connection, and nothing else.
        with connection, contextlib.suppress(OSError, EOFError, ValueError, TypeError, KeyError, AuthenticationError):
            _prove(connection, self._key, first=True)
            while True:
                name, *arguments = json.loads(connection.recv_bytes(_LONGEST))
                reply: list[Any] | str
                try:
                    reply = [self._verbs[name](*arguments)]
                except OSError as error:  # it is not confirmed, and the client tries again
                    reply = str(error)
                connection.send_bytes(json.dumps(reply).encode())
        self._connections.discard(connection)

    def close(self, timeout: float = 5.0) -> None:
        """End all connections. The file keeps the records."""
        self._closing.set()
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
        self.key = key
        self._connection: Connection | None = None

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """As `Records.compare_set`."""
        return str(self.call("compare_set", key, expected, value))

    def read(self, prefix: str, after: int = -1, wait: float = 0.0) -> tuple[int, dict[str, str]]:
        """As `Records.read`."""
        version, records = self.call("read", prefix, after, wait, wait=wait)
        return version, records

    def call(self, *request: Any, wait: float = 0.0) -> Any:
        """A request, and its answer, with which the hub may wait for so long."""
        seconds = self.timeout + wait
        deadline, problem = time.monotonic() + seconds, "it does not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection = self._connect(left)
                connection.send_bytes(json.dumps(request).encode())
                if not connection.poll(left):
                    break
                reply = json.loads(connection.recv_bytes())
                if isinstance(reply, list):
                    return reply[0]
                problem = reply
                time.sleep(_PAUSE)
            except AuthenticationError as error:
                self.close()
                raise UsageError(
                    f"{request[0]} at {self}: the keys differ. Give this process the key of the hub."
                ) from error
            except (OSError, EOFError) as error:  # it may be started again
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                self.close()
                time.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
            except BaseException:  # of a signal's handler, say: the reply would be taken for that to the next request
                self.close()
                raise
        self.close()
        raise GroupError(
            f"{request[0]} at {self}: no answer in {seconds:.3g} s ({problem}). If training has begun, it goes on without the "
            "hub, but members cannot change. Start it again with its file, at the same address."
        )

    def _connect(self, seconds: float) -> Connection:
        if self._connection is None:
            connection = _connection(socket.create_connection(self.address, timeout=min(seconds, _SILENCE)))
            with on_failure(connection.close):
                _prove(connection, self.key, first=False, seconds=seconds)
            self._connection = connection
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __repr__(self) -> str:
        return f"the hub {self.address[0]}:{self.address[1]}"


def _connection(made: socket.socket) -> Connection:
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_USER_TIMEOUT": round(_SILENCE * 1000)}
    for name, value in options.items():
        made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(made.detach())


def _prove(connection: Connection, key: bytes, *, first: bool, seconds: float = _HANDSHAKE) -> None:
    """Both sides show that they know the key."""
    for prove in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
        prove(_Answering(connection, seconds), key)  # type: ignore[arg-type]  # what it waits for comes in one message


class _Answering:
    """A connection whose messages must come in time."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds
        self.send_bytes = connection.send_bytes

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
            raise TimeoutError("the other side has not shown that it knows the key")
        return self._connection.recv_bytes(maxlength)
