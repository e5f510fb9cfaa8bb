"""One rank's heap in the segment: memory that the other ranks can reach, handed out as tensors.

A block goes back to the heap when the last tensor that lies in it is gone: the tensor's storage holds the block's numpy
array, and the callback of a weak reference to that array frees it. Blocks are found first fit, and free neighbors become one.

Note [Blocks that another rank may still write]
A collective in the heap is carried out by all ranks: others write into this rank's block. When it fails here, another rank may
still be at it. From a failure until all ranks have met again (`Group.recover`), freed blocks are therefore kept back, so that
a late write cannot land in another tensor.

Note [No finalizer per block]
`weakref.finalize` keeps all finalizers of the process in one dictionary, and at exit Python iterates over it without a lock, which
would fail if a group's thread freed a block at that moment.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import SharedMemoryFull

ALIGNMENT = 4096
"""Blocks begin at pages: a block's first and last bytes share no cache line, and no page, with a neighbor."""

_GROWTH = 4 << 20

Reserve = Callable[[int, int], object]


class Heap:
    """Blocks in `[start, end)` of the segment."""

    def __init__(self, memory: object, start: int, end: int, reserve: Reserve) -> None:
        """`reserve(offset, nbytes)` makes sure of memory for a range, or raises."""
        self._memory = memory
        self._start = start
        self._end = end
        self._top = start
        self._reserve = reserve
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset
        self._returned: deque[tuple[int, int]] = deque()
        self._in_use: dict[int, weakref.ref[Any]] = {}  # by the id of the reference, which frees the block of its array
        self.holds_back = False
        """Whether what is freed is kept: see Note [Blocks that another rank may still write]."""
        self._lock = threading.Lock()

    @property
    def reserved(self) -> int:
        """Bytes of memory that the heap has asked for so far."""
        return self._top - self._start

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in a block of its own."""
        nbytes = numel * dtype.itemsize
        room = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        offset = self._take(room)
        block: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.frombuffer(self._memory, np.uint8, room, offset)  # type: ignore[call-overload]
        in_use, returned = self._in_use, self._returned

        def free(reference: weakref.ref[Any]) -> None:
            returned.append((offset, room))
            in_use.pop(id(reference), None)

        reference = weakref.ref(block, free)  # see Note [No finalizer per block]
        in_use[id(reference)] = reference
        return torch.from_numpy(block)[:nbytes].view(dtype)

    def _take(self, room: int) -> int:
        with self._lock:
            self._collect()
            place = self._find(room)
            offset, nbytes = self._free[place]
            if nbytes == room:
                del self._free[place]
            else:
                self._free[place] = (offset + room, nbytes - room)
            return offset

    def _find(self, room: int) -> int:
        """The index of the first free block that is large enough; the heap grows if there is none."""
        for i, (_, nbytes) in enumerate(self._free):
            if nbytes >= room:
                return i
        self._grow(room)
        return self._find(room)

    def _grow(self, room: int) -> None:
        last = self._free[-1] if self._free and sum(self._free[-1]) == self._top else None
        missing = room - (last[1] if last else 0)
        step = min(max(missing, min(self.reserved, 1 << 28), _GROWTH), self._end - self._top)
        if step < missing:
            raise SharedMemoryFull(
                f"shared memory: {room} bytes asked for, but the heap of this rank has address space for "
                f"{self._end - self._start} bytes only, of which {self.reserved} are in use or fragmented. Give gw.init() or "
                "SharedMemoryGroup more room=, or GRADWIRE_SHM_ROOM in the environment: bytes for all ranks together."
            )
        try:
            self._reserve(self._top, step)
        except SharedMemoryFull:
            step = missing
            self._reserve(self._top, step)  # not as much as would be good: as much as is needed
        offset, self._top = self._top, self._top + step
        self._insert(offset, step)

    def _collect(self) -> None:
        """Take in what was freed. A finalizer can run at any point, in here too; so it only leaves a note."""
        while self._returned and not self.holds_back:
            self._insert(*self._returned.popleft())

    def _insert(self, offset: int, nbytes: int) -> None:
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and offset + nbytes == self._free[i][0]:
            nbytes += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            i -= 1
            offset, before = self._free.pop(i)
            nbytes += before
        self._free.insert(i, (offset, nbytes))
