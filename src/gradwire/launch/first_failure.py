"""The outcome of a run: which rank failed first, and one line about all ranks. Pure.

Note [Who is named]
Some errors are raised by ranks that did nothing wrong, such as a timeout by all but the missing rank. A RankError contains the
ranks it is about. If one of them has failed too, its failure is shown; the last line of a run is about them, and does not blame
the rank that raised the error.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from gradwire.runtime.rank_error import RankError, name_ranks, root_cause

_OURS = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended."""

    rank: int
    status: int
    """Its exit code, or the negative number of the signal that killed it."""
    after: float
    """Seconds since the start."""
    stopped: bool = False
    """Whether the launcher had sent it a signal to end before it failed."""
    error: RankError | None = None
    """The exception that ended it; its time is in seconds since the start. None after os._exit, a signal or a crash."""

    @property
    def failed(self) -> bool:
        """Whether it failed, without having been stopped."""
        return self.status != 0 and not self.stopped

    @property
    def failed_after(self) -> float:
        """Seconds from the start to its failure: it may take a while to exit after an exception."""
        return self.after if self.error is None else min(self.after, self.error.time)

    @property
    def consequence(self) -> int:
        """See `RankError.consequence`."""
        return 0 if self.error is None else self.error.consequence

    @property
    def while_starting(self) -> bool:
        """Whether the rank was interrupted before or while it imported modules or joined its world."""
        if self.error is None:
            return self.status == -signal.SIGINT
        return self.error.name == KeyboardInterrupt.__name__ and self.error.starting

    @property
    def own_status(self) -> int:
        """The status; 1 after an exception, if the launcher killed the rank while it exited."""
        return 1 if self.error is not None and not self.stopped and self.status in _OURS else self.status

    @property
    def exit_code(self) -> int:
        """The exit code as shells report it."""
        return self.own_status if self.own_status >= 0 else 128 - self.own_status

    def __str__(self) -> str:
        return described(self.own_status, self.after)


def described(status: int, after: float) -> str:
    """A description of how a process ended: `status` is its exit code, or the negative number of a signal.

    >>> described(-9, 3.21)
    'killed by SIGKILL, after 3.2 s'
    """
    how = f"exit code {status}" if status >= 0 else f"killed by {_name(-status)}"
    return f"{how}, after {after:.1f} s"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The failure that caused the others: see `rank_error.py`, and Note [Who is named]."""
    failures = {ending.rank: ending for ending in sorted(endings, key=lambda e: e.rank) if ending.failed}
    first = root_cause(failures.values(), when=lambda e: e.failed_after, consequence=lambda e: e.consequence)
    found, seen = first, set[int]()
    while found is not None and found.error is not None and found.rank not in found.error.culprits:
        if found.rank in seen:
            return first  # ranks that blame each other
        seen.add(found.rank)
        named = [failures[rank] for rank in found.error.culprits if rank in failures]
        if not named:
            break
        found = min(named, key=lambda e: e.failed_after)
    return found


def summary(first: Ending, endings: Iterable[Ending]) -> str:
    """One line about the failure and about what happened to the other ranks.

    >>> summary(Ending(2, 1, 3.21), [Ending(r, -15, 3.3, stopped=True) for r in (0, 1, 3)])
    'rank 2 failed first (exit code 1, after 3.2 s); ranks 0, 1, 3 were stopped'
    """
    others = [ending for ending in endings if ending.rank != first.rank]
    too = [e.rank for e in others if e.failed or _failed_alike(e, first)]
    if first.error is None or not first.error.summary:
        parts = [f"rank {first.rank} failed {'first ' if others else ''}({first})"]
    else:
        parts = [f"{first.error.summary} ({first.error.name} on rank {first.rank}, {first})"]
    for one, several, ranks in (
        ("was stopped", "were stopped", [e.rank for e in others if e.stopped and e.rank not in too]),
        ("failed too", "failed too", too),
        ("had finished", "had finished", [e.rank for e in others if not e.stopped and not e.failed]),
    ):
        if ranks:
            parts.append(name_ranks(ranks, one, several))
    return "; ".join(parts)


def _failed_alike(ending: Ending, first: Ending) -> bool:
    """Whether a rank that was stopped has raised what `first` has raised: ranks agree on many errors, and some are slower."""
    if ending.status == 0 or ending.error is None or first.error is None:
        return False
    return (ending.error.module, ending.error.name) == (first.error.module, first.error.name)
