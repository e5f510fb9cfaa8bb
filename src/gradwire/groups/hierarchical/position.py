"""`HostPlace`: one rank's place in the layout, and the steps between a rank and its carrier.

The values that the programs of `programs.py` and `moves.py` are made of. See Note [Rails] in `collectives/layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradwire.collectives import Collective, Layout, build
from gradwire.collectives.reference import store


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of one of the two groups that a rank is in."""

    where: Literal["inside", "across"]
    op: Collective


Steps = Generator[Step, None, None]


class HostPlace:
    """One rank: its host, its index there, and the ranks it shares them with."""

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

    def to_carriers(self, mine: Tensor, size_of: Callable[[int], int], label: str) -> Generator[Step, None, Tensor]:
        """Hand `mine` to this rank's carrier; a carrier gets what its rail has brought, in one row."""
        if len(self.mates) == self.width:
            return mine
        carrier = self.index % self.width
        mates = range(len(self.mates))
        sizes = [size_of(m) if self.carries and i % self.width == self.index else 0 for i, m in enumerate(self.mates)]
        row = mine.new_empty(sum(sizes))
        pieces = [mine if i == carrier else mine[:0] for i in mates]
        yield Step("inside", build.all_to_all(split_row(row, sizes), pieces, label=label))
        return row

    def from_carriers(self, output: Tensor, row: Tensor, size_of: Callable[[int], int], label: str) -> Steps:
        """The way back: a carrier hands each rank of its rail its piece of `row`."""
        if len(self.mates) == self.width:
            store(output, row)
            return
        carrier = self.index % self.width
        sizes = [size_of(m) if self.carries and i % self.width == self.index else 0 for i, m in enumerate(self.mates)]
        places = [output if i == carrier else output[:0] for i in range(len(self.mates))]
        yield Step("inside", build.all_to_all(places, split_row(row, sizes), label=label))


def split_row(row: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A flat tensor in parts of `sizes`."""
    return list(row.split(list(sizes)))
