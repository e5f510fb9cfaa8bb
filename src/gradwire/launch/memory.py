"""The location and maximum size of shared memory, from the caller or the environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.errors import UsageError

DIRECTORY, ROOM = "GRADWIRE_SHM_DIRECTORY", "GRADWIRE_SHM_ROOM"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Options of the groups that share memory; None leaves the choice to the group."""

    directory: str | None = None
    room: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], *, directory: str | None = None, room: int | None = None) -> SharedMemory:
        """What the caller gave, or else the environment.

        >>> SharedMemory.read({"GRADWIRE_SHM_ROOM": "2G"}, directory="/mnt/shm")
        SharedMemory(directory='/mnt/shm', room=2147483648)
        """
        text = environ.get(ROOM, "")
        return cls(directory or environ.get(DIRECTORY) or None, _bytes(text) if room is None and text else room)

    @property
    def options(self) -> dict[str, Any]:
        """As keyword arguments of SharedMemoryGroup."""
        return {"directory": self.directory, "room": self.room}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(iB|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{ROOM} is {text!r}, not a number of bytes. Write a number, or a number with K, M, G or T.")
    return int(match[1]) * _UNITS[match[2].upper()]
