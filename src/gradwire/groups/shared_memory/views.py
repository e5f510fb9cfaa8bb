"""The segment's memory as tensors and arrays, kept for the next time they are needed."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradwire.groups.shared_memory.board import SegmentPlan
from gradwire.groups.shared_memory.segment import Segment

K = TypeVar("K")
V = TypeVar("V")

CACHED = 4096
"""Views that are kept."""


class Cache(dict[K, V]):
    """A dict that is emptied when it is full. Lookups are the dict's own and cost no Python call."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def keep(self, key: K, value: V) -> V:
        """Add an entry, and return its value."""
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value


class Views:
    """One rank's views of the segment."""

    def __init__(self, segment: Segment, plan: SegmentPlan, rank: int) -> None:
        self.address = segment.address
        self.memory = segment.memory
        with torch.inference_mode(False):
            self.whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._heap = range(plan.heap(rank), plan.heap(rank) + plan.heap_stride)
        self._tensors: Cache[tuple[int, int, torch.dtype], Tensor] = Cache(CACHED)
        self._arrays: Cache[tuple[int, int, np.dtype[Any]], np.ndarray[Any, Any]] = Cache(CACHED)

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The segment's bytes from `offset` as a flat tensor."""
        key = (offset, nbytes, dtype)
        known = self._tensors.get(key)
        if known is None:
            with torch.inference_mode(False):  # it is kept for callers that may not be in this one's mode
                known = self._tensors.keep(key, self.whole[offset : offset + nbytes].view(dtype))
        return known

    def array(self, offset: int, nbytes: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The segment's bytes from `offset` as a flat array."""
        key = (offset, nbytes, dtype)
        known = self._arrays.get(key)
        if known is None:
            known = self._arrays.keep(key, np.frombuffer(self.memory, dtype, nbytes // dtype.itemsize, offset))
        return known

    def offset_in_heap(self, t: Tensor) -> int:
        """Where a plain tensor lies in this rank's heap; -1 if it does not."""
        offset = t.data_ptr() - self.address
        return offset if offset in self._heap else -1
