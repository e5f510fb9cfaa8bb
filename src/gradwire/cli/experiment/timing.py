"""Timing on a machine that does other things too: variants take turns, and figures are medians with their quartiles.

It knows callables and clocks, nothing of models, groups or devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Step = Callable[[], object]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Series:
    """The seconds that one variant took for a step, one figure a round. Rounds of series from one run belong together."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of all rounds lie between these two."""
        return _quartiles(self.seconds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two series compare. The two figures differ where the machine was busier in some rounds than in others."""

    of_medians: float
    median_of_rounds: float
    quartiles: tuple[float, float]
    rounds: int
    """How many rounds could be compared: noise can make a difference vanish."""


def interleave(
    variants: Mapping[str, Step],
    *,
    rounds: int,
    block: int | Mapping[str, int] = 1,
    lead_in: int = 0,
    warm_up: int = 0,
    fence: Step = _nothing,
    after_round: Callable[[int], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Series]:
    """Let every variant take `block` steps in every round, and time them: one figure a variant and round, per step.

    A mapping gives each variant a `block` of its own. Who begins changes from round to round. `lead_in` steps before each block
    are not timed: they bring a variant's own code and data back into the caches, where they are when it runs alone. Neither
    are the first `warm_up` steps of each. `fence` is called before and after each block; on a device that works asynchronously
    it must wait until that has caught up, and where there are several ranks until all are there.

    >>> ticks = iter(range(100))
    >>> series = interleave({"a": print, "b": print}, rounds=2, clock=lambda: float(next(ticks)))
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    >>> series["b"].seconds
    (1.0, 1.0)
    """
    for step in variants.values():
        for _ in range(warm_up):
            step()
    names, seconds = list(variants), {name: [0.0] * rounds for name in variants}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            step, count = variants[name], block if isinstance(block, int) else block[name]
            for _ in range(lead_in):
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
    """`a` as a fraction of `b`; with `over`, what `a` takes more than `over` as a fraction of what `b` does.

    Rounds in which `b` took no longer than `over` say nothing and are left out.

    >>> ours, peer, bare = Series("ours", (12.0, 24.0)), Series("peer", (14.0, 28.0)), Series("bare", (10.0, 20.0))
    >>> compare(ours, peer, over=bare)
    Ratio(of_medians=0.5, median_of_rounds=0.5, quartiles=(0.5, 0.5), rounds=2)
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
    )


def slowest(name: str, ranks: Sequence[Sequence[float]]) -> Series:
    """The series of a world whose ranks have each timed the same blocks: in every round, that of the rank that took longest.

    >>> slowest("a", [[1.0, 4.0], [2.0, 3.0]]).seconds
    (2.0, 4.0)
    """
    return Series(name, tuple(max(times) for times in zip(*ranks, strict=True)))


def _quartiles(values: tuple[float, ...] | list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
