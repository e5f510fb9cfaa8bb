"""The suite: the table of checks, how they are run, and the report. Checks that leave a world intact share one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import GradwireError, NoSubgroups, UsageError
from gradwire.groups.base import Group
from gradwire.testing.conformance import aliasing, completion, lifecycle, memory, operations, p2p, split, usage, work
from gradwire.testing.conformance.compare import Problems

_HERE = Path(__file__).parent
MakeWorld = Callable[[Callable[[Group], Any]], Sequence[Any]]
"""Runs a function on every rank of a fresh world and returns what each returned, in rank order."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `fresh`: it may break its world, and needs a separate one. `ranks`: the minimum number of ranks."""

    name: str
    run: Callable[[Group], Problems]
    ranks: int = 1
    fresh: bool = False


_MODULES = (operations, memory, aliasing, p2p, split, work, completion, usage, lifecycle)
_NEEDS = {p2p: (2, False), usage: (2, True), lifecycle: (2, True)}
"""The minimum number of ranks, and whether they may break their world: all checks of a module; then those that differ."""
_EXCEPTIONS = {
    "aliasing": (2, False),
    "hook_raising": (2, True),
    "callbacks_raising": (2, True),
    "hooks_at_close": (1, True),
    "close": (1, True),
}


def _checks() -> Iterator[Check]:
    """Every check, in the order in which they are written."""
    for module in _MODULES:
        for name, run in vars(module).items():
            if name.startswith("check_") and run.__module__ == module.__name__:
                short = name.removeprefix("check_")
                yield Check(short, run, *_EXCEPTIONS.get(short, _NEEDS.get(module, (1, False))))


CHECKS = {check.name: check for check in sorted(_checks(), key=lambda check: check.fresh)}


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
    """What one rank found in one world, of this size; 0 if it could not be made."""

    size: int
    ran: tuple[str, ...]
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
        checks, ranks = ("" if number == 1 else "s" for number in (len(self.ran), self.size))
        passed = f"{len(self.ran)} check{checks} passed on {self.size} rank{ranks} in {self.seconds:.1f} s"
        if not self.skipped:
            return passed
        return f"{passed}, {len(self.skipped)} skipped because they need more ranks ({', '.join(self.skipped)})"


class ConformanceError(GradwireError, AssertionError):
    """A group fails the suite: names each failed check, the rank it failed on, and what was expected."""

    SHOWN = 5

    def __init__(self, failures: Sequence[Failure], unreached: Sequence[str] = ()) -> None:
        self.failures = tuple(failures)
        self.unreached = tuple(unreached)
        by_check: dict[str, list[Failure]] = {}
        for failure in failures:
            by_check.setdefault(failure.check, []).append(failure)
        lines = [f"the group fails {len(by_check)} of the conformance checks:"]
        for check, found in by_check.items():
            lines += [f"  {failure}" for failure in found[: self.SHOWN]]
            if len(found) > self.SHOWN:
                lines.append(f"  {check}: and {len(found) - self.SHOWN} more")
        if unreached:
            lines.append(f"  not reached, because the world was broken before: {', '.join(unreached)}")
        super().__init__("\n".join([*lines, "Run one check alone with only=[name]; `failures` holds all of them."]))


def check_names() -> tuple[str, ...]:
    """The names of all checks, in the order in which they run."""
    return tuple(CHECKS)


def check_group(make_world: MakeWorld, *, only: Iterable[str] | None = None, device: str = "cpu") -> Report:
    """Check that a Group conforms: every operation against the reference, Work, hooks, events, usage errors and endings.

    `make_world(fn)` runs `fn(group)` on every rank of a fresh world, closes the groups, and returns the results in rank
    order; `fn` can be pickled. A group that hangs is reported when the world's timeout has passed. A minute is enough: most
    checks share one world, and take a few seconds in total on an idle machine. Tensors are made on `device`.
    Raises ConformanceError, which names what failed.

    >>> from gradwire.groups import ThreadGroup
    >>> def alone(fn):
    ...     with ThreadGroup.world(1)[0] as group:
    ...         return [fn(group)]
    >>> report = check_group(alone, only=["all_reduce_ops", "split"])
    >>> report.ran
    ('all_reduce_ops', 'split')
    """
    began = time.perf_counter()
    wanted = tuple(CHECKS) if only is None else (only,) if isinstance(only, str) else tuple(only)
    if unknown := [name for name in wanted if name not in CHECKS] or not wanted:
        raise UsageError(f"check_group: unknown checks {unknown}. Choose from {', '.join(CHECKS)}.")
    chosen = [check for check in CHECKS.values() if check.name in wanted]
    shared = tuple(check.name for check in chosen if not check.fresh)
    worlds = [*([shared] if shared else []), *((check.name,) for check in chosen if check.fresh)]
    outcomes: list[Outcome] = []
    for number, names in enumerate(worlds):
        outcomes += _in_one_world(make_world, Visit(names, device))
        if number == 0 and len(names) > 1 and any(outcome.broken for outcome in outcomes):
            break  # a failure in the first world would be repeated, slowly, in every other
    size = max(outcome.size for outcome in outcomes)
    skipped = tuple(check.name for check in chosen if 0 < size < check.ranks)
    if failures := [failure for outcome in outcomes for failure in outcome.failures]:
        named = {*skipped, *(failure.check for failure in failures)}.union(*(outcome.ran for outcome in outcomes))
        raise ConformanceError(failures, [check.name for check in chosen if check.name not in named])
    ran = tuple(check.name for check in chosen if check.name not in skipped)
    return Report(size, ran, skipped, time.perf_counter() - began)


def _in_one_world(make_world: MakeWorld, visit: Visit) -> list[Outcome]:
    name = visit.names[0] if len(visit.names) == 1 else f"{visit.names[0]} to {visit.names[-1]}"
    try:
        results = list(make_world(visit))
    except Exception as error:  # a world that breaks is a finding about the group, to be reported with the others
        failure = Failure(name, None, f"make_world raised {type(error).__name__}: {error}")
        return [Outcome(0, (), (failure,), broken=True)]
    if not results or not all(isinstance(outcome, Outcome) for outcome in results):
        raise UsageError(
            f"check_group: make_world returned {results!r}. It must call the given function on every rank and "
            "return the list of results in rank order."
        )
    return results


@dataclass(frozen=True, slots=True)
class Visit:
    """What a rank does in one world: run some checks and return the problems. Can be pickled."""

    names: tuple[str, ...]
    device: str = "cpu"

    def __call__(self, group: Group) -> Outcome:
        """Run the checks on `group`, until one of them raises."""
        ran: list[str] = []
        failures: list[Failure] = []
        broken = False
        with nullcontext() if self.device == "cpu" else torch.device(self.device):
            for name in (name for name in self.names if CHECKS[name].ranks <= group.size):
                ran.append(name)
                try:
                    failures += [Failure(name, group.rank, problem) for problem in CHECKS[name].run(group)]
                except Exception as error:
                    failures.append(Failure(name, group.rank, _described(error)))
                    if isinstance(error, NoSubgroups):
                        continue
                    broken = True
                    group.abort(f"conformance check {name} failed")
                    break
        return Outcome(group.size, tuple(ran), tuple(failures), broken)


def _described(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == _HERE]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"it raised {type(error).__name__}{where}: {error}"
