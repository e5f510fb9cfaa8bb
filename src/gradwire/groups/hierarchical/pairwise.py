"""`Moves`: collectives that bring pieces from each rank to each other rank, in two levels.

Note [Moving pieces]
Gather, scatter and all-to-all are one thing: every rank has a piece, perhaps empty, for every other. A piece goes to its sender's
carrier (unless that is the sender), in the rail to the other host, and there to its receiver. Pieces for the same host travel as
one message. The ranks that a piece passes through must know its size: in gathers and scatters all sizes are equal, in an
all-to-all the ranks exchange them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Collective, build
from gradwire.collectives.lower import flat
from gradwire.collectives.reference import store
from gradwire.errors import CollectiveMismatch
from gradwire.groups.hierarchical.position import HostPlace, Step, Steps, split_row

Sizes = Callable[[int, int], int]
"""How many elements one rank has for another."""


class Moves(HostPlace):
    """The moves of one rank."""

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
            raise CollectiveMismatch(
                f"rank {self.rank} expects other sizes than it was sent: "
                + "; ".join(
                    f"{n} elements from rank {s} where there is room for {places[s].numel()}" for s, n in wrong.items()
                )
                + ". Sizes that ranks expect of each other must agree."
            )
        for sender, t in received.items():
            store(places[sender], t)
