"""Announcing a collective, which every rank compares with the others' before any byte moves; and the all-reduce.

Small tensors travel with the announcement, tensors in the heaps are reduced where they are, others in chunks.

Note [What may be written when]
Small slots and tables are used in turn, by the parity of the collective's number n, and are written before the announcement
of n is signaled. Their last use was n - 2, and no rank can still be reading that: this rank has finished n - 1, so it has seen
every rank's announcement of n - 1, which each makes after it has finished n - 2. Staging buffers are written only after
every rank's announcement of n was seen, which each makes after finishing n - 1.

Note [One pass]
Of tensors that lie in the heaps of all ranks, each rank reduces its share of the elements and writes the result into all of them,
block by block, while it is in the cache. The sum runs in rank order, so results are the same bits on every rank, in every run.

Note [When loops are compiled]
Where numba is installed, a sum or mean in one pass is a compiled loop. Loading numba takes about a second of a peer's deadline, so
it is done when a mebibyte or more is allocated, before training. Ranks need not agree on it: both ways give the same bits.

Note [Three buffers]
An all-reduce of ordinary memory goes through the staging buffers in chunks, and each chunk in two halves: "in" (what the others
will reduce is copied in) and "reduced" (this rank has reduced its share in its own buffer). A rank copies in chunk k + 1 before
it waits for the others' chunk k, so that a slow rank does not hold up a fast one. It may do so in a third buffer: it has seen
every rank signal "reduced" of chunk k - 1, which each did after copying out chunk k - 2, the one that was in that buffer before.

Note [Plain sums]
A sum of a few numbers costs what Python costs. So small sums of plain tensors have a program with as little of it as possible, and
numpy in place of torch. It writes what the general program writes, and signals when that signals.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.aliasing import is_plain
from gradwire.collectives.lower import flat
from gradwire.collectives.matching import comparable, decode, encode, mismatch
from gradwire.errors import CollectiveMismatch
from gradwire.groups.shared_memory.board import BUFFERS, CACHED, DIGEST, SMALL, Board, Cache
from gradwire.groups.shared_memory.fold import SUMMED, CompiledFold, Fold, Piece, combine, divide, without_warnings

COMPILED = 1 << 20
"""Bytes of heap memory from which sums in it are worth a compiled loop."""

_ALL_REDUCE, _SUM, _AVG = OpKind.ALL_REDUCE, ReduceOp.SUM, ReduceOp.AVG


Steps = Generator[int, None, None]
"""Yields how many signals every rank must have given before it goes on."""
Slots = tuple[bytes, list[np.ndarray[Any, Any]], int]


def written(*outputs: Tensor) -> None:
    """Let autograd know that their memory was written, past torch: what it has saved of them is no longer valid."""
    for t in outputs:
        if not t.is_inference():
            torch.autograd.graph.increment_version(t)


class AllReduce:
    """The programs of one rank of one group that are all-reduces, and what all programs begin with: the announcement."""

    def __init__(self, name: str, board: Board) -> None:
        self.name = name
        self.board = board
        self.rank, self.size, self._plan = board.rank, board.size, board.plan
        self._digests: Cache[tuple[object, ...], bytes] = Cache(CACHED)
        self._blocks: Cache[tuple[object, ...], list[list[Piece]]] = Cache(CACHED // 16)
        self._slots: Cache[tuple[object, ...], Slots] = Cache(CACHED // self.size)
        self._small = [board.address + self._plan.small(self.rank, turn) for turn in (0, 1)]
        self._call = without_warnings()
        self.compiled: dict[tuple[ReduceOp, torch.dtype], Fold] = {}

    def digest(self, op: Collective) -> bytes:
        """What ranks compare, in 16 bytes. Labels are for people; ranks may choose them differently."""
        key = (op.kind, op.reduce_op, op.root, *[(t.shape, t.dtype, t.is_sparse) for t in op.tensors])
        known = self._digests.get(key)
        if known is None:
            described = repr((comparable(replace(op.signature, label="")), any(t.is_sparse for t in op.tensors)))
            known = self._digests.keep(key, hashlib.blake2b(described.encode(), digest_size=DIGEST).digest())
        return known

    def announce(self, digest: bytes, parts: list[tuple[int, int]] | None, *, hold: bool = False) -> int:
        """Announce the next collective and signal; returns the number of signals that every rank must have given by then."""
        board = self.board
        board.announce(board.turn, digest)
        if parts is not None:
            board.write_table(board.turn, parts, hold=hold)
        return board.signal()

    def check(self, op: Collective, digest: bytes) -> Steps:
        """All ranks have announced: raise unless it is the same collective."""
        if not self.board.agreed(self.board.turn, digest * self.size):
            yield from self.compare(op)

    def compare(self, op: Collective) -> Steps:
        """Ranks have announced different collectives: exchange their descriptions, and raise."""
        memory, plan = self.board.memory, self._plan
        described = encode(op.signature, limit=plan.chunk - 8)
        described = len(described).to_bytes(8, "little") + described
        offset = plan.buffer(self.rank, 0)
        memory[offset : offset + len(described)] = described
        yield self.board.signal()
        signatures = []
        for rank in range(self.size):
            offset = plan.buffer(rank, 0)
            length = int.from_bytes(memory[offset : offset + 8], "little")
            signatures.append(decode(bytes(memory[offset + 8 : offset + 8 + length]), rank=rank))
        error = mismatch(self.name, signatures, compared=[replace(s, label="") for s in signatures])
        raise error or CollectiveMismatch(
            f"{op} of {self.name}: some ranks bring sparse tensors, others dense ones. Use the same on all ranks.",
            ops=dict(enumerate(signatures)),
        )

    def counted(self, steps: Steps) -> Steps:
        """`steps`, which carry out one collective: it counts as done however they end."""
        turn = self.board.turn
        try:
            yield from steps
        finally:
            self.board.turn = turn + 1

    def prepare(self, dtype: torch.dtype, nbytes: int) -> None:
        """Called when `nbytes` were allocated in the heap. See Note [When loops are compiled]."""
        if nbytes >= COMPILED and (_SUM, dtype) not in self.compiled:
            for op in (_SUM, _AVG):
                self.compiled[op, dtype] = CompiledFold.find(op, dtype, self.size) or Fold.of(op, dtype)

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
        offset = self.board.offset_in_heap(t.data_ptr())
        yield self.announce(digest, [(offset, nbytes)], hold=offset >= 0)
        yield from self.check(whole, digest)
        fold, offsets = Fold.of(reduce_op, t.dtype), self.board.first_offsets(turn)
        if min(offsets) < 0:
            yield from self._in_chunks(t, fold)
        else:
            fold = self.compiled.get((reduce_op, t.dtype), fold)
            for pieces in self._blocks_of(offsets, nbytes, fold):
                fold.everywhere(pieces)
            yield self.board.signal()
        written(t)

    def plain_sum(self, op: Collective) -> Steps | None:
        """The program of a plain sum or mean; None if `op` is not one."""
        if op.kind is not _ALL_REDUCE or len(op.inputs) != 1 or (op.reduce_op is not _SUM and op.reduce_op is not _AVG):
            return None
        t = op.inputs[0]
        if t.dtype not in SUMMED or not t.is_cpu or op.outputs[0] is not t or not is_plain(t):
            return None
        nbytes = t.numel() * t.element_size()
        if nbytes <= SMALL:
            return self._small_sum(op, t, nbytes)
        return self.counted(self.general(op, op, self.digest(op)))

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
                written(t)
        finally:
            board.turn = turn + 1

    def _new_slots(self, op: Collective, key: tuple[object, ...]) -> Slots:
        """The digests of a small sum; every rank's slot as an array, and an array for the result; the address of the latter."""
        t = op.inputs[0]
        dtype = SUMMED[t.dtype]
        offsets = [self._plan.small(rank, self.board.turn) for rank in range(self.size)]
        slots = [np.frombuffer(self.board.memory, dtype, t.numel(), offset) for offset in offsets]
        total = np.empty(t.numel(), dtype)
        return self._slots.keep(key, (self.digest(op) * self.size, [*slots, total], total.ctypes.data))

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
        if fold.array is None:
            return self.board.tensor(offset, nbytes, fold.dtype)
        return self.board.array(offset, nbytes, fold.array)

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
