"""`ChaosSchedule`: the faults of `gradwire run --chaos`, at times drawn from a seed. It decides; the launcher sends the signals."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Mapping
from signal import Signals

FAULTS = {"kill": Signals.SIGKILL, "stop": Signals.SIGSTOP, "term": Signals.SIGTERM, "hub": Signals.SIGKILL}
"""What a rank, or the hub of the run, is sent."""


class ChaosSchedule:
    """Faults that come at a constant rate, each kind independently of the others: a Poisson process.

    >>> [(kind, round(which, 2)) for kind, which in ChaosSchedule({"kill": 0.5, "hub": 0.1}, seed=1).due(8.0)]
    [('kill', 0.63), ('hub', 0.33), ('kill', 0.38), ('kill', 0.01)]
    """

    def __init__(self, rates: Mapping[str, float], seed: int) -> None:
        self._rates = dict(rates)
        self._random = {kind: random.Random(f"{seed} {kind}") for kind in rates}
        self._next = {kind: self._random[kind].expovariate(rate) for kind, rate in rates.items()}

    def due(self, now: float) -> list[tuple[str, float]]:
        """Kinds of the faults until now that were not returned before, in order. Each has a number from 0 to 1, which chooses among
        the ranks that there are."""
        found = []
        for kind, draw in self._random.items():
            while self._next[kind] <= now:
                found.append((self._next[kind], kind, draw.random()))
                self._next[kind] += draw.expovariate(self._rates[kind])
        return [(kind, which) for _, kind, which in sorted(found)]


def chaos_rates(text: str) -> dict[str, float]:
    """Faults in a second, by kind.

    >>> chaos_rates("kill=0.05/s,hub=.01/s")
    {'kill': 0.05, 'hub': 0.01}
    """
    rates: dict[str, float] = {}
    for part in text.split(","):
        kind, _, rate = part.partition("=")
        if kind not in FAULTS or kind in rates:
            wrong = "is there twice" if kind in rates else "is not a kind of fault"
            raise argparse.ArgumentTypeError(f"{part!r}: {kind!r} {wrong}. Choose from {', '.join(FAULTS)}.")
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)/s", rate) or float(rate[:-2]) <= 0:
            raise argparse.ArgumentTypeError(
                f"{part!r}: {rate!r} is not a rate. Choose faults per second, as {kind}=0.05/s."
            )
        rates[kind] = float(rate[:-2])
    return rates
