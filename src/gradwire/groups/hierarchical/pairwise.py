"""`Moves`: one rank's place in the layout, and the collectives that bring pieces from each rank to each other, in two levels.

See Note [Rails] in `collectives/layout.py`.

Note [Moving pieces]
Gather, scatter and all-to-all are one thing: every rank has a piece, perhaps empty, for every other. A piece goes to its sender's
carrier (unless that is the sender), in the rail to the other host, and there to its receiver. Pieces for the same host travel as
one message. The ranks that a piece passes through must know its size: in gathers and scatters all sizes are equal, in an
all-to-all the ranks exchange them first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout, build
from gradwire.collectives.lower import flat
from gradwire.collectives.reference import store
from gradwire.errors import CollectiveMismatch

Sizes = Callable[[int, int], int]
"""How many elements one rank has for another."""


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of one of the two groups that a rank is in."""

    where: Literal["inside", "across"]
    op: Collective


Steps = Generator[Step, None, None]


def split_row(row: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A flat tensor in parts of `sizes`."""
    return list(row.split(list(sizes)))


class Moves:
    """One rank: its host, its index there, the ranks it shares them with, and its moves."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.size = layout.size
        self.host, self.index = layout.place(rank)
        self.mates = layout.hosts[self.host]
        self.width = layout.width
        self.carries = self.index < self.width
        self.alone = len(self.mates) == 1
        self.others = [h for h in range(len(layout.hosts)) if h != self.host]

    def bundle(self, sizes: Sequence[int], host: int, rail: int) -> list[int]:
        """The sizes of what the ranks of a host that use `rail` have."""
        return [sizes[rank] for rank in self.layout.rail(host, rail)]

    def _sizes_carried(self, size_of: Callable[[int], int]) -> list[int]:
        """How much this rank carries for each rank of its host."""
        return [size_of(m) if self.carries and i % self.width == self.index else 0 for i, m in enumerate(self.mates)]

    def to_carriers(self, mine: Tensor, size_of: Callable[[int], int], label: str) -> Generator[Step, None, Tensor]:
        """Hand `mine` to this rank's carrier; a carrier gets what its rail has brought, in one row."""
        if len(self.mates) == self.width:
            return mine
        sizes = self._sizes_carried(size_of)
        row = mine.new_empty(sum(sizes))
        pieces = [mine if i == self.index % self.width else mine[:0] for i in range(len(self.mates))]
        yield Step("inside", build.all_to_all(split_row(row, sizes), pieces, label=label))
        return row

    def from_carriers(self, output: Tensor, row: Tensor, size_of: Callable[[int], int], label: str) -> Steps:
        """The way back: a carrier hands each rank of its rail its piece of `row`."""
        if len(self.mates) == self.width:
            store(output, row)
            return
        places = [output if i == self.index % self.width else output[:0] for i in range(len(self.mates))]
        yield Step("inside", build.all_to_all(places, split_row(row, self._sizes_carried(size_of)), label=label))

    def gather(self, op: Collective) -> Steps:
        """One piece from every rank to the root."""
        mine, root = flat(op.inputs[0]), op.root or 0
        n = mine.numel()
        pieces = [mine if rank == root else mine[:0] for rank in range(self.size)]
        places = [flat(t) for t in op.outputs] or [mine[:0]] * self.size
        yield from self.move(places, pieces, lambda source, target: n if target == root else 0, op.label)

    def scatter(self, op: Collective) -> Steps:
        """One piece from the root to every rank."""
        place, root = flat(op.outputs[0]), op.root or 0
        n = place.numel()
        pieces = [flat(t) for t in op.inputs] or [place[:0]] * self.size
        places = [place if rank == root else place[:0] for rank in range(self.size)]
        yield from self.move(places, pieces, lambda source, target: n if source == root else 0, op.label)

    def move(self, places: Sequence[Tensor], pieces: Sequence[Tensor], sizes: Sizes, label: str) -> Steps:
        """Bring `pieces[rank]` of every rank to each rank's `places[sender]`. See Note [Moving pieces]."""
        rail, hosts = self.index % self.width, self.layout.hosts
        far = [rank for h in self.others for rank in hosts[h]]
        packed = torch.cat([pieces[rank] for rank in far]) if far else pieces[0][:0]
        brought = yield from self.to_carriers(packed, lambda rank: sum(sizes(rank, to) for to in far), label)
        # In the rail: for each other host, what the ranks of this rail have for its ranks; and from each, the reverse.
        arrived: dict[tuple[int, int], Tensor] = {}
        if self.carries and self.others:
            crew = self.layout.rail(self.host, rail)
            keys = [(source, to) for source in crew for to in far]
            leaving = dict(zip(keys, split_row(brought, [sizes(*key) for key in keys]), strict=True))
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
            yield Step("across", build.all_to_all(split_row(row, lengths), messages, label=label))
            keys = [key for keys in expected for key in keys]
            arrived = dict(zip(keys, split_row(row, [sizes(*key) for key in keys]), strict=True))
        yield from self._deliver(places, pieces, arrived, sizes, label)

    def _deliver(
        self,
        places: Sequence[Tensor],
        pieces: Sequence[Tensor],
        arrived: dict[tuple[int, int], Tensor],
        sizes: Sizes,
        label: str,
    ) -> Steps:
        """In the host: each rank's own pieces for its mates, and what it has brought from other hosts."""

        def senders(index: int) -> list[int]:
            """Whose pieces the mate at `index` hands out."""
            far = [s for h in self.others for s in self.layout.rail(h, index)] if index < self.width else []
            return [self.mates[index], *far]

        def piece(sender: int, to: int) -> Tensor:
            return pieces[to] if sender == self.rank else arrived[sender, to]

        outgoing = [torch.cat([piece(s, to) for s in senders(self.index)]) for to in self.mates]
        lengths = [sum(sizes(s, self.rank) for s in senders(i)) for i in range(len(self.mates))]
        row = pieces[0].new_empty(sum(lengths))
        if self.alone:
            row = outgoing[0]
        else:
            yield Step("inside", build.all_to_all(split_row(row, lengths), outgoing, label=label))
        order = [s for i in range(len(self.mates)) for s in senders(i)]
        received = dict(zip(order, split_row(row, [sizes(s, self.rank) for s in order]), strict=True))
        wrong = {s: t.numel() for s, t in received.items() if t.numel() != places[s].numel()}
        if wrong:
            which = [
                f"{n} elements from rank {s} where there is room for {places[s].numel()}" for s, n in wrong.items()
            ]
            raise CollectiveMismatch(
                f"rank {self.rank} expects other sizes than it was sent: {'; '.join(which)}. Sizes that ranks expect of each other "
                "must agree."
            )
        for sender, t in received.items():
            store(places[sender], t)
