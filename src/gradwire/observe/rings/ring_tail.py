"""Reads what a rank has written to its ring since the last time. Without torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.observe.rings.ring import Record, RingFile
from gradwire.recorder.format import NO_PEER, RecordKind, record_dtype

if TYPE_CHECKING:
    import numpy as np

_TAIL = 256
"""So many of the last records are read one by one, whatever is before them."""
_KEPT_MESSAGES = 1000
_ABOUT_TO = 1_000_000_000
"""After so many nanoseconds a record that is missing between others is not written any more."""


class RingFollower(RingFile):
    """Reads what a rank has written since the last time."""

    _FIRST, _MOST = 64, 16384
    """Records that are read at once: few, because most of the time there are few new ones, and then more."""

    def __init__(self, path: Path, *, tail: int | None = None) -> None:
        """Begins with the oldest record, or with about the last `tail`."""
        super().__init__(path)
        self._next = 0 if tail is None else max(0, self.newest() - tail)
        self._gap = -1
        """The record that was to come next at the end of the last call."""

    def poll(self, *, most: int | None = None) -> list[Record]:
        """The records since the last call, as far as they have not been overwritten; of more than `most`, about the last half."""
        return self.records(self.poll_rows(most=most))

    def poll_rows(self, *, most: int | None = None) -> np.ndarray:
        """As `poll`, as rows of `record_dtype`."""
        import numpy as np

        capacity = self.capacity
        if most is not None and most < capacity and self.has(self._next + most):
            self._next = max(self._next, self.newest() - most // 2)
        parts: list[np.ndarray] = []
        count, left = min(self._FIRST, capacity), 2 * (capacity + self._MOST)
        while left > 0:  # a rank that writes faster than we read must not keep us
            left -= count
            begin, slot = self._next, self._next % capacity
            new = self.read(slot, min(count, capacity - slot), least=begin)
            if slot + count > capacity:
                new = np.concatenate([new, self.read(0, slot + count - capacity, least=begin)])
            if not len(new):
                break
            numbers = new["number"].astype(np.int64)
            if numbers[0] >= begin + capacity:  # overwritten before we came: continue behind the writer
                self._next = int(numbers[-1]) - capacity // 2
                continue
            new = new[: self._in_order(new, numbers)]
            if len(new):
                parts.append(new)
                self._next = int(new["number"][-1]) + 1
            if self._next < begin + count // 2:  # so many records in a row are not left out: this is the end
                break
            count = min(4 * count, self._MOST, capacity)
        self._gap = self._next
        return np.concatenate(parts) if parts else np.empty(0, record_dtype())

    def _in_order(self, new: np.ndarray, numbers: np.ndarray) -> int:
        """How many of these rows follow what was read, without one before them that is about to be written."""
        import numpy as np

        before = np.concatenate([[self._next - 1], numbers[:-1]])
        for gap in np.flatnonzero(numbers != before + 1).tolist():
            # One that was missing before, or before others that are old, is a gap: see Note [No errors] in recorder/writer.py.
            is_old = time.monotonic_ns() - int(new["time"][gap]) > _ABOUT_TO
            if numbers[gap] <= before[gap] or not (is_old or before[gap] + 1 == self._gap):
                return int(gap)
        return len(new)

    def poll_split(self, pending: Iterable[tuple[int, int, int]]) -> tuple[list[Record], list[Record]]:
        """As `poll`, for a reader that follows what is under way: the last records, and what it must know of those before. Of
        many new records all but the last are reduced to those that still matter: see `unfinished_rows`. `pending` are the
        operations (group, rank in it, sequence number) that had not finished."""
        rows = self.poll_rows()
        if len(rows) <= 2 * _TAIL:
            return [], self.records(rows)
        tail = rows[-_TAIL:]
        tail = tail[(tail["kind"] != RecordKind.COLLECTIVE_STARTED) | (tail["number"] + 20 > tail["number"][-1])]
        return self.records(unfinished_rows(rows[:-_TAIL], rows, pending)), self.records(tail)


def unfinished_rows(old: np.ndarray, rows: np.ndarray, pending: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Of `old`, the beginning of `rows`, what a reader needs that knows nothing of it but what was `pending` before. That is all
    of operations that have not finished by the end of `rows`, the end of those that were pending, failures, the last messages,
    the highest collective of each group, the last filling of each bucket, groups and warnings."""
    import numpy as np

    kinds, keys = old["kind"], _keys(old["group_id"], old["rank"], old["seq"])
    over = rows[rows["kind"] == RecordKind.COLLECTIVE_FINISHED]
    finished = _keys(over["group_id"], over["rank"], over["seq"])
    begun = np.isin(kinds, [RecordKind.COLLECTIVE_SUBMITTED, RecordKind.COLLECTIVE_WAITED])
    keep = begun & ~np.isin(keys, finished)
    ended = kinds == RecordKind.COLLECTIVE_FINISHED
    known = np.array(list(pending), dtype=np.uint64).reshape(-1, 3)
    keep |= ended & np.isin(keys, _keys(known[:, 0], known[:, 1], known[:, 2]))
    keep |= np.isin(kinds, [RecordKind.COLLECTIVE_FAILED, RecordKind.GROUP, RecordKind.WARNING])
    is_message = old["peer"] != NO_PEER
    keep[np.flatnonzero(is_message & (begun | ended))[-_KEPT_MESSAGES:]] = True
    for chosen, order in (
        (ended & ~is_message, ("ordinal", "rank", "group_id")),
        (kinds == RecordKind.BUCKET_FULL, ("number", "bucket", "model", "group_id")),
    ):
        places = np.flatnonzero(chosen)
        places = places[np.lexsort([old[name][places] for name in order])]
        last = np.zeros(len(places), bool)
        for column in [old[name][places] for name in order[1:]]:
            last[:-1] |= column[1:] != column[:-1]
        last[-1:] = True
        keep[places[last]] = True
    return old[keep]


def _keys(group_id: np.ndarray, rank: np.ndarray, seq: np.ndarray) -> np.ndarray:
    """Operations as numbers; that two have the same is as likely as that two groups have."""
    import numpy as np

    local = rank.astype(np.uint64) << np.uint64(32) | seq.astype(np.uint64)
    mixed: np.ndarray = group_id ^ (local * np.uint64(0x9E3779B97F4A7C15))
    return mixed
