"""Timing on a machine with other load: variants take turns, and figures are medians with their quartiles.

It handles callables and clocks, and is independent of models, groups and devices.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Step = Callable[[], object]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Series:
    """The seconds per step of one variant, one figure per round. The rounds of all series of one run correspond."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of all rounds are between these two."""
        return _quartiles(self.seconds)

    def averaged_with(self, other: Series) -> Series:
        """The mean of both in every round, under this name."""
        return Series(self.name, tuple(map(statistics.fmean, zip(self.seconds, other.seconds, strict=True))))

    def as_json(self) -> dict[str, Any]:
        """Plain data, with every round, in seconds."""
        return {"median": self.median, "quartiles": list(self.quartiles), "rounds": list(self.seconds)}

    def minus(self, other: Series) -> Series:
        """What this takes longer than `other`, round by round, under this name."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Series(self.name, tuple(mine - theirs for mine, theirs in pairs))


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two series compare. The two figures differ if the machine was busier in some rounds than in others."""

    of_medians: float
    median_of_rounds: float
    quartiles: tuple[float, float]
    rounds: int
    """How many rounds could be compared: noise can hide a difference."""
    confidence: tuple[float, float] | None
    """The median over more rounds is between these two with a probability of at least 95 %, if rounds are independent. None if
    there are too few."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "of_medians": self.of_medians,
            "median_of_rounds": self.median_of_rounds,
            "quartiles_of_rounds": list(self.quartiles),
            "confidence_of_median": self.confidence,
            "rounds_compared": self.rounds,
        }


@dataclass(frozen=True, slots=True)
class Rounds:
    """How many rounds there are, and how many steps each variant takes."""

    count: int
    block: int | Mapping[str, int] = 1
    """Timed steps of a variant in each round; a mapping gives each variant its own."""
    lead_in: int = 0
    """Steps before each block that are not timed: they bring a variant's code and data back into the caches."""
    warm_up: int = 0
    """Steps of each variant before the first round."""


def interleave(
    variants: Mapping[str, Step],
    rounds: Rounds,
    *,
    fence: Step = _nothing,
    after_round: Callable[[int], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Series]:
    """Time the steps of every variant in every round: one figure per variant and round, in seconds per step.

    The first variant changes from round to round. `fence` is called before and after each block; on an asynchronous device it must
    synchronize, and with several ranks it must wait for all of them.

    >>> ticks = iter(range(100))
    >>> series = interleave({"a": print, "b": print}, Rounds(2), clock=lambda: float(next(ticks)))
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    >>> series["b"].seconds
    (1.0, 1.0)
    """
    for step in variants.values():
        for _ in range(rounds.warm_up):
            step()
    block, names, seconds = rounds.block, list(variants), {name: [0.0] * rounds.count for name in variants}
    for number in range(rounds.count):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            step, count = variants[name], block if isinstance(block, int) else block[name]
            for _ in range(rounds.lead_in):
                step()
            fence()
            begin = clock()
            for _ in range(count):
                step()
            fence()
            seconds[name][number] = (clock() - begin) / count
        if after_round is not None:
            after_round(number + 1)
    return {name: Series(name, tuple(taken)) for name, taken in seconds.items()}


def compare(a: Series, b: Series, *, over: Series | None = None) -> Ratio:
    """`a` as a fraction of `b`; with `over`, the overhead of `a` over it as a fraction of that of `b`.

    Rounds in which `b` took no longer than `over` are meaningless and are skipped.

    >>> ours, peer, bare = Series("ours", (12.0, 24.0)), Series("peer", (14.0, 28.0)), Series("bare", (10.0, 20.0))
    >>> compare(ours, peer, over=bare)
    Ratio(of_medians=0.5, median_of_rounds=0.5, quartiles=(0.5, 0.5), rounds=2, confidence=None)
    """
    base = (0.0,) * len(a.seconds) if over is None else over.seconds
    by_round = [(x - z) / (y - z) for x, y, z in zip(a.seconds, b.seconds, base, strict=True) if y > z]
    floor = 0.0 if over is None else over.median
    below = b.median - floor
    return Ratio(
        of_medians=(a.median - floor) / below if below > 0 else float("nan"),
        median_of_rounds=statistics.median(by_round) if by_round else float("nan"),
        quartiles=_quartiles(by_round),
        rounds=len(by_round),
        confidence=_confidence(by_round),
    )


def slowest(name: str, ranks: Sequence[Sequence[float]]) -> Series:
    """The series of a world whose ranks have each timed the same blocks: in every round, the time of the slowest rank.

    >>> slowest("a", [[1.0, 4.0], [2.0, 3.0]]).seconds
    (2.0, 4.0)
    """
    return Series(name, tuple(max(times) for times in zip(*ranks, strict=True)))


def _quartiles(values: tuple[float, ...] | list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _confidence(values: list[float]) -> tuple[float, float] | None:
    """Where the median of what `values` are a sample of is, with a probability of at least 95 %, whatever its distribution.

    It is below the k-th smallest with the probability of less than k heads in as many throws of a coin as there are values.
    Six values are the least that say anything.

    >>> _confidence([5.0, 1.0, 4.0, 2.0, 6.0, 3.0])
    (1.0, 6.0)
    """
    count, k, below = len(values), 0, 1  # of 2**count
    while 40 * below <= 2**count:
        k += 1
        below += math.comb(count, k)
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else None
