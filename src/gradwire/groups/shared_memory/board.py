"""The board: one rank's access to the segment, in which each rank publishes its progress, its state and where its data lies.

    per rank: signals, state, recoveries, pid | wait queue | failure records | tables | message slots | staging | heaps

Every word has one writer, the rank it belongs to; only sleep flags are cleared by others. `sync.py` argues why that is enough.
"""

from __future__ import annotations

import functools
import itertools
import struct
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradwire.groups.shared_memory.segment import PAGE, Segment
from gradwire.groups.shared_memory.sync import Fence, Sleep, WaitQueue

K = TypeVar("K")
V = TypeVar("V")

ABSENT, HERE, LEFT, FAILED = range(4)
"""The state that a rank publishes."""
FAILURE_RECORD = 4096
"""Bytes that a rank has for the reason of its failure."""
SLOTS, SLOT = 32, 64
"""Messages from one rank to another that can be under way at a time, and bytes of a message's slot."""
SMALL = 32 << 10
"""Bytes up to which a contribution to an all-reduce travels together with its announcement."""
CHUNK, SMALLEST_CHUNK = 1 << 20, 32 << 10
"""Bytes of one staging buffer, and of one where shared memory is short."""
BUFFERS = 3
"""Staging buffers per rank: see Note [Three buffers] in all_reduce.py."""
WINDOW = 4
"""Chunks that an exchange of many ranks stages at a time: see Note [Two windows] in programs.py."""
DIGEST = 16
"""Bytes of a digest of what a collective is."""
CACHED = 4096
"""Views of the segment that are kept for the next time they are needed."""

_TABLE = struct.Struct("<qqq")  # hold, number of parts, bytes of the longest that is staged
_PART = struct.Struct("<qq")  # offset, bytes


class Table(NamedTuple):
    """What a rank has announced of its parts of a collective, and of the one for the reader."""

    hold: int
    """The other ranks must have read them from the caller's memory before the collective is over."""
    staged: int
    """The length of the longest that goes through the staging buffers."""
    several: bool
    """There is one part for each rank; else one for all, or none."""
    offset: int
    """Where the part for the reader lies; -1 in the staging buffers."""
    length: int


class Cache(dict[K, V]):
    """A dict that is emptied when it is full. Lookups are the dict's own and cost no Python call."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def keep(self, key: K, value: V) -> V:
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class SegmentPlan:
    """Where everything lies in a segment of `nbytes` for `size` ranks, whose staging buffers have `chunk` bytes each. `wide`: there
    is memory for more bytes at a time in exchanges."""

    def __init__(self, size: int, nbytes: int, chunk: int = CHUNK, *, wide: bool = True) -> None:
        self.size = size
        self.wide = wide
        self.nbytes = nbytes
        self.chunk = chunk
        # Four rows of one u64 per rank, side by side, so that one call reads a row.
        self.signals = 0
        self.states = self.signals + size * 8
        self.recoveries = self.states + size * 8
        self.pids = self.recoveries + size * 8
        self.wait_queue = _pages(self.pids + size * 8)
        self.failure_records = _pages(self.wait_queue + size * WaitQueue.STRIDE)
        # Two rows of digests, and two tables per rank, used in turn: see Note [What may be written when] in all_reduce.py.
        self.digests = self.failure_records + size * FAILURE_RECORD
        self.tables = _pages(self.digests + 2 * size * DIGEST)
        self.table_stride = -(-(_TABLE.size + 16 * size) // 64) * 64
        # For each pair of sender and receiver; those from rank 0 come first.
        self.message_slots = _pages(self.tables + 2 * size * self.table_stride)
        self.staging = _pages(self.message_slots + size * size * SLOTS * SLOT)
        self.slot = max(SMALL, chunk // 4) if wide else SMALL  # what an exchange moves together with its announcement
        self.window = min(WINDOW, max(1, size // 2)) * chunk if wide else chunk
        self.staging_stride = 2 * self.slot + max(2 * self.window, BUFFERS * chunk)
        self.heaps = _pages(self.staging + size * self.staging_stride)
        self.heap_stride = max(0, (nbytes - self.heaps) // size // PAGE * PAGE)

    @classmethod
    def fitting(cls, size: int, nbytes: int, free: int) -> SegmentPlan:
        """The one with the largest staging buffers of which all ranks' take up at most half of `free` bytes."""
        smallest, chunk = max(SMALLEST_CHUNK, 1 << (64 * size - 1).bit_length()), CHUNK
        if (plan := cls(size, nbytes, chunk)).heaps <= min(free, nbytes) // 2:
            return plan
        while chunk > smallest and cls(size, 0, chunk, wide=False).heaps > free // 2:
            chunk //= 2
        return cls(size, nbytes, chunk, wide=False)

    def small(self, rank: int, turn: int) -> int:
        """The small slot that `rank` uses in collective number `turn`."""
        return self.staging + rank * self.staging_stride + (turn & 1) * self.slot

    def buffer(self, rank: int, number: int) -> int:
        """Staging buffer `number` of `rank`, counted round and round."""
        return self.staging + rank * self.staging_stride + 2 * self.slot + number % BUFFERS * self.chunk

    def staged(self, rank: int, number: int) -> int:
        """Window `number` of an exchange, in the staging buffers of `rank`."""
        return self.buffer(rank, 0) + (number & 1) * self.window

    def table(self, rank: int, turn: int) -> int:
        return self.tables + (2 * rank + (turn & 1)) * self.table_stride

    def slots(self, sender: int, receiver: int) -> int:
        return self.message_slots + (sender * self.size + receiver) * SLOTS * SLOT

    def heap(self, rank: int) -> int:
        return self.heaps + rank * self.heap_stride


