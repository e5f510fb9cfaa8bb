"""`RunOutcome`: how a run has ended, as its launcher knows it. It is saved in the directory of the run. Without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from gradwire.runtime.private_file import write_private

FILE = "outcome.json"


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank has ended."""

    rank: int
    status: int
    """Its exit code, or the negative number of the signal that killed it."""
    stopped: bool
    """Whether the launcher had told it to end."""
    raised: str | None = None
    """The name of the exception at the end of its output."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run has ended."""

    text: str
    """What the launcher has said of it; empty if no rank failed."""
    failed: int | None
    """The rank that failed first."""
    signal: str | None
    """The name of the signal that ended the run, if no rank had failed before."""
    ranks: tuple[RankOutcome, ...]
    time: float = 0.0
    """When it ended, in seconds since 1970."""
    cold: str = ""
    """Why each rank imported torch itself, instead of being forked from a process that had; empty if they were forked."""
    launcher: str = ""
    """In an elastic run, the one that has saved this: `ranks` are numbered as it numbers its processes."""

    def of(self, rank: int) -> RankOutcome | None:
        """How this rank has ended, if it has."""
        return next((one for one in self.ranks if one.rank == rank), None)


def save(directory: Path, outcome: RunOutcome) -> None:
    """Save it; on a full disk there is none."""
    with contextlib.suppress(OSError):
        write_private(directory / FILE, json.dumps(dataclasses.asdict(outcome)).encode())


def load(directory: Path, *, started: float = 0.0) -> RunOutcome | None:
    """What was saved, if it can be read: a launcher that was killed has saved nothing, and others never do. Nothing if ranks
    have `started` to record since, in seconds since 1970: then it is that of an earlier run."""
    try:
        saved = json.loads((directory / FILE).read_text())
        ranks = tuple(RankOutcome(**one) for one in saved["ranks"])
        outcome = RunOutcome(**{**saved, "ranks": ranks})
        return outcome if isinstance(outcome.text, str) and outcome.time >= started else None
    except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return None
