"""Files that only this user can open: memory without a name in any directory, and whole files in a directory. Without torch.

Note [A file behind a process]
The file is a memfd. Others open it as `/proc/<pid>/fd/<number>` of the process that made it, which the kernel allows only to
processes of the same user; it lives until the last of them has exited. The name travels through places that another user may write
to. So it consists of numbers only, and the file is checked: a memfd of ours, with this inode, owned by this user, closed to others.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from gradwire.errors import GroupError, PrivateFileGone
from gradwire.runtime.cleanup import on_failure

PAGE = 4096
STORE = "gradwire-store"
_NAME = re.compile(r"(\d{1,10}):(\d{1,10}):(\d{1,20}):(\d{1,20})", re.ASCII)
_HINTS = {
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE), "Raise the limit on open files (ulimit -n), or close some before ranks meet."
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "The process belongs to another user, or cannot be inspected. The store is not used: start all ranks as one user.",
    ),
}
_REPLACED = "another file has taken its place. It is not used: restart all ranks."


def create(label: str = STORE) -> int:
    """The descriptor of a new file: one page of zeros. It is opened by its name and `label`, which states its purpose."""
    try:
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
    except OSError as error:
        raise GroupError(
            f"making a private store: {error.strerror}. {_HINTS.get(error.errno or 0, '')}".rstrip()
        ) from error
    with on_failure(os.close, fd):
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, PAGE)
    return fd


def name_of(fd: int) -> str:
    """The name by which other processes of this user open the file, while this process has it open."""
    status = os.fstat(fd)
    return f"{os.getpid()}:{fd}:{status.st_dev}:{status.st_ino}"


def is_name(text: str) -> bool:
    """Whether `text` has the form of a name."""
    return _NAME.fullmatch(text) is not None


def open_private(name: str, label: str = STORE) -> int:
    """A new descriptor of the file; raises if the file is not one of ours, or not this user's."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise GroupError(f"opening the private store {name[:80]!r}: not a valid name. Find out who changed it.")
    pid, number, device, inode = map(int, match.groups())
    what = f"opening the private store of process {pid} (descriptor {number})"
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _HINTS:
            raise GroupError(f"{what}: {error.strerror}. {_HINTS[error.errno]}") from error
        raise PrivateFileGone(
            f"{what}: there is no such process here, or it has closed the store ({error.strerror}). It has exited, or runs on "
            "another host or in another container. Look at its output; ranks declared to be on one host must see each other's "
            "processes."
        ) from error
    with on_failure(os.close, fd):
        status = check_identity(what, fd, device=device, inode=inode, error=PrivateFileGone)
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{label} (deleted)":
            raise PrivateFileGone(f"{what}: {_REPLACED}")
        if status.st_mode & 0o077:
            raise GroupError(
                f"{what}: other users can open it (mode {status.st_mode & 0o777:o}). It is not used: find out who changed that."
            )
    return fd


def check_identity(
    what: str, fd: int, *, device: int, inode: int, error: type[GroupError] = GroupError
) -> os.stat_result:
    """Raise unless the file behind `fd` belongs to this user and is the one that was announced: `error` if it is another file."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise GroupError(
            f"{what}: it belongs to user {status.st_uid}, this process runs as {os.geteuid()}. It is not used: another user has "
            "offered it, or ranks run as different users. Start all ranks as one user."
        )
    if (status.st_dev, status.st_ino) != (device, inode) or not stat.S_ISREG(status.st_mode):
        raise error(f"{what}: {_REPLACED}")
    return status


def write_private(path: str | Path, data: bytes) -> None:
    """Make `path` a file of mode 600 that contains `data`. Readers see all of it or none; a planted link is replaced, not followed.
    Raises OSError, PermissionError if the directory belongs to another user."""
    folder, name = os.path.split(path)
    directory = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the directory belongs to another user", folder)
        new = f".{name}.{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(new, flags, 0o600, dir_fd=directory)
        with on_failure(os.unlink, new, dir_fd=directory):
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(directory)


def read_private(path: str | Path, *, limit: int = 1 << 24) -> bytes:
    """At most `limit` bytes of a regular file that belongs to this user. Raises OSError for links and for other users' files."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "not a regular file of this user", str(path))
        return file.read(limit)
