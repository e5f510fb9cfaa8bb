"""Which rank is where: pure data, and the rules by which groups that a user has made fit together.

Note [Lanes]
The first `width` ranks of every host are its *carriers*: they alone talk to other hosts. The carriers with the same place in
their hosts form a *lane*, so there are `width` lanes, each with one rank per host; a lane is one group, the `across` of its
ranks. `width` is the size of the smallest host. Where hosts are alike every rank is a carrier, and all of them drive the link
at once; where they are not, the ranks past `width` leave the link to the others. One leader per host is the case of one lane,
and needs no code of its own.

A rank that is no carrier speaks through one: rank i of a host belongs to lane i modulo `width`.
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
    >>> layout.lane(0, 0), layout.lane(0, 1), layout.lane(1, 1)
    ((0, 4), (2,), (3,))
    """

    hosts: tuple[tuple[int, ...], ...]
    lanes: int | None = None
    """How many ranks of each host talk to others; as many as the smallest host has, where it is not said."""

    def __post_init__(self) -> None:
        ranks = [rank for host in self.hosts for rank in host]
        if not ranks or not all(self.hosts) or sorted(ranks) != list(range(len(ranks))):
            raise UsageError(
                f"Layout({self.hosts}): each of the ranks from 0 up must be on one host, and no host may be empty. "
                "Give every rank its own number, and all of them."
            )
        smallest = min(len(host) for host in self.hosts)
        if self.lanes is not None and not 1 <= self.lanes <= smallest:
            raise UsageError(
                f"Layout({self.hosts}, lanes={self.lanes}): the smallest host has {smallest} ranks. Choose from 1 to {smallest}."
            )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(len(host) for host in self.hosts)

    @property
    def width(self) -> int:
        """How many lanes there are. See Note [Lanes]."""
        return min(len(host) for host in self.hosts) if self.lanes is None else self.lanes

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

    def lane(self, host: int, number: int) -> tuple[int, ...]:
        """The ranks of a host that speak through its carrier of lane `number`, which is the first of them."""
        return self.hosts[host][number :: self.width]

    def within(self, ranks: Sequence[int]) -> Layout:
        """The layout of a sub-group of `ranks`, in that order."""
        numbers = {rank: number for number, rank in enumerate(ranks)}
        hosts = (tuple(sorted(numbers[r] for r in host if r in numbers)) for host in self.hosts)
        return Layout(tuple(sorted(host for host in hosts if host)))


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank knows of itself before it knows the layout."""

    carries: bool
    host: int
    hosts: int
    rank: int | None


Column = list[tuple[int, list[Report]]]
"""What a lane's ranks have told each other, by host: the place in the host, and all reports of that host."""


def from_reports(mates: Sequence[Report], columns: Sequence[Column | None]) -> Layout:
    """The layout, from what all ranks of a host (`mates`) and, through its carriers, of all others have reported.

    Raises UsageError where the groups do not fit together: the same on every rank that has heard of the fault.
    """
    told = [column for column in columns if column is not None]
    tables = [[reports for _, reports in column] for column in told] or [[list(mates)]]
    hosts = tables[0]
    if any(table != hosts for table in tables):
        _refuse("the lanes do not meet the same hosts in the same order", "in every `across`, number the hosts alike")
    for number, column in enumerate(told):
        places = [place for place, _ in column]
        if any(place != number for place in places):
            _refuse(
                f"an `across` joins ranks whose places in their hosts are {places}",
                "join the ranks that have the same rank in their `inside`",
            )
    widths = [sum(report.carries for report in host) for host in hosts]
    for host, width in zip(hosts, widths, strict=True):
        if [report.carries for report in host] != [True] * width + [False] * (len(host) - width):
            _refuse(
                f"of the {len(host)} ranks of a host, those with an `across` are not the first {width}",
                "pass `across` on ranks 0 to k - 1 of every `inside`, and None on the others",
            )
        if len({(report.host, report.hosts) for report in host if report.carries}) > 1:
            _refuse(
                "the ranks of one host have different ranks in their `across`, or these differ in size",
                "number the hosts alike in all of them",
            )
    if len(set(widths)) > 1:
        _refuse(f"hosts have {widths} ranks with an `across`", "pass it on as many ranks of every host")
    given = [report.rank for host in hosts for report in host]
    if any(rank is None for rank in given) and any(rank is not None for rank in given):
        _refuse("some ranks were told their number, some not", "pass rank= everywhere or nowhere")
    numbers = iter(range(len(given)))
    by_host = tuple(tuple(next(numbers) if r.rank is None else r.rank for r in host) for host in hosts)
    return Layout(by_host, lanes=widths[0] or None)


def _refuse(problem: str, advice: str) -> None:
    raise UsageError(f"HierarchicalGroup(inside, across): {problem}. To mend it, {advice}.")
