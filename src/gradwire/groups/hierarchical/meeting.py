"""How ranks learn where the others are: through a store before there is any group, or through the groups that a user has made."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from gradwire.collectives import Layout, build
from gradwire.errors import CollectiveTimeout
from gradwire.groups.base import Group
from gradwire.groups.hierarchical.layout import Report, from_reports

T = TypeVar("T")


def find_hosts(store: Any, base: str, rank: int, size: int, host: str, timeout: float) -> Layout:
    """Write this rank's host into the store, wait for everybody's, and say who is where.

    Hosts are numbered by their lowest rank, and ranks keep their order within a host.
    """
    keys = [f"{base}/host/{r}" for r in range(size)]
    store.set(keys[rank], host)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeout(
            f"HierarchicalGroup on rank {rank} of {size}: ranks {missing} have not said within {timeout:.3g} s on which host "
            "they are. Look at their output.",
            joined=[r for r in range(size) if r not in missing],
            missing=missing,
        ) from error
    hosts: dict[str, list[int]] = {}
    for r, key in enumerate(keys):
        hosts.setdefault(store.get(key).decode(), []).append(r)
    return Layout(tuple(map(tuple, hosts.values())))


def ask_around(inside: Group, across: Group | None, rank: int | None) -> tuple[Layout, int]:
    """Find out from the groups themselves who is where, and this rank's number; refuse groups that do not fit together.

    First the ranks of a host tell each other; then carriers of different hosts what their host is like; then these their hosts.
    """
    mine = Report(across is not None, across.rank if across else 0, across.size if across else 1, rank)
    mates = _tell(inside, mine)
    column = None if across is None else _tell(across, (inside.rank, mates))
    layout = from_reports(mates, _tell(inside, column))
    return layout, layout.hosts[mates[0].host][inside.rank]


def _tell(group: Group, value: T) -> list[T]:
    """Every rank's value, in rank order."""
    if group.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = torch.empty(group.size, dtype=torch.int64, device="cpu")
    group.run(build.all_gather_into_tensor(lengths, torch.tensor([mine.numel()], device="cpu"), label="who is where?"))
    places = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths.tolist()]
    group.run(build.all_gather(places, mine, label="who is where?"))
    return [pickle.loads(bytes(place.tolist())) for place in places]


Build = Callable[..., Group]
"""Makes a group: `build(store, rank, size, timeout=…, name=…)`."""
