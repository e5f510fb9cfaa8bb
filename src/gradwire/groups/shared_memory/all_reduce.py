"""All-reduce: small tensors travel with the announcement, tensors in the heaps are reduced where they are, others in chunks.

Note [One pass]
An all-reduce of tensors that lie in the heaps of all ranks: each rank reduces its share of the elements over all ranks'
tensors and writes the result into all of them, block by block, so that what was just computed is still in the cache when it is
written. The sum runs in rank order, so results are the same bits on every rank and in every run.

Note [When loops are compiled]
Where numba is installed, a sum or mean in one pass is a compiled loop: see `loops.py`. Loading numba takes about a second, in
which a peer's deadline would run and a rank's death would not be noticed. So it is done when memory is allocated, which happens
before training, and only for a block of a mebibyte or more. Ranks need not agree on it: both ways give the same bits.

Note [Three buffers]
An all-reduce of ordinary memory goes through the staging buffers in chunks, and each chunk in two halves: "in" (what the others
will reduce is copied in) and "reduced" (this rank has reduced its share in its own buffer). A rank copies in chunk k + 1 before
it waits for the others' chunk k, so that a slow rank does not hold up a fast one. It may do so in a third buffer: it has seen
every rank signal "reduced" of chunk k - 1, which each did after copying out chunk k - 2, the one that was in that buffer before.

Note [Plain sums]
A sum of a few numbers costs what Python costs. So small sums of plain tensors have a program with as little of it as possible:
numpy and memmove in place of torch (a third of the time per call, and the same sums bit by bit), one generator, nothing checked
twice. It writes what the general program writes, and signals when that signals.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.lower import flat
from gradwire.groups.shared_memory.agreement import AnnouncedPrograms, Steps
from gradwire.groups.shared_memory.board import BUFFERS, CACHED, DIGEST, SMALL, Board, Cache
from gradwire.groups.shared_memory.fold import SUMMED, CompiledFold, Fold, Piece, combine, divide, without_warnings

COMPILED = 1 << 20
"""Bytes of heap memory from which sums in it are worth a compiled loop."""

_ALL_REDUCE, _SUM, _AVG = OpKind.ALL_REDUCE, ReduceOp.SUM, ReduceOp.AVG


class AllReduce(AnnouncedPrograms):
    """The all-reduce of one rank of one group."""

    def __init__(self, name: str, board: Board) -> None:
        super().__init__(name, board)
        self._blocks: Cache[tuple[object, ...], list[list[Piece]]] = Cache(CACHED // 16)
        self._slots: Cache[tuple[object, ...], tuple[bytes, list[np.ndarray[Any, Any]], int]] = Cache(
            CACHED // self.size
        )
        self._small = [board.address + self._plan.small(self.rank, turn) for turn in (0, 1)]
        self._call = without_warnings()
        self._prepared: set[torch.dtype] = set()
        self.compiled: dict[tuple[ReduceOp, torch.dtype], Fold] = {}

    def prepare(self, dtype: torch.dtype, nbytes: int) -> None:
        """Called when `nbytes` were allocated in the heap. See Note [When loops are compiled]."""
        if nbytes < COMPILED or dtype in self._prepared:
            return
        self._prepared.add(dtype)
        for op in (_SUM, _AVG):
            fold = CompiledFold.find(op, dtype, self.size)
            if fold is not None:
                self.compiled[op, dtype] = fold

    def general(self, op: Collective, whole: Collective, digest: bytes) -> Steps:
        """The program for any reduction and dtype: `whole` is what the caller submitted, of which `op` may be a part."""
        t = flat(op.inputs[0])
        reduce_op = op.reduce_op
        assert reduce_op is not None
        nbytes, turn, plan, view = t.nbytes, self.board.turn, self._plan, self.board.tensor
        if nbytes <= SMALL:
            view(plan.small(self.rank, turn), nbytes, t.dtype).copy_(t)
            yield self.announce(digest, None)
            yield from self.check(whole, digest)
            combine(reduce_op, [view(plan.small(r, turn), nbytes, t.dtype) for r in range(self.size)], t)
            return
        offset = self.board.offset_in_heap(t)
        yield self.announce(digest, [(offset, nbytes)], hold=offset >= 0)
        yield from self.check(whole, digest)
        yield from self._large(t, Fold.of(reduce_op, t.dtype))

    # -- the fast path: see Note [Plain sums] ---------------------------------------------------------------------------

    def plain_sum(self, op: Collective) -> Steps | None:
        """The program of a plain sum or mean; None if `op` is not one."""
        if op.kind is not _ALL_REDUCE or len(op.inputs) != 1:
            return None
        if op.reduce_op is not _SUM and op.reduce_op is not _AVG:
            return None
        t = op.inputs[0]
        if t.dtype not in SUMMED or t.layout is not torch.strided or not t.is_cpu or op.outputs[0] is not t:
            return None
        if not t.is_contiguous() or t.is_neg():
            return None
        nbytes = t.numel() * t.element_size()
        return (
            self._small_sum(op, t, nbytes) if nbytes <= SMALL else self.counted(self.general(op, op, self.digest(op)))
        )

    def _small_sum(self, op: Collective, t: Tensor, nbytes: int) -> Steps:
        board = self.board
        turn = board.turn
        try:
            key = (t.shape, t.dtype, op.reduce_op, turn & 1)
            digests, (first, *others, total), address = self._slots.get(key) or self._new_slots(op, key)
            ctypes.memmove(self._small[turn & 1], t.data_ptr(), nbytes)
            board.announce(turn, digests[:DIGEST])
            yield board.signal()
            if not board.agreed(turn, digests):
                yield from self.compare(op)
            if others:
                call = self._call
                call(np.add, first, others[0], total)
                for other in others[1:]:
                    call(np.add, total, other, total)
                if op.reduce_op is _AVG:
                    divide(total, self.size, call)
                ctypes.memmove(t.data_ptr(), address, nbytes)
        finally:
            board.turn = turn + 1

    def _new_slots(self, op: Collective, key: tuple[object, ...]) -> tuple[bytes, list[np.ndarray[Any, Any]], int]:
        """The digests of a small sum; every rank's slot as an array, and an array for the result; the address of the latter."""
        t = op.inputs[0]
        dtype = SUMMED[t.dtype]
        offsets = [self._plan.small(rank, self.board.turn) for rank in range(self.size)]
        slots = [np.frombuffer(self.board.memory, dtype, t.numel(), offset) for offset in offsets]
        total = np.empty(t.numel(), dtype)
        return self._slots.keep(key, (self.digest(op) * self.size, [*slots, total], total.ctypes.data))

    # -- large tensors ---------------------------------------------------------------------------------------------------

    def _large(self, t: Tensor, fold: Fold) -> Steps:
        """All ranks have announced where their tensor lies."""
        offsets = self.board.first_offsets(self.board.turn)
        if min(offsets) < 0:
            yield from self._in_chunks(flat(t), fold)
            return
        fold = self.compiled.get((fold.op, fold.dtype), fold)
        for pieces in self._blocks_of(offsets, t.nbytes, fold):
            fold.everywhere(pieces)
        yield self.board.signal()

    def _blocks_of(self, offsets: list[int], nbytes: int, fold: Fold) -> list[list[Piece]]:
        """This rank's share of the tensors at `offsets`, in blocks: one piece per rank each. See Note [One pass]."""
        key = (*offsets, nbytes, fold.dtype, fold.array, fold.block)
        known = self._blocks.get(key)
        if known is None:
            low, high = _share(nbytes, self.rank, self.size, fold.dtype.itemsize)
            blocks = [
                [self._piece(o + at, min(fold.block, high - at), fold) for o in offsets]
                for at in range(low, high, fold.block)
            ]
            known = self._blocks.keep(key, blocks)
        return known

    def _piece(self, offset: int, nbytes: int, fold: Fold) -> Piece:
        """The segment's bytes from `offset`, as what `fold` works on."""
        board = self.board
        return (
            board.tensor(offset, nbytes, fold.dtype) if fold.array is None else board.array(offset, nbytes, fold.array)
        )

    def _in_chunks(self, t: Tensor, fold: Fold) -> Steps:
        """See Note [Three buffers]."""
        rank, size, nbytes, item = self.rank, self.size, t.nbytes, t.element_size()
        signal, address = self.board.signal, self.board.address
        source = t.data_ptr()
        whole: Piece = t if fold.array is None else t.numpy()
        places = [[self._plan.buffer(r, number) for number in range(BUFFERS)] for r in range(size)]
        chunk = self._plan.chunk
        count = -(-nbytes // chunk)
        full = [_share(chunk, r, size, item) for r in range(size)]
        last = [_share(nbytes - (count - 1) * chunk, r, size, item) for r in range(size)]

        def copy_in(number: int) -> int:
            """All but this rank's own share."""
            start, own = number * chunk, address + places[rank][number % BUFFERS]
            low, high = (full if number < count - 1 else last)[rank]
            ctypes.memmove(own, source + start, low)
            ctypes.memmove(own + high, source + start + high, min(chunk, nbytes - start) - high)
            return signal()

        ready = copy_in(0)
        for number in range(count):
            wanted = ready
            if number + 1 < count:
                ready = copy_in(number + 1)
            yield wanted
            start, shares = number * chunk, full if number < count - 1 else last
            low, high = shares[rank]
            buffers = [places[r][number % BUFFERS] for r in range(size)]
            if low < high:
                parts = [self._piece(buffers[r] + low, high - low, fold) for r in range(size)]
                mine = parts[rank]
                parts[rank] = whole[(start + low) // item : (start + high) // item]
                fold(parts, mine)
            done = signal()
            ctypes.memmove(source + start + low, address + buffers[rank] + low, high - low)
            yield done
            for r in range(size):
                if r != rank:
                    low, high = shares[r]
                    ctypes.memmove(source + start + low, address + buffers[r] + low, high - low)


def _share(nbytes: int, rank: int, size: int, item: int) -> tuple[int, int]:
    """The bytes, from and to, that `rank` reduces: whole cache lines, and every byte by one rank."""
    line = max(64, item)
    share = -(-nbytes // (size * line)) * line
    return min(rank * share, nbytes), min((rank + 1) * share, nbytes)
