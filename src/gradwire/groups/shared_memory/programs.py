"""Collectives over shared memory, as programs: generators that yield a number of signals and go on once all ranks have given it.

A rank *announces* a collective (a table of what it is and where its parts lie), *signals*, and waits for the others' signals; then
it *pulls* what it needs straight from where the others have it. A part lies in one of three places, which each rank chooses:

- what fits into the rank's small slot: copied there together with the announcement, so that one signal is enough;
- in the rank's heap: where it is; nothing is copied, and all ranks signal once more when they have read it;
- elsewhere: copied window by window through the rank's staging buffers.

Note [Two windows]
A rank stages window k + 1 where window k - 1 was. It has seen every rank signal window k, which each did after pulling k - 1. While
it stages one, the others pull the one before, so windows of two ranks are small. More ranks mean more wake-ups, so larger windows.

This module picks the program and has the exchanges; `all_reduce.py` has the announcement and the all-reduce.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.aliasing import apart, is_native
from gradwire.collectives.lower import flat, lower, on_copies
from gradwire.collectives.reference import store, writes
from gradwire.errors import CollectiveMismatch, GroupError, InternalError
from gradwire.groups.shared_memory.all_reduce import AllReduce, Steps, written
from gradwire.groups.shared_memory.fold import Fold, Piece

_NATIVE = frozenset(OpKind) - {OpKind.REDUCE, OpKind.SEND, OpKind.RECV}
_UNIFORM = frozenset({OpKind.BROADCAST, OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER_TENSOR})
"""Exchanges in which the ranks bring equal sizes, so that each can compute where small parts lie."""
takes = partial(is_native, kinds=_NATIVE)
"""There is a program for these; the rest is made of them."""


Part = tuple[int, int]
"""Bytes of a tensor: their address, and how many."""
Places = dict[int, Part]
"""Where the data of each rank goes."""


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
        factor = op.factor.cpu() if isinstance(op.factor, Tensor) else op.factor
        here = replace(on_copies(op, lambda t: t.detach().cpu()), factor=factor)
        yield from self.carry_out(here)
        for t, copy in zip(op.outputs, here.outputs, strict=True):
            store(t if t.is_sparse else t.detach(), copy.to(t.device))
        if op.device.type == "cuda":  # the caller may go on in another stream than that of the thread that drives
            torch.cuda.current_stream(op.device).synchronize()

    def _exchange(self, op: Collective, whole: Collective, digest: bytes) -> Steps:
        """`whole` is what the caller submitted, of which `op` may be a part."""
        rank, board, plan = self.rank, self.board, self._plan
        parts, places = self._parts(op)
        several = len(parts) > 1
        own = parts[rank if several else 0][0] if parts else 0
        pull = self._reduce if op.kind.reduces else self._copy
        entries, hold = self._place(parts)
        yield self.announce(digest, entries, hold=hold)
        yield from self.check(whole, digest)
        if op is whole and op.kind in _UNIFORM and (nbytes := op.inputs[0].nbytes) <= plan.slot:
            at = rank * nbytes // self.size if several else 0
            pull(op, places, own, (0, nbytes * self.size), [plan.small(r, board.turn) + at for r in range(self.size)])
            if places:
                written(*op.outputs)
            return
        tables = [board.read_table(r, board.turn) for r in range(self.size)]
        wrong = {r: tables[r].length for r, (_, nbytes) in places.items() if tables[r].length != nbytes}
        capacity = plan.window // self.size // 64 * 64 if any(table.several for table in tables) else plan.window
        low = 0
        for number in range(-(-max(table.staged for table in tables) // capacity)):
            low, buffer = number * capacity, board.address + plan.staged(rank, number)
            for i, (source, nbytes) in enumerate(parts):
                if entries[i][0] < 0 and low < nbytes and not (several and i == rank):
                    ctypes.memmove(buffer + i * capacity, source + low, min(capacity, nbytes - low))
            yield board.signal()
            if not wrong:
                windows = [plan.staged(r, number) + table.several * rank * capacity for r, table in enumerate(tables)]
                sources = [w if t.offset < 0 else t.offset + low for t, w in zip(tables, windows, strict=True)]
                pull(op, places, own, (low, low + capacity), sources)
            low += capacity
        longest = max((nbytes for _, nbytes in places.values()), default=0)
        if low < longest and not wrong:  # what did not have to be staged
            pull(op, places, own, (low, longest), [table.offset + low for table in tables])
        if places and not wrong:
            written(*op.outputs)
        if any(table.hold for table in tables):
            yield board.signal()
        if wrong:
            which = [f"{wrong[r]} bytes from rank {r} where there is room for {places[r][1]}" for r in wrong]
            raise CollectiveMismatch(
                f"{op} of {self.name}: rank {rank} expects other sizes than it was sent: {'; '.join(which)}. Sizes that ranks "
                "expect of each other must agree."
            )

    def _place(self, parts: Sequence[Part]) -> tuple[list[tuple[int, int]], bool]:
        """Where each part lies (-1: it will be staged), and its length; whether others read any from the caller's memory."""
        board = self.board
        if sum(nbytes for _, nbytes in parts) > self._plan.slot:
            entries = [(board.offset_in_heap(address), nbytes) for address, nbytes in parts]
            return entries, any(offset >= 0 for offset, _ in entries)
        entries = []
        at = self._plan.small(self.rank, board.turn)
        for address, nbytes in parts:
            ctypes.memmove(board.address + at, address, nbytes)
            entries.append((at, nbytes))
            at += nbytes
        return entries, False

    def _copy(self, op: Collective, places: Places, own: int, span: tuple[int, int], sources: list[int]) -> None:
        """Fetch bytes `span` of what each rank has for this one: from `sources`, offsets in the segment, and its `own` memory."""
        low, high = span
        for rank, (target, nbytes) in places.items():
            count = min(high, nbytes) - low
            source = own + low if rank == self.rank else self.board.address + sources[rank]
            if count > 0 and source != target + low:
                ctypes.memmove(target + low, source, count)

    def _reduce(self, op: Collective, places: Places, own: int, span: tuple[int, int], sources: list[int]) -> None:
        """The same, reduced into the output."""
        rank, (target, nbytes), low = self.rank, places[self.rank], span[0]
        high = min(span[1], nbytes)
        if low >= high or op.reduce_op is None:
            return
        mine, out = flat(op.inputs[rank if len(op.inputs) > 1 else 0]), flat(op.outputs[0])
        fold, item, start = Fold.of(op.reduce_op, out.dtype), out.element_size(), own - mine.data_ptr()
        pieces: list[Piece] = [self._piece(source, high - low, fold) for source in sources]
        pieces[rank] = mine[(start + low) // item : (start + high) // item]
        if rank and own == target:  # Note [In place] in aliasing.py; only the first piece may be the result
            pieces[rank] = pieces[rank].clone()
        result: Piece = out[low // item : high // item]
        if fold.array is not None:
            pieces[rank], result = pieces[rank].numpy(), result.numpy()
        fold(pieces, result)

    def _parts(self, op: Collective) -> tuple[list[Part], Places]:
        """What this rank brings (one part for all, or one per rank), and where each rank's data goes."""
        kind, rank, size = op.kind, self.rank, self.size
        if kind is OpKind.BARRIER:
            return [], {}
        if kind is OpKind.BROADCAST:
            at_root, part = rank == op.root, _part(op.inputs[0])
            return [part] if at_root else [], {} if at_root else {op.root or 0: part}
        if kind is OpKind.ALL_GATHER_INTO_TENSOR:
            return [_part(op.inputs[0])], dict(enumerate(_cut(op.outputs[0], (), size)))
        if kind is OpKind.REDUCE_SCATTER_TENSOR:
            return _cut(op.inputs[0], (), size), dict.fromkeys(range(size), _part(op.outputs[0]))
        if kind is OpKind.ALL_TO_ALL_SINGLE:
            outputs, inputs = op.splits or ((), ())
            return _cut(op.inputs[0], inputs, size), dict(enumerate(_cut(op.outputs[0], outputs, size)))
        brought, places = [*map(_part, op.inputs)], [*map(_part, op.outputs)]
        if kind is OpKind.ALL_GATHER or kind is OpKind.ALL_TO_ALL:
            return brought, dict(enumerate(places))
        if kind is OpKind.REDUCE_SCATTER:
            return brought, dict.fromkeys(range(size), places[0])
        if kind is OpKind.GATHER:
            return brought, dict(enumerate(places)) if rank == op.root else {}
        if kind is OpKind.SCATTER:
            return brought if rank == op.root else [], {op.root or 0: places[0]}
        raise InternalError(f"{op}: there is no program for it.")


def _part(t: Tensor) -> Part:
    return t.data_ptr(), t.nbytes


def _cut(t: Tensor, splits: Sequence[int], size: int) -> list[Part]:
    """One part per rank: so many rows of `t` each, or equal parts."""
    start, nbytes = _part(t)
    if not splits:
        part = nbytes // size
        return [(start + r * part, part) for r in range(size)]
    row = nbytes // max(1, sum(splits))
    ends = [*accumulate(splits, initial=0)]
    return [(start + low * row, (high - low) * row) for low, high in pairwise(ends)]
