"""How ranks determine the layout: through a store before there is any group, or through the groups that a user has made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradwire.collectives import Layout, build
from gradwire.errors import GroupError, UsageError
from gradwire.groups.base import Group
from gradwire.groups.store.rendezvous import Rendezvous


class HostReport(NamedTuple):
    """What a rank knows of itself before it knows the layout."""

    carries: bool
    host: int
    hosts: int
    rank: int | None


def discover_hosts(rendezvous: Rendezvous, host: str) -> Layout:
    """Exchange hosts through the store. They are numbered by their lowest rank, and ranks keep their order within a host."""
    hosts: dict[bytes, list[int]] = {}
    for r, name in enumerate(rendezvous.exchange("host", host)):
        hosts.setdefault(name, []).append(r)
    return Layout(tuple(map(tuple, hosts.values())))


def discover_from_groups(inside: Group, across: Group | None, rank: int | None) -> tuple[Layout, int, int]:
    """Determine the layout, this rank's number and an identity for records from the groups themselves: the ranks of a host exchange
    reports, the carriers of different hosts those of their hosts, and the ranks of a host what their carriers have received."""
    mine = HostReport(across is not None, across.rank if across else 0, across.size if across else 1, rank)
    mates = [HostReport(*value) for value in _exchange(inside, mine)]
    column = None if across is None else _exchange(across, [inside.rank, mates])
    # All hosts have the rail of their first rank in common, so its identity, which that rank passes on, names the whole.
    group_id = (inside if across is None else across).ledger.events.child_id("hierarchical")
    received = _exchange(inside, [column, group_id])
    columns = [
        column and [(place, [HostReport(*report) for report in reports]) for place, reports in column]
        for column, _ in received
    ]
    layout = from_reports(mates, columns)
    return layout, layout.hosts[mates[0].host][inside.rank], received[0][1]


def _exchange(group: Group, value: Any) -> list[Any]:
    """Every rank's value, in rank order. As JSON, never by pickle: reading what another rank has sent must not run code."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length, lengths = (
        torch.tensor([mine.numel()], device="cpu"),
        torch.empty(group.size, dtype=torch.int64, device="cpu"),
    )
    group.run(build.all_gather_into_tensor(lengths, length, label="exchange host reports"))
    places = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths.tolist()]
    group.run(build.all_gather(places, mine, label="exchange host reports"))
    try:
        return [json.loads(bytes(place.tolist())) for place in places]
    except (ValueError, RecursionError) as error:
        raise GroupError(
            f"HierarchicalGroup(inside, across): a rank's report of its host cannot be read ({error}). Check that all ranks "
            "construct the group in the same order and run the same version of gradwire."
        ) from error


Column = list[tuple[int, list[HostReport]]]
"""What the ranks of a rail have exchanged, by host: the place in the host, and all reports of that host."""


def from_reports(mates: Sequence[HostReport], columns: Sequence[Column | None]) -> Layout:
    """The layout, from what all ranks of a host (`mates`) and, through its carriers, of all others have reported."""
    known = [column for column in columns if column is not None]
    tables = [[reports for _, reports in column] for column in known] or [[list(mates)]]
    hosts = tables[0]
    places = [[place for place, _ in column] for column in known]
    widths = [sum(report.carries for report in host) for host in hosts]
    given = [report.rank for host in hosts for report in host]
    problems = {
        "the rails do not have the same hosts in the same order": any(table != hosts for table in tables),
        f"an `across` joins ranks whose places in their hosts are {places}": any(
            place != number for number, rail in enumerate(places) for place in rail
        ),
        "the ranks of a host with an `across` are not the first": any(
            not report.carries for host, width in zip(hosts, widths, strict=True) for report in host[:width]
        ),
        "the ranks of one host have different ranks in their `across`, or these differ in size": any(
            len({(report.host, report.hosts) for report in host if report.carries}) > 1 for host in hosts
        ),
        f"hosts have {widths} ranks with an `across`": len(set(widths)) > 1,
        "some ranks were given their number, some not": None in given and set(given) != {None},
    }  # fmt: skip
    for problem in [problem for problem, found in problems.items() if found]:
        raise UsageError(
            f"HierarchicalGroup(inside, across): {problem}. Pass `across` on ranks 0 to k - 1 of every `inside`; "
            "join the ranks of equal rank; number the hosts alike in all of them; and pass rank= on all ranks or on none."
        )
    numbers = iter(range(len(given)))
    by_host = tuple(tuple(next(numbers) if r.rank is None else r.rank for r in host) for host in hosts)
    return Layout(by_host, rails=widths[0] or None)
