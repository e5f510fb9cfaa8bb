"""How ranks determine the layout: through a store before there is any group, or through the groups that a user has made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.collectives import Layout, build
from gradwire.errors import GroupError, UsageError
from gradwire.groups.base import Group
from gradwire.groups.store.rendezvous import Rendezvous

LIMIT = 1 << 24
"""Bytes that a rank may send to describe what it knows of the others."""

JSON = Any
"""What `json` reads and writes. Never pickle: reading what another rank has sent must not be able to run code."""


def discover_hosts(rendezvous: Rendezvous, host: str) -> Layout:
    """Exchange hosts through the store: which ranks share one.

    Hosts are numbered by their lowest rank, and ranks keep their order within a host.
    """
    hosts: dict[bytes, list[int]] = {}
    for r, name in enumerate(rendezvous.exchange("host", host)):
        hosts.setdefault(name, []).append(r)
    return Layout(tuple(map(tuple, hosts.values())))


def discover_from_groups(inside: Group, across: Group | None, rank: int | None) -> tuple[Layout, int, int]:
    """Determine the layout, this rank's number and an identity for records from the groups themselves; refuse groups that do not
    fit together.

    First the ranks of a host exchange reports; then the carriers of different hosts those of their hosts; then the ranks of a host
    what their carriers have received.
    """
    mine = HostReport(across is not None, across.rank if across else 0, across.size if across else 1, rank)
    mates = [_report(value) for value in _exchange(inside, _plain(mine))]
    own = [_plain(mate) for mate in mates]
    column = None if across is None else _exchange(across, [inside.rank, own])
    # All hosts have the rail of their first rank in common, so its identity, which that rank passes on, names the whole.
    group_id = (inside if across is None else across).ledger.events.child_id("hierarchical")
    received = _exchange(inside, [column, group_id])
    layout = from_reports(mates, [_column(value[0]) for value in received])
    return layout, layout.hosts[mates[0].host][inside.rank], int(received[0][1])


def _exchange(group: Group, value: JSON) -> list[JSON]:
    """Every rank's value, in rank order."""
    if group.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = torch.empty(group.size, dtype=torch.int64, device="cpu")
    group.run(build.all_gather_into_tensor(lengths, torch.tensor([mine.numel()], device="cpu"), label="who is where?"))
    if not all(0 < n <= LIMIT for n in lengths.tolist()):
        raise _unreadable(f"the ranks of {group.name} announce descriptions of {lengths.tolist()} bytes")
    places = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths.tolist()]
    group.run(build.all_gather(places, mine, label="who is where?"))
    try:
        return [json.loads(bytes(place.tolist())) for place in places]
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"what a rank of {group.name} has sent cannot be read: {error}") from error


def _plain(report: HostReport) -> JSON:
    return [report.carries, report.host, report.hosts, report.rank]


def _report(value: JSON) -> HostReport:
    match value:
        case [bool(carries), int(host), int(hosts), int() | None as rank]:
            return HostReport(carries, host, hosts, rank)
    raise _unreadable(f"{value!r} is not a report of a rank")


def _column(value: JSON) -> Column | None:
    if value is None:
        return None
    try:
        return [(int(place), [_report(report) for report in reports]) for place, reports in value]
    except (ValueError, TypeError) as error:
        raise _unreadable(f"{value!r} does not describe the ranks of a host") from error


def _unreadable(problem: str) -> GroupError:
    return GroupError(
        f"HierarchicalGroup(inside, across): {problem}. Check that all ranks run the same version of gradwire."
    )


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a rank knows of itself before it knows the layout."""

    carries: bool
    host: int
    hosts: int
    rank: int | None


Column = list[tuple[int, list[HostReport]]]
"""What the ranks of a rail have exchanged, by host: the place in the host, and all reports of that host."""


def from_reports(mates: Sequence[HostReport], columns: Sequence[Column | None]) -> Layout:
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
