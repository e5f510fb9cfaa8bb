"""The line between two sets of bounds: how two clocks that run at slightly different speeds differ over time. Pure.

Note [Drift]
Quartz clocks differ by up to 50 millionths, 180 ms in an hour, where collectives bound the difference of two clocks to well below a
millisecond. So the difference is a line, of which bounds from below and from above are known at many times. Of the lines that
keep all bounds, the one is taken that stays furthest from them. For a slope, the distance between the highest line below and the
lowest line above is a concave function, so its maximum is found by a search; only the convex hulls of the bounds matter for it.
In a short time a slope explains nothing that a constant does not, and the slope would be arbitrary: there it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[int, int]
"""A time, and a bound of the difference at that time, in nanoseconds."""
_FASTEST = 1e-3
"""Clocks do not differ by more than that."""
_SHORT = 60 * 10**9
_HALVINGS = 80


@dataclass(frozen=True, slots=True)
class ClockLine:
    """A difference of `offset` nanoseconds at the time `at`, and `drift` more for each nanosecond after it."""

    offset: int
    drift: float
    at: int
    error: int
    """At most this wrong, at any time between the first bound and the last. If no line keeps all bounds, by how much it fails."""


def fit_line(lower: Sequence[Point], upper: Sequence[Point]) -> ClockLine:
    """The line above all of `lower` and below all of `upper`, neither of which is empty."""
    times = [time for time, _ in (*lower, *upper)]
    first, last = min(times), max(times)
    at, base = (first + last) // 2, lower[0][1]
    below = _hull([(float(time - at), float(value - base)) for time, value in lower])
    above = [(x, -y) for x, y in _hull([(float(time - at), float(base - value)) for time, value in upper])]

    def floor(slope: float) -> float:
        return max(y - slope * x for x, y in below)

    def ceiling(slope: float) -> float:
        return min(y - slope * x for x, y in above)

    def room(slope: float) -> float:
        return ceiling(slope) - floor(slope)

    short = last - first < _SHORT and room(0.0) >= 0
    slope = 0.0 if short else _highest(room, -_FASTEST, _FASTEST)
    middle = (floor(slope) + ceiling(slope)) / 2
    error = abs(room(slope)) / 2
    if not short and room(slope) > 0:
        slopes = _boundary(room, slope, -_FASTEST), _boundary(room, slope, _FASTEST)
        for x in (float(first - at), float(last - at)):
            most, least = _range_at(x, floor, ceiling, slopes)
            here = middle + slope * x
            error = max(error, most - here, here - least)
    return ClockLine(base + round(middle), slope, at, math.ceil(error))


_Bound = Callable[[float], float]


def _range_at(x: float, floor: _Bound, ceiling: _Bound, slopes: tuple[float, float]) -> tuple[float, float]:
    """The highest and the lowest value at `x` of all lines that keep all bounds."""

    def high(slope: float) -> float:
        return ceiling(slope) + slope * x

    def low(slope: float) -> float:
        return -floor(slope) - slope * x

    return high(_highest(high, *slopes)), -low(_highest(low, *slopes))


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that a line above all of them can touch: the upper convex hull, from left to right.

    >>> _hull([(0.0, 0.0), (1.0, -1.0), (2.0, 3.0), (2.0, 1.0), (4.0, 0.0)])
    [(0.0, 0.0), (2.0, 3.0), (4.0, 0.0)]
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while hull and (
            hull[-1][0] == x
            or (
                len(hull) > 1
                and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) <= (y - hull[-2][1]) * (hull[-1][0] - hull[-2][0])
            )
        ):
            hull.pop()
        hull.append((x, y))
    return hull


def _highest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a concave function is highest; in the middle, if that is a range."""
    begin, end = low, high
    for _ in range(_HALVINGS):
        third = (end - begin) / 3
        a, b = function(begin + third), function(end - third)
        if a <= b:
            begin += third
        if b <= a:
            end -= third
    return (begin + end) / 2


def _boundary(function: Callable[[float], float], inside: float, outside: float) -> float:
    """Between a place where the function is positive and one further out: where it stops being so."""
    if function(outside) > 0:
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if function(middle) > 0:
            inside = middle
        else:
            outside = middle
    return inside
