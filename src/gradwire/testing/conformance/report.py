"""What a run of the suite found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import GradwireError


@dataclass(frozen=True, slots=True)
class Failure:
    """One problem. `rank` is None if the world failed, not a rank."""

    check: str
    rank: int | None
    problem: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.check}{where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank found in one world."""

    rank: int
    size: int
    ran: tuple[str, ...]
    skipped: tuple[str, ...]
    failures: tuple[Failure, ...]
    broken: bool
    """Whether a check raised: the world could not be used afterward."""


@dataclass(frozen=True, slots=True)
class Report:
    """The checks that a group has passed, and those that need more ranks than it had."""

    size: int
    ran: tuple[str, ...]
    skipped: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        passed = f"{len(self.ran)} checks passed on {self.size} ranks in {self.seconds:.1f} s"
        if not self.skipped:
            return passed
        return f"{passed}, {len(self.skipped)} skipped because they need more ranks ({', '.join(self.skipped)})"


class ConformanceError(GradwireError, AssertionError):
    """A group fails the suite: names each failed check, the rank it failed on, and what was expected."""

    SHOWN = 5

    def __init__(self, failures: Sequence[Failure], unreached: Sequence[str] = ()) -> None:
        self.failures = tuple(failures)
        self.unreached = tuple(unreached)
        super().__init__(self._describe())

    def _describe(self) -> str:
        by_check: dict[str, list[Failure]] = {}
        for failure in self.failures:
            by_check.setdefault(failure.check, []).append(failure)
        lines = [f"the group fails {len(by_check)} of the conformance checks:"]
        for check, failures in by_check.items():
            lines += [f"  {failure}" for failure in failures[: self.SHOWN]]
            if len(failures) > self.SHOWN:
                lines.append(f"  {check}: and {len(failures) - self.SHOWN} more")
        if self.unreached:
            lines.append(f"  not reached, because the world was broken before: {', '.join(self.unreached)}")
        lines.append("Run one check alone with only=[name]; `failures` holds all of them.")
        return "\n".join(lines)
