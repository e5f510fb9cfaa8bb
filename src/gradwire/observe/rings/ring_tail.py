"""Reads what a rank has written to its ring since the last time. Without torch."""

from __future__ import annotations

import time
from pathlib import Path

from gradwire.observe.rings.ring import Record, RingFile

_ABOUT_TO = 1_000_000_000
"""After so many nanoseconds a record that is missing between others is not written any more."""


class RingFollower:
    """Reads what a rank has written since the last time."""

    _FIRST, _MOST = 64, 1024
    """Records that are read at once: few, because most of the time there are few new ones, and then more."""

    def __init__(self, path: Path, *, tail: int | None = None) -> None:
        """Begins with the oldest record, or with about the last `tail`."""
        self._file = RingFile(path)
        self.header = self._file.header
        self.is_replaced = self._file.is_replaced
        self.read_descriptions = self._file.read_descriptions
        self._next = 0 if tail is None else max(0, self._file.newest() - tail)
        self._gap = -1
        """The record that was to come next at the end of the last call."""

    @property
    def damage(self) -> dict[str, str]:
        """As `RingFile.damage`."""
        return self._file.damage

    def poll(self, *, most: int | None = None) -> list[Record]:
        """The records since the last call, as far as they have not been overwritten; of more than `most`, about the last half."""
        found: list[Record] = []
        capacity = self._file.capacity
        if most is not None and most < capacity and self._file.has(self._next + most):
            self._next = max(self._next, self._file.newest() - most // 2)
        count, left = min(self._FIRST, capacity), 2 * (capacity + self._MOST)
        while left > 0:  # a rank that writes faster than we read must not keep us
            left -= count
            begin, slot = self._next, self._next % capacity
            new = self._file.read(slot, min(count, capacity - slot), least=begin)
            if slot + count > capacity:
                new += self._file.read(0, slot + count - capacity, least=begin)
            new = self._file.without_strays(new)
            at_end = not new or new[-1].number < begin + count // 2  # so many records in a row are not left out
            count = min(4 * count, self._MOST, capacity)
            if not new:
                break
            if new[0].number >= begin + capacity:  # overwritten before we came: continue behind the writer
                self._next = new[-1].number - capacity // 2
                continue
            for record in new:
                if record.number != self._next:
                    if not self._is_never_written(record):
                        break
                    self._next = record.number
                found.append(record)
                self._next += 1
            if self._next == begin or at_end:
                break
        self._gap = self._next
        return found

    def _is_never_written(self, later: Record) -> bool:
        """Whether what should come next is a gap (see Note [No errors] in flight_recorder.py), not about to be written."""
        return self._next == self._gap or time.monotonic_ns() - later.time > _ABOUT_TO

    def close(self) -> None:
        """Close the file."""
        self._file.close()
