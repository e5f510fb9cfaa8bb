"""Which of several ranks' failures caused the others.

Note [Which failure is shown]
When a rank fails the others usually fail after it, because their peer is lost or the group was aborted. So the earliest failure
is the one to show. But a rank that raises aborts its group before it has printed its traceback and exited, clocks and threads
make times inexact, and a peer may exit first. So among failures within `NEAR` seconds of the earliest, one that does not look
like a consequence goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

NEAR = 1.0
"""Seconds within which failures count as simultaneous."""

T = TypeVar("T")


def root_cause(failures: Iterable[T], *, when: Callable[[T], float], consequence: Callable[[T], int]) -> T | None:
    """The failure to show: of those near the earliest, the one with the lowest `consequence`, then the earliest. None if empty.

    `consequence` is 0 for a failure of the rank itself; the higher, the more it looks like a consequence of another rank's.

    >>> failures = [(3.0, "PeerLost"), (3.2, "ValueError"), (9.0, "ValueError")]
    >>> root_cause(failures, when=lambda f: f[0], consequence=lambda f: int(f[1] == "PeerLost"))
    (3.2, 'ValueError')
    """
    known = list(failures)
    limit = min(map(when, known), default=0.0) + NEAR
    return min(
        (failure for failure in known if when(failure) <= limit),
        key=lambda failure: (consequence(failure), when(failure)),
        default=None,
    )
