"""The segment: one file of shared memory per group, mapped by all its ranks, that leaves nothing behind.

Note [A file without a name]
A file with a name stays when its makers are killed before they can unlink it. So the segment has none: `O_TMPFILE` makes a file
that is in no directory, with mode 0600, and the other ranks open it through `/proc/<pid>/fd/<number>`, which the kernel allows to
processes of the same user, and check its inode, owner and size. When the last process has gone, however it went, the kernel frees
the memory. Where there is no `O_TMPFILE`, the file is made with a random name and loses it in the next call.

Note [Room without memory]
The file is made as large as the group could ever need, and mapped once: address space, not memory. Memory is allocated by
`posix_fallocate`, range by range, when the heap grows; it either succeeds for the whole range or returns ENOSPC. Without it the
first touch of a page that the file system cannot provide would be a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import tempfile
from dataclasses import dataclass

from gradwire.errors import GroupError, SharedMemoryFull, UsageError
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.private_file import check_identity

PAGE = 4096
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_SMALLEST_ROOM = 1 << 30


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a rank needs to find the segment, and to know that it is the right one."""

    path: str
    inode: int
    device: int
    token: str
    """Random: identifies the group in records."""
    nbytes: int
    ranks: int
    host: str


class Segment:
    """A mapped segment. The mapping lives as long as anything points into it; `close` only lets go of the descriptor."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `fd`, and owns it from then on."""
        self.fd = fd
        self.nbytes = nbytes
        self._closed = False
        with on_failure(self.close):
            self.memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @classmethod
    def create(cls, *, ranks: int, nbytes: int, directory: str, host: str) -> tuple[Segment, Ticket]:
        """A new segment with room for `nbytes` (less where address space is short, but not much less than needed)."""
        fd = _open_new(directory)
        try:
            segment = cls._map_new(fd, nbytes)
        except OSError as error:
            raise GroupError(
                f"shared memory for {ranks} ranks: cannot map {nbytes / 2**20:,.1f} MiB of {directory}: {error.strerror}. "
                "Raise the limits on address space and file size (ulimit -v, ulimit -f), or use another group."
            ) from error
        finally:
            os.close(fd)
        status = os.fstat(segment.fd)
        path = f"/proc/{os.getpid()}/fd/{segment.fd}"
        token = secrets.token_hex(16)
        return segment, Ticket(path, status.st_ino, status.st_dev, token, segment.nbytes, ranks, host)

    @classmethod
    def _map_new(cls, fd: int, nbytes: int) -> Segment:
        while True:
            try:
                os.ftruncate(fd, nbytes)
                return cls(os.dup(fd), nbytes)
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.EFBIG) or nbytes // 2 < _SMALLEST_ROOM:
                    raise
                nbytes //= 2

    @classmethod
    def join(cls, ticket: Ticket) -> Segment:
        """The segment that `ticket` describes; refused with the reason if it is not that one."""
        what = f"shared memory of {ticket.ranks} ranks ({ticket.path})"
        try:
            fd = os.open(ticket.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise GroupError(
                f"{what}: cannot be opened: {error.strerror}. The rank that made it has ended, or runs as another user or in "
                "another container. Look at rank 0's output; ranks that share memory must be one user's, on one host."
            ) from error
        try:
            status = check_identity(what, fd, device=ticket.device, inode=ticket.inode)
            if status.st_size != ticket.nbytes:
                raise GroupError(
                    f"{what}: has {status.st_size} bytes where {ticket.nbytes} were announced. It is not used: another process has "
                    "written to it. Restart all ranks."
                )
            return cls(os.dup(fd), ticket.nbytes)
        except OSError as error:
            advice = "Raise the limit on address space (ulimit -v)."
            raise GroupError(f"{what}: cannot be mapped: {error.strerror}. {advice}") from error
        finally:
            os.close(fd)

    def reserve(self, offset: int, nbytes: int, *, what: str) -> None:
        """Get memory for a range, or raise GroupError saying how much was asked for and what is free."""
        start = offset // PAGE * PAGE
        try:
            os.posix_fallocate(self.fd, start, offset + nbytes - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                raise
            asked, free = f"{nbytes / 2**20:,.1f} MiB", f"{self.free / 2**20:,.1f} MiB"
            raise SharedMemoryFull(
                f"shared memory: no room for {asked} ({what}): {error.strerror}; {free} are free where the segment lies. Make "
                "/dev/shm larger (docker run --shm-size=...; mount -o remount,size=... /dev/shm), or give directory= on a larger "
                "tmpfs to gw.init() or SharedMemoryGroup, or GRADWIRE_SHM_DIRECTORY in the environment."
            ) from error

    @property
    def free(self) -> int:
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)
            self.fd = -1  # the number may be another file's from now on


def _open_new(directory: str) -> int:
    """A new file of mode 0600: see Note [A file without a name]."""
    flags, name = os.O_RDWR | os.O_CLOEXEC, os.path.join(directory, f"gradwire-{secrets.token_hex(16)}")
    try:
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(name)
        return fd
    except OSError as error:
        advice = "Give a directory= that exists and may be written, on a tmpfs."
        raise UsageError(f"shared memory in {directory!r}: {error.strerror}. {advice}") from error


def default_directory() -> str:
    """Where shared memory lies: /dev/shm where there is one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
