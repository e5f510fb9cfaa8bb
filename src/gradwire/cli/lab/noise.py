"""Whether two ways of training end at the same loss, as far as a few seeds can show.

Note [Within noise]
All ways are trained from the same n seeds, which determine weights and data. Let s be the standard deviation of the dense runs'
final losses: how much a seed matters without compression. Two means of n dense runs each, from different seeds, would be within
2 s sqrt(2 / n) of each other in about 19 of 20 cases. A way is "within noise" if its mean is at most that much above the dense
mean; lower is always within. Only the dense spread is used, so a way does not pass by being erratic, and its own spread is shown
next to it. With few seeds s itself is rough, and can by chance be so small that nothing would pass; so a way whose loss is more
than noise but at most one percent above the dense one is distinguished from those that are worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_DEVIATIONS = 2.0
_SLIGHT = 0.01


class Verdict(Enum):
    """How a way of training compares with the dense one."""

    NOISE = "within noise"
    SLIGHT = "within 1 %"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one way of training compares with the dense one: see Note [Within noise]."""

    mean: float
    spread: float
    difference: float
    """Of the means."""
    percent: float
    """The mean over seeds of the difference, relative to the dense loss of the same seed."""
    allowed: float
    """How far above the dense mean it may be."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the difference."""
        if self.difference <= self.allowed:
            return Verdict.NOISE
        return Verdict.SLIGHT if self.difference <= _SLIGHT * (self.mean - self.difference) else Verdict.WORSE


def spread(values: Sequence[float]) -> float:
    """The standard deviation, 0 for a single value; NaN if one of them is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) if len(values) > 1 else 0.0


def compare(losses: Sequence[float], dense: Sequence[float]) -> Comparison:
    """Final losses of the same seeds.

    >>> found = compare([1.5, 2.5, 3.5], [1.0, 2.0, 3.0])
    >>> found.difference, round(found.allowed, 3), found.verdict.value
    (0.5, 1.633, 'within noise')
    """
    paired = [(a - b) / b * 100 for a, b in zip(losses, dense, strict=True)]
    difference = statistics.fmean(losses) - statistics.fmean(dense)
    return Comparison(
        mean=statistics.fmean(losses),
        spread=spread(losses),
        difference=difference,
        percent=statistics.fmean(paired),
        allowed=_DEVIATIONS * spread(dense) * math.sqrt(2 / len(dense)),
    )
