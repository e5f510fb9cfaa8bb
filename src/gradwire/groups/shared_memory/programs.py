"""Collectives over shared memory, as programs: generators that yield a number of posts and go on once all ranks have made it.

A rank *announces* a collective (a table that says what it is and where its parts lie), *posts*, and waits for the others'
posts; then it *pulls* what it needs straight from where the others have it. A part lies in one of three places:

- up to SMALL bytes: copied into the rank's small slot together with the announcement, so that one post is all;
- in the rank's heap: where it is; nothing is copied, and everybody posts once more when they have read it;
- elsewhere: copied window by window through the rank's staging buffers.

Each rank chooses for itself, and writes it into its table.

Note [One pass]
An all-reduce of tensors that lie in the heaps of all ranks: each rank reduces its share of the elements over all ranks'
tensors and writes the result into all of them, block by block, so that what was just computed is still in the cache when it is
written. Every byte is read once and written once. The sum runs in rank order, so results are the same bits on every rank and in
every run.

Note [When loops are compiled]
Where numba is installed, a sum or mean in one pass is a compiled loop: see `loops.py`. Loading numba takes about a second. Within
an operation that would be a second in which a peer's deadline runs, and in which a rank that dies is not noticed. So it is done
when memory is allocated, which happens before training, and only for a block of a mebibyte or more: who reduces small tensors
never pays. Ranks need not agree on it. Whichever way a rank goes, it gives the same bits.

Note [Three buffers]
An all-reduce of ordinary memory goes through the staging buffers in chunks, and each chunk in two halves: "in" (what the others
will reduce is copied in) and "reduced" (this rank has reduced its share in its own buffer). A rank copies in chunk k + 1 before
it waits for the others' chunk k, so that a slow rank does not hold up a fast one. It may do so in a third buffer: it has seen
everybody post "reduced" of chunk k - 1, which each did after copying out chunk k - 2, the one that was in that buffer before.

Note [Plain sums]
A sum of a few numbers costs what Python costs. So sums of plain tensors have programs with as little of it as possible: numpy
and memmove in place of torch (a third of the time per call, and the same sums bit by bit), one generator, no questions twice.
What they write and post is what the general program writes and posts.

Note [What may be written when]
Small slots and tables are used in turn, by the parity of the collective's number n, and are written before the announcement
of n is posted. Their last use was n - 2, and nobody can still be reading that: this rank has finished n - 1, so it has seen
everybody's announcement of n - 1, which each makes after it has finished n - 2. Staging buffers are written only after
everybody's announcement of n was seen, which each makes after finishing n - 1.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.collectives import Collective, Kind, ReduceOp
from gradwire.collectives.agree import comparable, mismatch
from gradwire.collectives.aliasing import apart
from gradwire.collectives.encode import decode, encode
from gradwire.collectives.inference import writes
from gradwire.collectives.lower import as_bytes, flat, is_plain, lower
from gradwire.collectives.reference import cut, store
from gradwire.errors import CollectiveMismatch, GroupError, InternalError
from gradwire.groups.shared_memory.board import BUFFERS, DIGEST, SMALL, Board, Table
from gradwire.groups.shared_memory.fold import SUMMED, CompiledFold, Fold, Piece, combine, divide, quiet
from gradwire.groups.shared_memory.segment import Segment

Steps = Generator[int, None, None]
"""Yields how many posts every rank must have made before it goes on."""

COMPILED = 1 << 20
"""Bytes of heap memory from which sums in it are worth a compiled loop."""

_CACHED_VIEWS = 4096

_ALL_REDUCE, _SUM, _AVG = Kind.ALL_REDUCE, ReduceOp.SUM, ReduceOp.AVG

_NATIVE = frozenset({
    Kind.ALL_REDUCE, Kind.BROADCAST, Kind.ALL_GATHER, Kind.ALL_GATHER_INTO_TENSOR, Kind.REDUCE_SCATTER,
    Kind.REDUCE_SCATTER_TENSOR, Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_SINGLE, Kind.GATHER, Kind.SCATTER, Kind.BARRIER,
})  # fmt: skip
_ONE_INPUT = frozenset({
    Kind.ALL_REDUCE, Kind.BROADCAST, Kind.ALL_GATHER_INTO_TENSOR, Kind.REDUCE_SCATTER_TENSOR
})  # fmt: skip


def takes(op: Collective) -> bool:
    """Whether there is a program for `op` as it is; the rest is made of these."""
    if op.kind not in _NATIVE or op.reduce_op is ReduceOp.PREMUL_SUM:
        return False
    if op.kind in _ONE_INPUT and len(op.inputs) != 1:
        return False
    if op.kind in (Kind.ALL_REDUCE, Kind.BROADCAST) and op.inputs[0] is not op.outputs[0]:
        return False
    tensors = op.inputs if op.outputs is op.inputs else op.inputs + op.outputs
    return all(map(is_plain, tensors))


class Programs:
    """The programs of one rank of one group."""

    def __init__(self, name: str, segment: Segment, board: Board) -> None:
        self.name = name
        self.board = board
        self.rank = board.rank
        self.size = board.size
        self.turn = 0
        self._plan = board.plan
        self._address = segment.address
        self._memory = segment.memory
        with torch.inference_mode(False):
            self._whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._heap = range(self._plan.heap(self.rank), self._plan.heap(self.rank) + self._plan.heap_stride)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._blocks: dict[tuple[object, ...], list[list[Piece]]] = {}
        self._digests: dict[tuple[object, ...], bytes] = {}
        self._folds: dict[tuple[ReduceOp, torch.dtype], Fold] = {}
        self._compiled: dict[tuple[ReduceOp, torch.dtype], Fold] = {}
        self._prepared: set[torch.dtype] = set()
        self._arrays: dict[tuple[int, int, np.dtype[Any]], np.ndarray[Any, Any]] = {}
        self._small = [self._address + self._plan.small(self.rank, turn) for turn in (0, 1)]
        self._quietly = quiet()
        self._slots: dict[tuple[object, ...], tuple[bytes, list[np.ndarray[Any, Any]], int]] = {}

    def carry_out(self, op: Collective) -> Steps:
        """The program for any collective."""
        if op.device.type != "cpu":
            yield from self._on_host(op)
            return
        plain = self.plain_sum(op)
        if plain is not None:
            yield from plain
            return
        digest = self._digest(op)
        yield from writes(op.outputs, self._by_parts(apart(op, self.rank), digest))

    def _by_parts(self, op: Collective, digest: bytes) -> Steps:
        if takes(op):
            yield from self._native(op, op, digest)
            return
        try:
            for step in lower(op, rank=self.rank, size=self.size, takes=takes):
                yield from self._native(step, op, digest)
        except CollectiveMismatch as error:
            if error.ops or op.kind is not Kind.ALL_REDUCE:
                raise
            # Sparse tensors of different sparse dimensions: not all ranks notice, and those who did not go on to the next step.
            raise GroupError(f"{error} It is part of {op}.") from error

    def _on_host(self, op: Collective) -> Steps:
        """Tensors of another device go through copies in ordinary memory."""
        copies = {id(t): t.detach().cpu() for t in op.inputs + op.outputs}
        inputs = tuple(copies[id(t)] for t in op.inputs)
        outputs = inputs if op.outputs is op.inputs else tuple(copies[id(t)] for t in op.outputs)
        factor = op.factor.cpu() if isinstance(op.factor, Tensor) else op.factor
        yield from self.carry_out(replace(op, inputs=inputs, outputs=outputs, factor=factor))
        for t, copy in zip(op.outputs, outputs, strict=True):
            store(t if t.is_sparse else t.detach(), copy.to(t.device))
        if op.device.type == "cuda":  # the caller may go on in another stream than that of the thread that drives
            torch.cuda.current_stream(op.device).synchronize()

    def prepare(self, dtype: torch.dtype, nbytes: int) -> None:
        """So much was allocated in the heap. See Note [When loops are compiled]."""
        if nbytes < COMPILED or dtype in self._prepared:
            return
        self._prepared.add(dtype)
        for op in (_SUM, _AVG):
            fold = CompiledFold.find(op, dtype, self.size)
            if fold is not None:
                self._compiled[op, dtype] = fold

    def start_over(self) -> None:
        """Count from the beginning again, together with all ranks."""
        self.turn = 0

    # -- what is where -------------------------------------------------------------------------------------------------

    def view(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The segment's bytes from `offset` as a flat tensor."""
        key = (offset, nbytes, dtype)
        known = self._views.get(key)
        if known is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # it is kept for others, who may not be in the mode of this caller
                known = self._views[key] = self._whole[offset : offset + nbytes].view(dtype)
        return known

    def offset_in_heap(self, t: Tensor) -> int:
        """Where a plain tensor lies in this rank's heap; -1 if it does not."""
        offset = t.data_ptr() - self._address
        return offset if offset in self._heap else -1

    # -- agreeing on what is done --------------------------------------------------------------------------------------

    def _digest(self, op: Collective) -> bytes:
        """What ranks compare, in 16 bytes. Labels are for people; ranks may choose them differently."""
        key = (op.kind, op.reduce_op, op.root, *[(t.shape, t.dtype, t.is_sparse) for t in op.tensors])
        known = self._digests.get(key)
        if known is None:
            if len(self._digests) >= _CACHED_VIEWS:
                self._digests.clear()
            described = repr((comparable(replace(op.signature, label="")), any(t.is_sparse for t in op.tensors)))
            known = self._digests[key] = hashlib.blake2b(described.encode(), digest_size=16).digest()
        return known

    def _announce(self, digest: bytes, parts: list[tuple[int, int]] | None, *, hold: bool = False) -> int:
        board = self.board
        board.announce(self.turn, digest)
        if parts is not None:
            board.write_table(self.turn, parts, hold=hold)
        board.post()
        return board.posted

    def _post(self) -> int:
        self.board.post()
        return self.board.posted

    def _agree(self, op: Collective, digest: bytes) -> Steps:
        """Everybody has announced: is it the same?"""
        if not self.board.agreed(self.turn, digest * self.size):
            yield from self._compare(op)

    def _compare(self, op: Collective) -> Steps:
        """Ranks have announced different collectives: tell each other which, and raise."""
        described = encode(op.signature, limit=self._plan.chunk - 8)
        described = len(described).to_bytes(8, "little") + described
        offset = self._plan.buffer(self.rank, 0)
        self._memory[offset : offset + len(described)] = described
        yield self._post()
        signatures = []
        for rank in range(self.size):
            offset = self._plan.buffer(rank, 0)
            length = int.from_bytes(self._memory[offset : offset + 8], "little")
            signatures.append(decode(bytes(self._memory[offset + 8 : offset + 8 + length]), rank=rank))
        error = mismatch(self.name, signatures, compared=[replace(s, label="") for s in signatures])
        raise error or CollectiveMismatch(
            f"{op} of {self.name}: some ranks bring sparse tensors, others dense ones. Use the same on all ranks.",
            ops=dict(enumerate(signatures)),
        )

    # -- the native ones -----------------------------------------------------------------------------------------------

    def _native(self, op: Collective, whole: Collective, digest: bytes) -> Steps:
        """One collective: `whole` is what the caller submitted, of which `op` may be a part."""
        kind = op.kind
        try:
            if kind is Kind.ALL_REDUCE:
                yield from self._all_reduce(op, whole, digest)
            elif kind is Kind.BARRIER:
                yield self._announce(digest, None)
                yield from self._agree(whole, digest)
            else:
                yield from self._exchange(op, whole, digest)
        finally:
            self.turn += 1

    def _all_reduce(self, op: Collective, whole: Collective, digest: bytes) -> Steps:
        t = flat(op.inputs[0])
        reduce_op = op.reduce_op
        assert reduce_op is not None
        nbytes, turn, plan = t.nbytes, self.turn, self._plan
        if nbytes <= SMALL:
            dtype = t.dtype
            self.view(plan.small(self.rank, turn), nbytes, dtype).copy_(t)
            yield self._announce(digest, None)
            yield from self._agree(whole, digest)
            combine(reduce_op, [self.view(plan.small(r, turn), nbytes, dtype) for r in range(self.size)], t)
            return
        offset = self.offset_in_heap(t)
        yield self._announce(digest, [(offset, nbytes)], hold=offset >= 0)
        yield from self._agree(whole, digest)
        fold = self._folds.get((reduce_op, t.dtype)) or self._new_fold(reduce_op, t.dtype)
        yield from self._reduce_large(t, fold)

    # -- the shortest way: see Note [Plain sums] -------------------------------------------------------------------------

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
        return self._small_sum(op, t, nbytes) if nbytes <= SMALL else self._large_sum(op, t, nbytes)

    def _small_sum(self, op: Collective, t: Tensor, nbytes: int) -> Steps:
        board, turn = self.board, self.turn
        try:
            key = (t.shape, t.dtype, op.reduce_op, turn & 1)
            digests, (first, *others, total), address = self._slots.get(key) or self._new_slots(op, key)
            ctypes.memmove(self._small[turn & 1], t.data_ptr(), nbytes)
            board.announce(turn, digests[:DIGEST])
            board.post()
            yield board.posted
            if not board.agreed(turn, digests):
                yield from self._compare(op)
            if others:
                quietly = self._quietly
                quietly(np.add, first, others[0], total)
                for other in others[1:]:
                    quietly(np.add, total, other, total)
                if op.reduce_op is _AVG:
                    divide(total, self.size, quietly)
                ctypes.memmove(t.data_ptr(), address, nbytes)
        finally:
            self.turn = turn + 1

    def _new_slots(self, op: Collective, key: tuple[object, ...]) -> tuple[bytes, list[np.ndarray[Any, Any]], int]:
        """The digests of a small sum, every rank's slot as an array and last of all a place for the result, and its address."""
        t = op.inputs[0]
        if len(self._slots) >= _CACHED_VIEWS // self.size:
            self._slots.clear()
        dtype = SUMMED[t.dtype]
        offsets = [self._plan.small(rank, self.turn) for rank in range(self.size)]
        slots = [np.frombuffer(self._memory, dtype, t.numel(), offset) for offset in offsets]
        total = np.empty(t.numel(), dtype)
        entry = self._digest(op) * self.size, [*slots, total], total.ctypes.data
        self._slots[key] = entry
        return entry

    def _large_sum(self, op: Collective, t: Tensor, nbytes: int) -> Steps:
        board, turn = self.board, self.turn
        try:
            digest = self._digest(op)
            offset = self.offset_in_heap(t)
            yield self._announce(digest, [(offset, nbytes)], hold=offset >= 0)
            if not board.agreed(turn, digest * self.size):
                yield from self._compare(op)
            reduce_op = op.reduce_op or _SUM
            fold = self._folds.get((reduce_op, t.dtype)) or self._new_fold(reduce_op, t.dtype)
            yield from self._reduce_large(t, fold)
        finally:
            self.turn = turn + 1

    def _reduce_large(self, t: Tensor, fold: Fold) -> Steps:
        """Everybody has announced where their tensor lies."""
        offsets = self.board.first_offsets(self.turn)
        if min(offsets) < 0:
            yield from self._all_reduce_chunks(flat(t), fold)
            return
        fold = self._compiled.get((fold.op, fold.dtype), fold)
        for pieces in self._blocks_of(offsets, t.nbytes, fold):
            fold.everywhere(pieces)
        self.board.post()
        yield self.board.posted

    def _new_fold(self, op: ReduceOp, dtype: torch.dtype) -> Fold:
        fold = self._folds[op, dtype] = Fold.of(op, dtype)
        return fold

    def _blocks_of(self, offsets: list[int], nbytes: int, fold: Fold) -> list[list[Piece]]:
        """This rank's share of the tensors at `offsets`, in blocks: one piece per rank each. See Note [One pass]."""
        key = (*offsets, nbytes, fold.dtype, fold.array, fold.block)
        known = self._blocks.get(key)
        if known is None:
            if len(self._blocks) >= _CACHED_VIEWS // 16:
                self._blocks.clear()
            low, high = _share(nbytes, self.rank, self.size, fold.dtype.itemsize)
            known = self._blocks[key] = [
                [self._piece(o + at, min(fold.block, high - at), fold) for o in offsets]
                for at in range(low, high, fold.block)
            ]
        return known

    def _piece(self, offset: int, nbytes: int, fold: Fold) -> Piece:
        """The segment's bytes from `offset`, as what `fold` works on."""
        if fold.array is None:
            return self.view(offset, nbytes, fold.dtype)
        key = (offset, nbytes, fold.array)
        known = self._arrays.get(key)
        if known is None:
            if len(self._arrays) >= _CACHED_VIEWS:
                self._arrays.clear()
            numel = nbytes // fold.array.itemsize
            known = self._arrays[key] = np.frombuffer(self._memory, fold.array, numel, offset)
        return known

    def _all_reduce_chunks(self, t: Tensor, fold: Fold) -> Steps:
        """See Note [Three buffers]."""
        rank, size, nbytes, item = self.rank, self.size, t.nbytes, t.element_size()
        source = t.data_ptr()
        whole: Piece = t if fold.array is None else t.numpy()
        places = [[self._plan.buffer(r, number) for number in range(BUFFERS)] for r in range(size)]
        chunk = self._plan.chunk
        count = -(-nbytes // chunk)
        full = [_share(chunk, r, size, item) for r in range(size)]
        last = [_share(nbytes - (count - 1) * chunk, r, size, item) for r in range(size)]

        def copy_in(number: int) -> int:
            """All but this rank's own share."""
            start, own = number * chunk, self._address + places[rank][number % BUFFERS]
            low, high = (full if number < count - 1 else last)[rank]
            ctypes.memmove(own, source + start, low)
            ctypes.memmove(own + high, source + start + high, min(chunk, nbytes - start) - high)
            return self._post()

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
            done = self._post()
            ctypes.memmove(source + start + low, self._address + buffers[rank] + low, high - low)
            yield done
            for r in range(size):
                if r != rank:
                    low, high = shares[r]
                    ctypes.memmove(source + start + low, self._address + buffers[r] + low, high - low)

    # -- everything that pulls parts -----------------------------------------------------------------------------------

    def _exchange(self, op: Collective, whole: Collective, digest: bytes) -> Steps:
        """Bring parts, pull parts: all the kinds that move data, and the reductions whose result each rank keeps a part of."""
        parts, places = self._parts(op)
        brought = [as_bytes(t) for t in parts]
        wanted = {rank: as_bytes(t) for rank, t in places.items()}
        total = sum(t.nbytes for t in brought)
        turn, hold = self.turn, False
        entries: list[tuple[int, int]] = []
        if total <= SMALL:
            at = self._plan.small(self.rank, turn)
            for t in brought:
                self.view(at, t.numel()).copy_(t)
                entries.append((at, t.numel()))
                at += t.numel()
        else:
            entries = [(self.offset_in_heap(t), t.numel()) for t in brought]
            hold = any(offset >= 0 for offset, _ in entries)
        yield self._announce(digest, entries, hold=hold)
        yield from self._agree(whole, digest)
        tables = [self.board.read_table(rank, turn) for rank in range(self.size)]
        sources = {rank: tables[rank].part_for(self.rank) for rank in wanted}
        wrong = {r: length for r, (_, length) in sources.items() if length != wanted[r].numel()}
        if wrong:
            wanted = {}
        own = brought[0] if len(brought) == 1 else brought[self.rank] if brought else None
        chunk = self._plan.chunk
        capacity = chunk if max(len(table.flat) for table in tables) <= 2 else chunk // self.size // 64 * 64
        staged = max(table.staged for table in tables)
        low = 0
        for number in range(-(-staged // capacity)):
            low = number * capacity
            for i, t in enumerate(brought):
                if entries[i][0] < 0 and low < t.numel():
                    window = t[low : low + capacity]
                    self.view(self._plan.buffer(self.rank, number) + i * capacity, window.numel()).copy_(window)
            yield self._post()
            self._pull(op, wanted, sources, own, low, low + capacity, self._windows(tables, number, capacity))
            low += capacity
        longest = max((t.numel() for t in wanted.values()), default=0)
        if low < longest:  # what did not have to be staged
            self._pull(op, wanted, sources, own, low, longest, {})
        if any(table.hold for table in tables):
            yield self._post()
        if wrong:
            raise CollectiveMismatch(
                f"{op} of {self.name}: rank {self.rank} expects other sizes than it was sent: "
                + "; ".join(f"{wrong[r]} bytes from rank {r} where there is room for {places[r].nbytes}" for r in wrong)
                + ". Sizes that ranks expect of each other must agree."
            )

    def _windows(self, tables: Sequence[Table], number: int, capacity: int) -> dict[int, int]:
        """Where, in this window, each rank has staged what is meant for this one."""
        index = {rank: self.rank if len(table.flat) > 2 else 0 for rank, table in enumerate(tables)}
        return {rank: self._plan.buffer(rank, number) + i * capacity for rank, i in index.items()}

    def _pull(
        self,
        op: Collective,
        wanted: dict[int, Tensor],
        sources: dict[int, tuple[int, int]],
        own: Tensor | None,
        low: int,
        high: int,
        windows: dict[int, int],
    ) -> None:
        """Fetch bytes `low` to `high` of what is wanted of each rank."""
        pieces: dict[int, Tensor] = {}
        for rank, place in wanted.items():
            end = min(high, place.numel())
            if low >= end:
                continue
            offset, _ = sources[rank]
            if rank == self.rank and own is not None:
                pieces[rank] = own[low:end]
            else:
                at = offset + low if offset >= 0 else windows[rank]
                pieces[rank] = self._whole[at : at + end - low]
        if not pieces:
            return
        if op.kind.reduces:
            assert op.reduce_op is not None
            target = op.outputs[0].detach()
            out = wanted[self.rank][low : low + pieces[self.rank].numel()].view(target.dtype)
            parts = [pieces[rank].view(target.dtype) for rank in range(self.size)]
            # The output may be this rank's own part (Note [In place] in aliasing.py): hence not into `out` at once.
            result = parts[0].clone() if self.size > 1 else parts[0]
            combine(op.reduce_op, [result, *parts[1:]], result)
            out.copy_(result)
            return
        for rank, piece in pieces.items():
            place = wanted[rank][low : low + piece.numel()]
            if place.data_ptr() != piece.data_ptr():
                place.copy_(piece)

    def _parts(self, op: Collective) -> tuple[list[Tensor], dict[int, Tensor]]:
        """What this rank brings (one part for all, or one per rank), and where it wants what of whom."""
        kind, everybody = op.kind, range(self.size)
        if kind is Kind.BROADCAST:
            at_root = self.rank == op.root
            return [op.inputs[0]] if at_root else [], {} if at_root else {op.root or 0: op.outputs[0]}
        if kind is Kind.ALL_GATHER:
            return [op.inputs[0]], dict(enumerate(op.outputs))
        if kind is Kind.ALL_GATHER_INTO_TENSOR:
            return [op.inputs[0]], dict(enumerate(_equal(op.outputs[0], self.size)))
        if kind is Kind.REDUCE_SCATTER:
            return list(op.inputs), dict.fromkeys(everybody, op.outputs[0])
        if kind is Kind.REDUCE_SCATTER_TENSOR:
            return list(_equal(op.inputs[0], self.size)), dict.fromkeys(everybody, op.outputs[0])
        if kind is Kind.ALL_TO_ALL:
            return list(op.inputs), dict(enumerate(op.outputs))
        if kind is Kind.ALL_TO_ALL_SINGLE:
            outputs, inputs = op.splits or ((), ())
            brought = cut(op.inputs[0], inputs, self.size)
            return list(brought), dict(enumerate(cut(op.outputs[0], outputs, self.size)))
        if kind is Kind.GATHER:
            return [op.inputs[0]], dict(enumerate(op.outputs)) if self.rank == op.root else {}
        if kind is Kind.SCATTER:
            return list(op.inputs) if self.rank == op.root else [], {op.root or 0: op.outputs[0]}
        raise InternalError(f"{op}: there is no program for it.")


def _equal(t: Tensor, size: int) -> list[Tensor]:
    """A plain tensor in one flat part per rank."""
    row = flat(t)
    part = row.numel() // size
    return [row[r * part : (r + 1) * part] for r in range(size)]


def _share(nbytes: int, rank: int, size: int, item: int) -> tuple[int, int]:
    """The bytes, from and to, that `rank` reduces: whole cache lines, and all of them by somebody."""
    line = max(64, item)
    share = -(-nbytes // (size * line)) * line
    return min(rank * share, nbytes), min((rank + 1) * share, nbytes)