class Board:
    """One rank's access to the board. Only the thread that drives the group signals; states may be set from any."""

    def __init__(self, segment: Segment, plan: SegmentPlan, rank: int, sleep: Sleep) -> None:
        self.plan = plan
        self.rank = rank
        self.size = plan.size
        self.memory, self.address, view = segment.memory, segment.address, segment.view
        with torch.inference_mode(False):
            self.whole = whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._heap = range(plan.heap(rank), plan.heap(rank) + plan.heap_stride)

        @functools.lru_cache(CACHED)
        def tensor(offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            with torch.inference_mode(False):  # it is kept for callers that may not be in this one's mode
                return whole[offset : offset + nbytes].view(dtype)

        @functools.lru_cache(CACHED)
        def array(offset: int, nbytes: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
            return np.frombuffer(segment.memory, dtype, nbytes // dtype.itemsize, offset)

        self.tensor, self.array = tensor, array
        """The segment's bytes from an offset, as a flat tensor or array."""

        def words(offset: int) -> memoryview:
            return view[offset : offset + plan.size * 8].cast("Q")

        self.signals = words(plan.signals)
        self.states = words(plan.states)
        self.recoveries = words(plan.recoveries)
        self.pids = words(plan.pids)
        self.wait_queue = WaitQueue(view, plan.wait_queue, rank, plan.size, sleep)
        self.fence = Fence()
        self.signaled = 0
        self.turn = 0
        """The number of the collective that is being carried out, or else of the next one."""
        self._digests = [plan.digests, plan.digests + plan.size * DIGEST]
        self._my_digest = rank * DIGEST

    def signal(self) -> int:
        """Publish everything written so far: raise this rank's counter and wake the ranks that wait for it. Returns the counter."""
        self.signaled = signaled = self.signaled + 1
        fence = self.fence
        fence.release()  # not fence(), whose call takes as long as the fence
        fence.acquire()
        self.signals[self.rank] = signaled
        fence.release()
        fence.acquire()
        if min(self.signals.tolist()) >= signaled:  # see Note [The last one wakes] in sync.py
            self.wait_queue.wake_all()
        return signaled

    def start_over(self) -> None:
        self.signaled = self.turn = 0
        self.signals[self.rank] = 0

    def offset_in_heap(self, address: int) -> int:
        """Where a plain tensor, at `address`, lies in this rank's heap; -1 if it does not."""
        offset = address - self.address
        return offset if offset in self._heap else -1

    def set_state(self, state: int, words: str = "") -> None:
        """Publish this rank's state, with a reason; from any thread."""
        if words:
            text = words.encode(errors="backslashreplace")[: FAILURE_RECORD - 4]
            offset = self.plan.failure_records + self.rank * FAILURE_RECORD
            struct.pack_into(f"<I{len(text)}s", self.memory, offset, len(text), text)
        fence = Fence()  # the board's own belongs to the driving thread
        fence()
        self.states[self.rank] = state
        fence()
        self.wait_queue.wake_all()

    def words(self, rank: int) -> str:
        """The reason a rank gave."""
        offset = self.plan.failure_records + rank * FAILURE_RECORD
        (length,) = struct.unpack_from("<I", self.memory, offset)
        return self.memory[offset + 4 : offset + 4 + min(length, FAILURE_RECORD - 4)].decode(errors="replace")

    def announce(self, turn: int, digest: bytes) -> None:
        """Publish what collective number `turn` is."""
        offset = self._digests[turn & 1] + self._my_digest
        self.memory[offset : offset + DIGEST] = digest

    def agreed(self, turn: int, digests: bytes) -> bool:
        """Whether all ranks have announced the same for collective number `turn`; `digests` is that, once per rank."""
        offset = self._digests[turn & 1]
        return self.memory[offset : offset + len(digests)] == digests

    def write_table(self, turn: int, parts: list[tuple[int, int]], *, hold: bool) -> None:
        """Publish where each part lies (-1: in the staging buffers) and its length. `hold`: see `Table`."""
        staged = max((length for offset, length in parts if offset < 0), default=0)
        flat = itertools.chain.from_iterable(parts)
        offset = self.plan.table(self.rank, turn)
        struct.pack_into(f"<qqq{2 * len(parts)}q", self.memory, offset, hold, len(parts), staged, *flat)

    def first_offsets(self, turn: int) -> list[int]:
        """Where the first part of each rank lies, by their tables for collective number `turn`."""
        tables = (self.plan.table(rank, turn) for rank in range(self.size))
        return [_PART.unpack_from(self.memory, table + _TABLE.size)[0] for table in tables]

    def read_table(self, rank: int, turn: int) -> Table:
        """What `rank` announced for collective number `turn`."""
        offset = self.plan.table(rank, turn)
        hold, count, staged = _TABLE.unpack_from(self.memory, offset)
        mine = self.rank if count > 1 else 0
        part = _PART.unpack_from(self.memory, offset + _TABLE.size + mine * _PART.size) if count else (-1, 0)
        return Table(hold, staged, count > 1, *part)
