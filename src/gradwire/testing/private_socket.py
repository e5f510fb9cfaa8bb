"""Unix sockets between processes of one user.

What is received over them is unpickled, which can run any code. So no other user may connect: the socket is in a directory that
only this user can enter, and both ends ask the kernel for the other's user (SO_PEERCRED) before they read a byte. Names in Linux's
abstract namespace are not used: they have no permissions, and /proc/net/unix lists them for all users.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.errors import GroupError

_NAME = "socket"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class PrivateListener:
    """A listening socket in `folder`, for processes of this user only.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, PrivateListener(folder, backlog=1) as listener:
    ...     with connect(folder, timeout=5.0) as client:
    ...         accepted = listener.accept()
    ...         assert accepted is not None
    ...         accepted[1] == os.getpid(), accepted[0].close()
    (True, None)
    """

    def __init__(self, folder: str | os.PathLike[str], *, backlog: int) -> None:
        mode = os.stat(folder).st_mode
        if mode & 0o077:
            raise GroupError(
                f"listening in {folder}: other users can enter it (mode {mode & 0o777:o}). Use a directory of mode 700."
            )
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            with _short_path(folder) as path:
                self.socket.bind(path)
            self.socket.listen(backlog)
        except BaseException:
            self.socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor, for `select`; -1 once closed."""
        return self.socket.fileno()

    def accept(self) -> tuple[socket.socket, int] | None:
        """The next connection and the process that made it; None, with nothing read, if it is another user's."""
        connection, _ = self.socket.accept()
        pid, user = _peer(connection)
        if user == os.geteuid():
            return connection, pid
        connection.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()

    def __enter__(self) -> PrivateListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(folder: str | os.PathLike[str], *, timeout: float) -> socket.socket:
    """A connection to this user's listener in `folder`."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        with _short_path(folder) as path:
            connection.connect(path)
        pid, user = _peer(connection)
        if user != os.geteuid():
            raise GroupError(
                f"connecting to the socket in {folder}: process {pid} of user {user} listens there, but this is user "
                f"{os.geteuid()}. Find out who started it."
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


@contextmanager
def _short_path(folder: str | os.PathLike[str]) -> Iterator[str]:
    """The socket in `folder`, through a descriptor: a socket's address is limited to 107 bytes, a TMPDIR may be longer."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_NAME}"
    finally:
        os.close(fd)
