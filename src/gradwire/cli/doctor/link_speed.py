"""How fast ranks reach each other: round trips of a small message, and a stream of large ones, between pairs of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch

from gradwire.cli.doctor.host_checks import HostFinding, Level
from gradwire.groups import Group
from gradwire.observe.units import bit_rate, duration

_ROUND_TRIPS = 100
_MESSAGE = 2**20
_SECONDS = 0.3
_MOST = 512
_SLOW = 0.5
"""A link with less than this share of the others' median bandwidth is a problem."""
_NARROW = 1e9 / 8
"""Bytes per second between hosts, below which compression is worth its cost in most models."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Between two ranks: the seconds of half a round trip, and bytes per second from `a` to `b`."""

    a: int
    b: int
    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{duration(self.latency)}, {bit_rate(self.bandwidth)}"


def measure(group: Group, ranks: Sequence[int]) -> list[LinkSpeed]:
    """Measure every pair of `ranks`, one after another; the same result on every rank of `group`, all of which call it."""
    found = []
    for a, b in combinations(ranks, 2):
        times = torch.zeros(2, dtype=torch.float64)
        if group.rank in (a, b):
            times[:] = torch.tensor(_exchange(group, a + b - group.rank, leads=group.rank == a), dtype=torch.float64)
        group.broadcast(times, a, label=f"link {a}-{b}")  # the other ranks wait here, and send nothing meanwhile
        found.append(LinkSpeed(a, b, *times.tolist()))
    return found


def _exchange(group: Group, peer: int, *, leads: bool) -> tuple[float, float]:
    """Latency and bandwidth to `peer`, which takes part as the one that does not lead: what one sends the other receives."""
    there, back = (group.send, group.recv) if leads else (group.recv, group.send)
    small, large = torch.zeros(1, dtype=torch.int64), torch.zeros(_MESSAGE, dtype=torch.uint8)
    trips = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        there(small, peer, label="ping")
        back(small, peer, label="pong")
        trips.append(time.perf_counter() - began)
    many, bandwidth = 1, 0.0
    for _ in range(2):
        there(small.fill_(many), peer, label="how many messages follow")
        began = time.perf_counter()
        for _ in range(int(small)):
            there(large, peer, label="large message")
        back(small, peer, label="all received")
        seconds = time.perf_counter() - began
        bandwidth = many * _MESSAGE / seconds
        many = max(1, min(_MOST, int(_SECONDS / seconds)))
    return median(trips) / 2, bandwidth


def judge(links: Sequence[LinkSpeed], names: Sequence[str]) -> Iterator[HostFinding]:
    """Findings about links between hosts; `names` are the hosts of the ranks."""
    usual = median(link.bandwidth for link in links) if links else 0.0
    for link in links:
        name = f"{names[link.a]} - {names[link.b]}"
        if link.bandwidth < _SLOW * usual:
            fix = f"the others have {bit_rate(usual)}: look at its cable, switch port, duplex mode and other traffic"
            yield HostFinding("links", name, str(link), Level.PROBLEM, fix)
        elif link.bandwidth < _NARROW:
            fix = "communication will take much of a step: choose a hook that sends less (docs/hooks.md)"
            yield HostFinding("links", name, str(link), Level.NOTE, fix)
        else:
            yield HostFinding("links", name, str(link))
