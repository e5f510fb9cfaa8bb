"""What a rank that failed a step tells the others, and what they read from it.

Note [Iterations]
A rank counts the iterations that are over for its caller: those that were averaged, and those that raised. When a step fails,
its rank aborts the group and gives the number of that iteration in the reason, which is text because text is what every kind of
group carries to the other ranks. A rank that has not come to the end of that iteration raises the failure there, once. A
rank that has finished it already, because everything that it needed had been sent, must not raise in the next one: ranks would
go on one iteration apart, and the last iteration would wait for a rank that has none left. It warns instead. And since an abort
takes time to arrive, it may hit one rank in an earlier or a later iteration than another; so when all ranks meet in recovery
they compare their counts, and one that is behind raises in as many further iterations as the others have lost.
"""

from __future__ import annotations

import re

from gradwire.errors import GroupAborted

_REASON = re.compile(r"step (\d+) failed on rank \d+ with ")


def reason(iteration: int, rank: int, error: BaseException) -> str:
    """Why the group is aborted: iteration number `iteration` raised `error` on `rank`.

    >>> reason(3, 1, ValueError("no"))
    'step 3 failed on rank 1 with ValueError: no'
    """
    return f"step {iteration} failed on rank {rank} with {type(error).__name__}: {error}"


def failed_iteration(failure: BaseException) -> int | None:
    """The iteration that a group's failure names, or None if it was aborted for another reason."""
    found = _REASON.search(failure.reason) if isinstance(failure, GroupAborted) else None
    return None if found is None else int(found.group(1))
