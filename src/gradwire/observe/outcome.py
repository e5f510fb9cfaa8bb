"""`Outcome`: how a run has ended, as its launcher knows it. It is saved in the directory of the run. Without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

FILE = "outcome.json"


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank has ended."""

    rank: int
    status: int
    """Its exit code, or the negative number of the signal that killed it."""
    stopped: bool
    """Whether the launcher had told it to end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run has ended."""

    text: str
    """What the launcher has said of it; empty if no rank failed."""
    failed: int | None
    """The rank that failed first."""
    signal: str | None
    """The name of the signal that ended the run, if no rank had failed before."""
    ranks: tuple[RankOutcome, ...]

    def of(self, rank: int) -> RankOutcome | None:
        """How this rank has ended, if it has."""
        return next((one for one in self.ranks if one.rank == rank), None)


def save(directory: Path, outcome: Outcome) -> None:
    """Save it; on a full disk there is none."""
    with contextlib.suppress(OSError):
        (directory / FILE).write_text(json.dumps(dataclasses.asdict(outcome)))


def load(directory: Path) -> Outcome | None:
    """What was saved, if it can be read: a launcher that was killed has saved nothing, and others never do."""
    try:
        saved = json.loads((directory / FILE).read_text())
        ranks = tuple(RankOutcome(int(one["rank"]), int(one["status"]), bool(one["stopped"])) for one in saved["ranks"])
        failed, signal = saved["failed"], saved["signal"]
        return Outcome(
            str(saved["text"]),
            None if failed is None else int(failed),
            None if signal is None else str(signal),
            ranks,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
