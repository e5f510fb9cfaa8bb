"""Which rank is on which host, and which of them take part in a collective: pure data.

Note [Rails]
The first `width` ranks of every host are its *carriers*: only they communicate with other hosts. The carriers with the same place
in their hosts form a *rail*, so there are `width` rails, each with one rank per host; a rail is one group, the `across` of its
ranks. `width` is the size of the smallest host: where hosts are alike, all ranks drive the link. A rank that is not a carrier
communicates through one: rank i of a host belongs to rail i modulo `width`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks by host. `hosts[h]` are the ranks of host h, in the order that they have in its own group.

    >>> layout = Layout(((0, 2, 4), (1, 3)))
    >>> layout.size, layout.width, layout.place(3)
    (5, 2, (1, 1))
    >>> layout.rail(0, 0), layout.rail(0, 1), layout.rail(1, 1)
    ((0, 4), (2,), (3,))
    """

    hosts: tuple[tuple[int, ...], ...]
    rails: int | None = None
    """How many ranks of each host communicate with other hosts; None: as many as the smallest host has."""

    def __post_init__(self) -> None:
        ranks = [rank for host in self.hosts for rank in host]
        if not ranks or not all(self.hosts) or sorted(ranks) != list(range(len(ranks))):
            raise UsageError(
                f"Layout({self.hosts}): each of the ranks from 0 up must be on one host, and no host may be empty. "
                "Give every rank its own number, and all of them."
            )
        smallest = min(len(host) for host in self.hosts)
        if self.rails is not None and not 1 <= self.rails <= smallest:
            raise UsageError(
                f"Layout({self.hosts}, rails={self.rails}): the smallest host has {smallest} ranks. Choose from 1 to {smallest}."
            )

    @property
    def size(self) -> int:
        return sum(len(host) for host in self.hosts)

    @property
    def width(self) -> int:
        """How many rails there are. See Note [Rails]."""
        return min(len(host) for host in self.hosts) if self.rails is None else self.rails

    @property
    def even(self) -> bool:
        """Whether all hosts have as many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's host, and its place there."""
        for number, host in enumerate(self.hosts):
            if rank in host:
                return number, host.index(rank)
        raise UsageError(f"rank {rank} of {self}: there is no such rank. Ranks count from 0 to {self.size - 1}.")

    def rail(self, host: int, number: int) -> tuple[int, ...]:
        """The ranks of a host that communicate through its carrier of rail `number`, which is the first of them."""
        return self.hosts[host][number :: self.width]

    def within(self, ranks: Sequence[int]) -> Layout:
        numbers = {rank: number for number, rank in enumerate(ranks)}
        hosts = (tuple(sorted(numbers[r] for r in host if r in numbers)) for host in self.hosts)
        return Layout(tuple(sorted(host for host in hosts if host)))
