"""Every collective in two levels: generators that yield steps, each a collective of the host's own group or of a rail.

The layout determines the ranks of a step (Note [Rails] in `collectives/layout.py`); `group.py` submits it and handles failures.
This module uses no group, thread or engine, so it is tested with simulated ranks.

Note [All-reduce in two levels]
Reduce-scatter inside the host, one slice for each carrier; all-reduce of each slice in its rail; all-gather inside. With h hosts,
n bytes leave and enter a host 2 (h - 1) / h times, however many ranks it has. All rails work at the same time, so the link is
filled by as many connections as there are carriers. Inside, with shared memory, each byte is read and written once in each half.

Note [Rounded once on each level]
float16, bfloat16 and float8 are summed in float32 and rounded, once in the host and once between hosts. Averages are taken on both
levels, so that no sum overflows; where hosts differ in size that would weigh ranks differently, and all is done in float32.

Note [Moving pieces]
In gather, scatter and all-to-all every rank has a piece, perhaps empty, for every other. A piece goes to its sender's carrier, in
the rail to the other host, and there to its receiver; pieces for the same host travel as one message. The ranks that a piece passes
through must know its size: in gathers and scatters all are equal, in an all-to-all the ranks exchange them first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout, OpKind, ReduceOp, Scope, build
from gradwire.collectives.aliasing import is_native
from gradwire.collectives.lower import flat, lower, on_copies
from gradwire.collectives.reference import perform, store, working_dtype, writes
from gradwire.errors import CollectiveMismatch

SMALLEST_SLICE = 1024
"""Elements below which a slice is not divided further: a shorter message costs as much."""

Sizes = Callable[[int, int], int]
"""How many elements one rank has for another."""


class Step(NamedTuple):
    """One collective of one of the two groups that a rank is in."""

    where: Literal["inside", "across"]
    op: Collective


Steps = Generator[Step, None, None]


class TwoLevel:
    """The programs of one rank: it knows its host, its index there, and the ranks it shares them with."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.size = layout.size
        self.host, self.index = layout.place(rank)
        self.mates = layout.hosts[self.host]
        self.width = layout.width
        self.carries = self.index < self.width
        self.alone = len(self.mates) == 1
        self.one_group = self.mates == tuple(range(self.size))
        self.others = [h for h in range(len(layout.hosts)) if h != self.host]

    def carry_out(self, op: Collective) -> Steps:
        """The steps that make up `op`; when they are done its outputs hold the result."""
        return writes(op.outputs, self._steps(op))

    def _steps(self, op: Collective) -> Steps:
        part = op.among(Scope.WORLD)
        if op.scope is Scope.INSIDE or (op.scope is Scope.WORLD and self.one_group):
            yield Step("inside", part)
        elif op.scope is Scope.WORLD:
            for step in lower(op, rank=self.rank, size=self.size, takes=takes):
                yield from self._native(step)
        elif self.others:
            yield Step("across", part)
        else:  # with a single host there is no group between hosts
            perform([part])

    def _native(self, op: Collective) -> Steps:
        if op.reduce_op is not ReduceOp.AVG or self.layout.even or _is_working(op.inputs[0].dtype):
            yield from _PROGRAMS[op.kind](self, op)
            return
        wide = on_copies(op, lambda t: t.to(working_dtype(t.dtype)))  # see Note [Rounded once on each level]
        yield from _PROGRAMS[op.kind](self, wide)
        for t, result in zip(op.outputs, wide.outputs, strict=True):
            store(t, result)

    def _bundle(self, sizes: Sequence[int], host: int, rail: int) -> int:
        """The size of what the ranks of a host that use `rail` have."""
        return sum(sizes[rank] for rank in self.layout.rail(host, rail))

    def _sizes_carried(self, size_of: Callable[[int], int]) -> list[int]:
        """How much this rank carries for each rank of its host."""
        return [size_of(m) if self.carries and i % self.width == self.index else 0 for i, m in enumerate(self.mates)]

    def _to_carriers(self, mine: Tensor, size_of: Callable[[int], int], label: str) -> Generator[Step, None, Tensor]:
        """Hand `mine` to this rank's carrier; a carrier gets what its rail has brought, in one row."""
        if len(self.mates) == self.width:
            return mine
        sizes = self._sizes_carried(size_of)
        row = mine.new_empty(sum(sizes))
        pieces = [mine if i == self.index % self.width else mine[:0] for i in range(len(self.mates))]
        yield Step("inside", build.all_to_all(row.split(sizes), pieces, label=label))
        return row

    def _gather(self, op: Collective) -> Steps:
        mine, root = flat(op.inputs[0]), op.root or 0
        n = mine.numel()
        pieces = [mine if rank == root else mine[:0] for rank in range(self.size)]
        places = [flat(t) for t in op.outputs] or [mine[:0]] * self.size
        yield from self._move(places, pieces, lambda source, target: n if target == root else 0, op.label)

    def _scatter(self, op: Collective) -> Steps:
        place, root = flat(op.outputs[0]), op.root or 0
        n = place.numel()
        pieces = [flat(t) for t in op.inputs] or [place[:0]] * self.size
        places = [place if rank == root else place[:0] for rank in range(self.size)]
        yield from self._move(places, pieces, lambda source, target: n if source == root else 0, op.label)

    def _move(self, places: Sequence[Tensor], pieces: Sequence[Tensor], sizes: Sizes, label: str) -> Steps:
        """Bring `pieces[rank]` of every rank to each rank's `places[sender]`. See Note [Moving pieces]."""
        rail, hosts = self.index % self.width, self.layout.hosts
        far = [rank for h in self.others for rank in hosts[h]]
        packed = torch.cat([pieces[rank] for rank in far]) if far else pieces[0][:0]
        brought = yield from self._to_carriers(packed, lambda rank: sum(sizes(rank, to) for to in far), label)
        # In the rail: for each other host, what the ranks of this rail have for its ranks; and from each, the reverse.
        arrived: dict[tuple[int, int], Tensor] = {}
        if self.carries and self.others:
            crew = self.layout.rail(self.host, rail)
            keys = [(source, to) for source in crew for to in far]
            leaving = dict(zip(keys, brought.split([sizes(*key) for key in keys]), strict=True))
            messages = [
                torch.cat([brought[:0], *(leaving[s, to] for s in crew for to in hosts[h] if h != self.host)])
                for h in range(len(hosts))
            ]
            expected = [
                [(s, to) for s in self.layout.rail(h, rail) for to in self.mates] if h != self.host else []
                for h in range(len(hosts))
            ]
            lengths = [sum(sizes(*key) for key in keys) for keys in expected]
            row = packed.new_empty(sum(lengths))
            yield Step("across", build.all_to_all(row.split(lengths), messages, label=label))
            keys = [key for keys in expected for key in keys]
            arrived = dict(zip(keys, row.split([sizes(*key) for key in keys]), strict=True))
        yield from self._place(
            places, lambda sender, to: pieces[to] if sender == self.rank else arrived[sender, to], sizes, label
        )

    def _place(self, places: Sequence[Tensor], piece: Callable[[int, int], Tensor], sizes: Sizes, label: str) -> Steps:
        """In the host: each rank's own pieces for its mates, and what it has brought from other hosts."""

        def senders(index: int) -> list[int]:
            far = [s for h in self.others for s in self.layout.rail(h, index)] if index < self.width else []
            return [self.mates[index], *far]

        outgoing = [torch.cat([piece(s, to) for s in senders(self.index)]) for to in self.mates]
        lengths = [sum(sizes(s, self.rank) for s in senders(i)) for i in range(len(self.mates))]
        row = outgoing[0].new_empty(sum(lengths))
        if self.alone:
            row = outgoing[0]
        else:
            yield Step("inside", build.all_to_all(row.split(lengths), outgoing, label=label))
        order = [s for i in range(len(self.mates)) for s in senders(i)]
        received = dict(zip(order, row.split([sizes(s, self.rank) for s in order]), strict=True))
        wrong = {s: t.numel() for s, t in received.items() if t.numel() != places[s].numel()}
        if wrong:
            odd = [f"{n} elements from rank {s} where there is room for {places[s].numel()}" for s, n in wrong.items()]
            raise CollectiveMismatch(
                f"rank {self.rank} expects other sizes than it was sent: {'; '.join(odd)}. Sizes that ranks expect of each other "
                "must agree."
            )
        for sender, t in received.items():
            store(places[sender], t)

    def _slices(self, t: Tensor) -> list[Tensor]:
        """One part of `t` for each rank of this host; empty for ranks that are not carriers."""
        share = max(-(-t.numel() // self.width), SMALLEST_SLICE)
        return [t[i * share : (i + 1) * share] if i < self.width else t[:0] for i in range(len(self.mates))]

    def _all_reduce(self, op: Collective) -> Steps:
        """See Note [All-reduce in two levels]."""
        t, label, (each, last) = flat(op.inputs[0]), op.label, self._levels(op)
        slices = self._slices(t)
        mine = slices[self.index]
        if not self.alone:
            yield Step("inside", build.reduce_scatter(mine, slices, op=each, label=label))
        if mine.numel():
            if self.others:
                yield Step("across", build.all_reduce(mine, op=each, label=label))
            if last != 1:
                mine.div_(last)
        if not self.alone:
            yield Step("inside", build.all_gather(slices, mine, label=label))

    def _levels(self, op: Collective) -> tuple[ReduceOp, int]:
        """The reduction on each level, and the divisor of the result. See Note [Rounded once on each level]."""
        if op.reduce_op is ReduceOp.AVG and _is_working(op.inputs[0].dtype):
            return ReduceOp.SUM, self.size
        return op.reduce_op or ReduceOp.SUM, 1

    def _broadcast(self, op: Collective) -> Steps:
        """Broadcast inside the root's host, one slice per rail between hosts, then all-gather the slices inside the others."""
        t, label, (host, index) = flat(op.inputs[0]), op.label, self.layout.place(op.root or 0)
        slices = self._slices(t)
        mine = slices[self.index]
        if host == self.host and not self.alone:
            yield Step("inside", build.broadcast(t, src=index, label=label))
        if self.others and mine.numel():
            yield Step("across", build.broadcast(mine, src=host, label=label))
        if host != self.host and not self.alone:
            yield Step("inside", build.all_gather(slices, mine, label=label))

    def _barrier(self, op: Collective) -> Steps:
        if not self.alone:
            yield Step("inside", op)
        if self.others and self.index == 0:
            yield Step("across", op)
        if self.others and not self.alone:
            yield Step("inside", op)

    def _all_gather(self, op: Collective) -> Steps:
        """Gather on the carriers, all-gather a bundle per host in each rail, then all-gather the bundles inside."""
        mine, label = flat(op.inputs[0]), op.label
        sizes, hosts = [t.numel() for t in op.outputs], range(len(self.layout.hosts))
        per_rail = [[self._bundle(sizes, h, rail) for h in hosts] for rail in range(self.width)]
        bundle = yield from self._to_carriers(mine, lambda rank: sizes[rank], label)
        received = mine.new_empty(sum(per_rail[self.index])) if self.carries else mine[:0]
        if self.carries and self.others:
            yield Step("across", build.all_gather(received.split(per_rail[self.index]), bundle, label=label))
        elif self.carries:
            received.copy_(bundle)
        wholes = [mine.new_empty(sum(per_rail[i]) if i < self.width else 0) for i in range(len(self.mates))]
        if self.alone:
            wholes = [received]
        else:
            yield Step("inside", build.all_gather(wholes, received, label=label))
        for rail in range(self.width):
            ranks = [rank for h in hosts for rank in self.layout.rail(h, rail)]
            for rank, piece in zip(ranks, wholes[rail].split([sizes[rank] for rank in ranks]), strict=True):
                store(op.outputs[rank], piece)

    def _reduce_scatter(self, op: Collective) -> Steps:
        """Reduce a bundle per carrier inside the host, then in its rail, then scatter it to the ranks of the host."""
        output, inputs = flat(op.outputs[0]), [flat(t) for t in op.inputs]
        label, (each, last) = op.label, self._levels(op)
        hosts = range(len(self.layout.hosts))
        by_rail = [
            torch.cat([inputs[rank] for h in hosts for rank in self.layout.rail(h, rail)]) for rail in range(self.width)
        ]
        by_rail += [output[:0]] * (len(self.mates) - self.width)
        mine = by_rail[self.index]
        if not self.alone:
            yield Step("inside", build.reduce_scatter(mine, by_rail, op=each, label=label))
        bundle = mine
        if self.carries and self.others:
            sizes = [t.numel() for t in inputs]
            parts = mine.split([self._bundle(sizes, h, self.index) for h in hosts])
            bundle = mine.new_empty(parts[self.host].numel())
            yield Step("across", build.reduce_scatter(bundle, parts, op=each, label=label))
        if last != 1:
            bundle.div_(last)
        if len(self.mates) == self.width:
            store(output, bundle)
        else:  # the way back: a carrier hands each rank of its rail its piece
            places = [output if i == self.index % self.width else output[:0] for i in range(len(self.mates))]
            pieces = bundle.split(self._sizes_carried(lambda rank: inputs[rank].numel()))
            yield Step("inside", build.all_to_all(places, pieces, label=label))

    def _all_to_all(self, op: Collective) -> Steps:
        """The ranks exchange the sizes of all pieces first: see Note [Moving pieces]."""
        places, pieces = [flat(t) for t in op.outputs], [flat(t) for t in op.inputs]
        row = torch.tensor([t.numel() for t in pieces], device=pieces[0].device)
        rows = row.new_empty(self.size * self.size)
        yield from self._all_gather(build.all_gather(rows.split(self.size), row, label=op.label))
        table: list[list[int]] = rows.view(self.size, self.size).tolist()
        yield from self._move(places, pieces, lambda source, target: table[source][target], op.label)


def _is_working(dtype: torch.dtype) -> bool:
    return working_dtype(dtype) is dtype


_PROGRAMS: dict[OpKind, Callable[[TwoLevel, Collective], Steps]] = {
    OpKind.ALL_REDUCE: TwoLevel._all_reduce,
    OpKind.BROADCAST: TwoLevel._broadcast,
    OpKind.ALL_GATHER: TwoLevel._all_gather,
    OpKind.REDUCE_SCATTER: TwoLevel._reduce_scatter,
    OpKind.ALL_TO_ALL: TwoLevel._all_to_all,
    OpKind.GATHER: TwoLevel._gather,
    OpKind.SCATTER: TwoLevel._scatter,
    OpKind.BARRIER: TwoLevel._barrier,
}
takes = partial(is_native, kinds=frozenset(_PROGRAMS))
"""Whether there is a two-level program for a collective; others are composed of those that have one."""
