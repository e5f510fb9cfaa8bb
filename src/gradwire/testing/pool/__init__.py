"""Warm rank processes: kept between calls, because importing torch takes seconds.

A worker waits for a job (a function, and how to build its rank's group), does it, says what came of it, closes its group when
every rank is through, looks for leftovers and waits for the next. The pool's own process hosts the rendezvous store, so that
no rank's death takes it along. What a set of outcomes means is decided in `testing/ranks.py`; this package knows no kind of
group.
"""

from gradwire.testing.pool.outcome import ABORT_GRACE, GROUP_MARGIN, Fate, LeftBehind, Outcome, RemoteTraceback
from gradwire.testing.pool.pool import RankPool, default_pool

__all__ = [
    "ABORT_GRACE",
    "GROUP_MARGIN",
    "Fate",
    "LeftBehind",
    "Outcome",
    "RankPool",
    "RemoteTraceback",
    "default_pool",
]
