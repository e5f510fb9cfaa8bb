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
from gradwire.observe.units import duration

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
        return f"{duration(self.latency)}, {_rate(self.bandwidth)}"


def _rate(bandwidth: float) -> str:
    """Bytes per second, in bits, as networks are sold.

    >>> _rate(12.5e6), _rate(2.5e9)
    ('100 Mbit/s', '20 Gbit/s')
    """
    bits = bandwidth * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 0.9995e9 else f"{bits / 1e6:.3g} Mbit/s"


def measure(group: Group, ranks: Sequence[int]) -> list[LinkSpeed]:
    """Measure every pair of `ranks`, one after another; the same result on every rank of `group`, all of which call it."""
    found = []
    for a, b in combinations(ranks, 2):
        times = torch.zeros(2, dtype=torch.float64)
        if group.rank == a:
            times = torch.tensor(_lead(group, b), dtype=torch.float64)
        elif group.rank == b:
            _answer(group, a)
        group.broadcast(times, a, label=f"link {a}-{b}")  # the other ranks wait here, and send nothing meanwhile
        found.append(LinkSpeed(a, b, *times.tolist()))
    return found


def _lead(group: Group, peer: int) -> tuple[float, float]:
    """Latency and bandwidth to `peer`, which calls `_answer`."""
    small, large = torch.zeros(1, dtype=torch.int64), torch.zeros(_MESSAGE, dtype=torch.uint8)
    trips = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        group.send(small, peer, label="ping")
        group.recv(small, peer, label="pong")
        trips.append(time.perf_counter() - began)
    many, bandwidth = 1, 0.0
    for _ in range(2):
        group.send(small.fill_(many), peer, label="how many messages follow")
        began = time.perf_counter()
        for _ in range(many):
            group.send(large, peer, label="large message")
        group.recv(small, peer, label="all received")
        seconds = time.perf_counter() - began
        bandwidth = many * _MESSAGE / seconds
        many = max(1, min(_MOST, int(_SECONDS / seconds)))
    return median(trips) / 2, bandwidth


def _answer(group: Group, peer: int) -> None:
    small, large = torch.zeros(1, dtype=torch.int64), torch.zeros(_MESSAGE, dtype=torch.uint8)
    for _ in range(_ROUND_TRIPS):
        group.recv(small, peer, label="ping")
        group.send(small, peer, label="pong")
    for _ in range(2):
        group.recv(small, peer, label="how many messages follow")
        for _ in range(int(small)):
            group.recv(large, peer, label="large message")
        group.send(small, peer, label="all received")


def judge(links: Sequence[LinkSpeed], names: Sequence[str]) -> Iterator[HostFinding]:
    """Findings about links between hosts; `names` are the hosts of the ranks."""
    usual = median(link.bandwidth for link in links) if links else 0.0
    for link in links:
        name = f"{names[link.a]} - {names[link.b]}"
        if link.bandwidth < _SLOW * usual:
            fix = f"the others have {_rate(usual)}: look at its cable, switch port, duplex mode and other traffic"
            yield HostFinding("links", name, str(link), Level.PROBLEM, fix)
        elif link.bandwidth < _NARROW:
            fix = "communication will take much of a step: choose a hook that sends less (docs/hooks.md)"
            yield HostFinding("links", name, str(link), Level.NOTE, fix)
        else:
            yield HostFinding("links", name, str(link))
