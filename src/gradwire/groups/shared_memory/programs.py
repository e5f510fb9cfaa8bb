"""Collectives over shared memory, as programs: generators that yield a number of signals and go on once all ranks have given it.

A rank *announces* a collective (a table of what it is and where its parts lie), *signals*, and waits for the others'
signals; then it *pulls* what it needs straight from where the others have it. A part lies in one of three places, which each rank
chooses for itself and writes into its table:

- up to SMALL bytes: copied into the rank's small slot together with the announcement, so that one signal is enough;
- in the rank's heap: where it is; nothing is copied, and all ranks signal once more when they have read it;
- elsewhere: copied window by window through the rank's staging buffers.

This module picks the program and has the exchanges; `all_reduce.py` has the announcement and the all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.aliasing import apart, is_native
from gradwire.collectives.lower import as_bytes, flat, lower
from gradwire.collectives.reference import cut, store, writes
from gradwire.errors import CollectiveMismatch, GroupError, InternalError
from gradwire.groups.shared_memory.all_reduce import AllReduce, Steps
from gradwire.groups.shared_memory.board import SMALL
from gradwire.groups.shared_memory.fold import combine

_NATIVE = frozenset({
    OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.ALL_GATHER, OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER,
    OpKind.REDUCE_SCATTER_TENSOR, OpKind.ALL_TO_ALL, OpKind.ALL_TO_ALL_SINGLE, OpKind.GATHER, OpKind.SCATTER, OpKind.BARRIER,
})  # fmt: skip
takes = partial(is_native, kinds=_NATIVE)
"""There is a program for these; the rest is made of them."""


@dataclass(slots=True)
class _Wanted:
    """What this rank needs of others, as flat bytes."""

    op: Collective
    places: dict[int, Tensor]
    """Where each rank's data goes."""
    own: Tensor | None
    """What it has for itself."""
    sources: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Offset and length of what a rank has for this one; the offset is -1 if it goes through the staging buffers."""


class Programs(AllReduce):
    """The programs of one rank of one group."""

    def carry_out(self, op: Collective) -> Steps:
        if op.device.type != "cpu":
            yield from self._on_host(op)
            return
        plain = self.plain_sum(op)
        if plain is not None:
            yield from plain
            return
        digest = self.digest(op)
        yield from writes(op.outputs, self._by_parts(apart(op, self.rank), digest))

    def _by_parts(self, op: Collective, digest: bytes) -> Steps:
        try:
            for step in [op] if takes(op) else lower(op, rank=self.rank, size=self.size, takes=takes):
                steps = self.general if step.kind is OpKind.ALL_REDUCE else self._exchange
                yield from self.counted(steps(step, op, digest))
        except CollectiveMismatch as error:
            if takes(op) or error.ops or op.kind is not OpKind.ALL_REDUCE:
                raise
            # Sparse tensors of different sparse dimensions: not all ranks notice, and those that did not go on to the next step.
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

    # -- exchanges: all the collectives that move data, and the reductions of whose result each rank keeps a part -------------

    def _exchange(self, op: Collective, whole: Collective, digest: bytes) -> Steps:
        """`whole` is what the caller submitted, of which `op` may be a part."""
        parts, places = self._parts(op)
        brought = [as_bytes(t) for t in parts]
        own = brought[0] if len(brought) == 1 else brought[self.rank] if brought else None
        wanted = _Wanted(op, {rank: as_bytes(t) for rank, t in places.items()}, own)
        entries, hold = self._place(brought)
        yield self.announce(digest, entries, hold=hold)
        yield from self.check(whole, digest)
        tables = [self.board.read_table(rank, self.board.turn) for rank in range(self.size)]
        # A single part is meant for every rank; else there is one for each.
        index = {rank: self.rank if len(parts) > 1 else 0 for rank, (_, parts) in enumerate(tables)}
        wanted.sources = {rank: (tables[rank][1] or [(-1, 0)])[index[rank]] for rank in wanted.places}
        wrong = {r: length for r, (_, length) in wanted.sources.items() if length != wanted.places[r].numel()}
        if wrong:
            wanted.places = {}
        several = any(len(parts) > 1 for _, parts in tables)
        capacity = self._plan.chunk // self.size // 64 * 64 if several else self._plan.chunk
        staged = max((length for _, parts in tables for offset, length in parts if offset < 0), default=0)
        low = 0
        for number in range(-(-staged // capacity)):
            low = number * capacity
            for i, t in enumerate(brought):
                if entries[i][0] < 0 and low < t.numel():
                    window = t[low : low + capacity]
                    at = self._plan.buffer(self.rank, number) + i * capacity
                    self.board.tensor(at, window.numel()).copy_(window)
            yield self.board.signal()
            # Where, in this window, each rank has staged what is meant for this one.
            windows = {rank: self._plan.buffer(rank, number) + i * capacity for rank, i in index.items()}
            self._pull(wanted, low, low + capacity, windows)
            low += capacity
        longest = max((t.numel() for t in wanted.places.values()), default=0)
        if low < longest:  # what did not have to be staged
            self._pull(wanted, low, longest, {})
        if any(hold for hold, _ in tables):
            yield self.board.signal()
        if wrong:
            which = [f"{wrong[r]} bytes from rank {r} where there is room for {places[r].nbytes}" for r in wrong]
            raise CollectiveMismatch(
                f"{op} of {self.name}: rank {self.rank} expects other sizes than it was sent: {'; '.join(which)}. Sizes that ranks "
                "expect of each other must agree."
            )

    def _place(self, brought: Sequence[Tensor]) -> tuple[list[tuple[int, int]], bool]:
        """Where each part lies (-1: it will be staged), and its length; whether others read any from the caller's memory."""
        if sum(t.nbytes for t in brought) > SMALL:
            entries = [(self.board.offset_in_heap(t), t.numel()) for t in brought]
            return entries, any(offset >= 0 for offset, _ in entries)
        entries = []
        at = self._plan.small(self.rank, self.board.turn)
        for t in brought:
            self.board.tensor(at, t.numel()).copy_(t)
            entries.append((at, t.numel()))
            at += t.numel()
        return entries, False

    def _pull(self, wanted: _Wanted, low: int, high: int, windows: dict[int, int]) -> None:
        """Fetch bytes `low` to `high` of what is wanted of each rank."""
        pieces: dict[int, Tensor] = {}
        for rank, place in wanted.places.items():
            end = min(high, place.numel())
            if low >= end:
                continue
            offset, _ = wanted.sources[rank]
            if rank == self.rank and wanted.own is not None:
                pieces[rank] = wanted.own[low:end]
            else:
                at = offset + low if offset >= 0 else windows[rank]
                pieces[rank] = self.board.whole[at : at + end - low]
        if pieces and wanted.op.kind.reduces:
            self._reduce(wanted, low, pieces)
            return
        for rank, piece in pieces.items():
            place = wanted.places[rank][low : low + piece.numel()]
            if place.data_ptr() != piece.data_ptr():
                place.copy_(piece)

    def _reduce(self, wanted: _Wanted, low: int, pieces: dict[int, Tensor]) -> None:
        reduce_op = wanted.op.reduce_op
        assert reduce_op is not None
        dtype = wanted.op.outputs[0].dtype
        out = wanted.places[self.rank][low : low + pieces[self.rank].numel()].view(dtype)
        parts = [pieces[rank].view(dtype) for rank in range(self.size)]
        # The output may be this rank's own part (Note [In place] in aliasing.py): hence not into `out` at once.
        result = parts[0].clone() if self.size > 1 else parts[0]
        combine(reduce_op, [result, *parts[1:]], result)
        out.copy_(result)

    def _parts(self, op: Collective) -> tuple[list[Tensor], dict[int, Tensor]]:
        """What this rank brings (one part for all, or one per rank), and where each rank's data goes."""
        kind, ranks = op.kind, range(self.size)
        if kind is OpKind.BARRIER:
            return [], {}
        if kind is OpKind.BROADCAST:
            at_root = self.rank == op.root
            return [op.inputs[0]] if at_root else [], {} if at_root else {op.root or 0: op.outputs[0]}
        if kind is OpKind.ALL_GATHER:
            return [op.inputs[0]], dict(enumerate(op.outputs))
        if kind is OpKind.ALL_GATHER_INTO_TENSOR:
            return [op.inputs[0]], dict(enumerate(_equal(op.outputs[0], self.size)))
        if kind is OpKind.REDUCE_SCATTER:
            return list(op.inputs), dict.fromkeys(ranks, op.outputs[0])
        if kind is OpKind.REDUCE_SCATTER_TENSOR:
            return list(_equal(op.inputs[0], self.size)), dict.fromkeys(ranks, op.outputs[0])
        if kind is OpKind.ALL_TO_ALL:
            return list(op.inputs), dict(enumerate(op.outputs))
        if kind is OpKind.ALL_TO_ALL_SINGLE:
            outputs, inputs = op.splits or ((), ())
            brought = cut(op.inputs[0], inputs, self.size)
            return list(brought), dict(enumerate(cut(op.outputs[0], outputs, self.size)))
        if kind is OpKind.GATHER:
            return [op.inputs[0]], dict(enumerate(op.outputs)) if self.rank == op.root else {}
        if kind is OpKind.SCATTER:
            return list(op.inputs) if self.rank == op.root else [], {op.root or 0: op.outputs[0]}
        raise InternalError(f"{op}: there is no program for it.")


def _equal(t: Tensor, size: int) -> list[Tensor]:
    row = flat(t)
    part = row.numel() // size
    return [row[r * part : (r + 1) * part] for r in range(size)]
