"""Warm rank processes: kept between calls, because importing torch takes seconds.

A worker waits for a job (usually a function, and how to build its rank's group), runs it, reports the result, closes its group when
every rank is done, looks for leftovers and waits for the next job. The rendezvous store outlives every rank. What a set of
outcomes means is decided in `testing/ranks.py`; this package is independent of the kind of group.
"""

from gradwire.testing.pool.job import GroupJob, JobContext
from gradwire.testing.pool.outcome import (
    ABORT_GRACE,
    GROUP_MARGIN,
    Fate,
    LeftBehind,
    Outcome,
    RemoteTraceback,
    root_failure,
)
from gradwire.testing.pool.pool import RankPool, default_pool

__all__ = [
    "ABORT_GRACE",
    "GROUP_MARGIN",
    "Fate",
    "GroupJob",
    "JobContext",
    "LeftBehind",
    "Outcome",
    "RankPool",
    "RemoteTraceback",
    "default_pool",
    "root_failure",
]
