"""Validation of timeouts: one check for every place that takes one."""

from __future__ import annotations

import math
from numbers import Real

from gradwire.errors import UsageError, UsageTypeError

LONGEST = 1e9
"""Seconds: about 30 years, which every engine can still count in nanoseconds."""


def timeout_seconds(what: str, value: object) -> float:
    """`value` as the seconds that something may take, or UsageError: a number above 0 that is finite."""
    seconds = _number(what, value)
    if not 0 < seconds <= LONGEST:
        raise UsageError(f"{what}: timeout is {value!r}. Pass a number of seconds above 0 and at most {LONGEST:g}.")
    return seconds


def wait_seconds(what: str, value: object) -> float:
    """`value` as the seconds that a caller waits for something with a deadline of its own, or UsageError: any number but NaN. Below
    0, as the rest of a time that has passed may be, it counts as 0. Infinity sets no limit but that deadline."""
    seconds = _number(what, value)
    if math.isnan(seconds):
        raise UsageError(f"{what}: timeout is {value!r}. Pass a number of seconds.")
    return max(0.0, seconds)


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageTypeError(
            f"{what}: timeout is {value!r}, of type {type(value).__name__}. Pass a number of seconds, such as 30.0, or the "
            "total_seconds() of a timedelta."
        )
    return float(value)
