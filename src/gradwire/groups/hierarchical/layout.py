"""The rules by which groups that a user has made fit together as hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.collectives import Layout
from gradwire.errors import UsageError


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank knows of itself before it knows the layout."""

    carries: bool
    host: int
    hosts: int
    rank: int | None


Column = list[tuple[int, list[Report]]]
"""What the ranks of a rail have exchanged, by host: the place in the host, and all reports of that host."""


def from_reports(mates: Sequence[Report], columns: Sequence[Column | None]) -> Layout:
    """The layout, from what all ranks of a host (`mates`) and, through its carriers, of all others have reported.

    Raises UsageError where the groups do not fit together: the same on every rank that has the reports.
    """
    known = [column for column in columns if column is not None]
    tables = [[reports for _, reports in column] for column in known] or [[list(mates)]]
    hosts = tables[0]
    if any(table != hosts for table in tables):
        _refuse("the rails do not have the same hosts in the same order", "in every `across`, number the hosts alike")
    for number, column in enumerate(known):
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
        _refuse("some ranks were given their number, some not", "pass rank= on all ranks or on none")
    numbers = iter(range(len(given)))
    by_host = tuple(tuple(next(numbers) if r.rank is None else r.rank for r in host) for host in hosts)
    return Layout(by_host, rails=widths[0] or None)


def _refuse(problem: str, advice: str) -> None:
    raise UsageError(f"HierarchicalGroup(inside, across): {problem}. To fix it, {advice}.")
