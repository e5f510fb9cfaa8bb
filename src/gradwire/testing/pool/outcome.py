"""The outcome of a rank as a value; and the time limits of the pool."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradwire.errors import GroupAborted, PeerLost
from gradwire.runtime.root_cause import root_cause

START_LIMIT = 120.0
"""Seconds that new workers have to import torch and report."""
ABORT_GRACE = 5.0
"""Seconds that ranks have to stop after another has failed; then they are killed."""
GROUP_MARGIN = 5.0
"""Seconds by which a group's own timeout is longer than the run's, whose error shows every rank's stack."""
CLOSE_LIMIT = 30.0
"""Seconds that ranks have to close their groups and clean up once all have answered."""
LEFTOVER_GRACE = 3.0
"""Seconds that a rank's leftovers may take to disappear by themselves."""
MESSAGE_LIMIT = 30.0
"""Seconds within which a partly received message must make progress."""
TURN_LIMIT = 900.0
"""Seconds that a call waits for the calls of other threads on the same pool."""


class Fate(Enum):
    """How a rank ended."""

    RETURNED = "its function returned"
    RAISED = "its function, or closing its group, raised; or it left something behind"
    DIED = "its process ended by itself"
    STUCK = "it had not finished when its time was up"


class LeftBehind(Enum):
    """What to do about threads, processes, sockets and descriptors that a rank's function leaves behind.

    In either case the rank's process is not reused.
    """

    IGNORE = "ignore"
    """Ignore them: a function may leave things that end with its process."""
    RAISE = "raise"
    """Raise InternalError, which names each: for tests of code that must clean up after itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one rank, and when it ended (on `time.monotonic`'s clock, which the processes of a host share).

    `detail` is how a process died, or the stack of a rank that was stuck.
    """

    rank: int
    fate: Fate
    when: float
    value: Any = None
    error: BaseException | None = None
    detail: str = ""

    def failed(self, lost: Collection[int]) -> bool:
        """Whether this is a failure, given that the ranks in `lost` are expected to die."""
        return self.fate is not (Fate.DIED if self.rank in lost else Fate.RETURNED)


def root_failure(failures: Iterable[Outcome]) -> Outcome | None:
    """The failure that caused the others; None if all ranks that failed were stuck.

    Near the earliest, an error of the rank itself comes first, then a process that died, then PeerLost and GroupAborted, which look
    like consequences.
    """

    def consequence(outcome: Outcome) -> int:
        if outcome.fate is Fate.DIED:
            return 1
        return 2 if isinstance(outcome.error, (PeerLost, GroupAborted)) else 0

    active = (outcome for outcome in failures if outcome.fate is not Fate.STUCK)
    return root_cause(active, when=lambda outcome: outcome.when, consequence=consequence)


class RemoteTraceback(Exception):
    """The `__cause__` of an error from another process: prints as the traceback it had there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'
