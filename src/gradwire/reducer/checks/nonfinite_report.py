"""What all ranks have found that is not finite, the error that names it, and what the NonFinite policy makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.errors import GradwireError, NonFiniteGradient, Origin
from gradwire.groups.base import Group
from gradwire.policies import NonFinite
from gradwire.reducer.checks.nonfinite_search import Found, NonFiniteKind
from gradwire.reducer.rank_agreement import gather_rows
from gradwire.runtime.warnings import warn_user

_AFTERWARDS = {
    NonFinite.RAISE: "No average was written, and the model can be used again: call zero_grad() before the next backward.",
    NonFinite.SKIP: "The step is skipped on all ranks: its gradients are None.",
    NonFinite.RECORD: "It is in the averages of all ranks.",
}
_LATER = {
    NonFinite.RAISE: "The optimizer has not used it. If a later backward raises this, it has written no average: call zero_grad() "
    "before another one.",
    NonFinite.SKIP: "The optimizer has skipped the step on all ranks.",
    NonFinite.RECORD: _AFTERWARDS[NonFinite.RECORD],
}
_IN_GRADS = "The averages are in .grad, and the model can be used again: call zero_grad() before the next backward."
_MANY = (10, 100, 1000, 10000)
"""Numbers of steps skipped in a row at which a warning is shown again."""
_WHAT = {
    NonFiniteKind.NAN: "is NaN",
    NonFiniteKind.INFINITE: "is infinite",
    NonFiniteKind.BEYOND: "is too large for the dtype in which it is reduced",
}


class StepRejected(Exception):
    """Returned by `verify` of a runner, on every rank alike: the step is dropped, and the group stays as it is."""

    def __init__(self, error: GradwireError) -> None:
        super().__init__(str(error))
        self.error = error


class StepSkipped(StepRejected):
    """As StepRejected, but nothing is raised: gradients become None, so that the optimizer does nothing."""


@dataclass(frozen=True, slots=True)
class RankFindings:
    """What one rank has found first, and in how many gradients."""

    gradient: Found | None
    average: Found | None
    gradients: int


def any_rank(mine: bool, group: Group, device: torch.device) -> bool:
    """Whether any rank has found something. A collective: on the wire, 8 bytes per rank."""
    return bool(gather_rows(group, torch.tensor([int(mine)], device=device), label="finite?").any())


def exchange(
    group: Group, gradients: Sequence[Found], averages: Sequence[Found], *, device: torch.device
) -> list[RankFindings]:
    """What every rank has found. A collective: on the wire, 56 bytes per rank."""
    # A NaN is named before an overflow.
    gradients = sorted(gradients, key=lambda found: found.kind is NonFiniteKind.BEYOND)
    row = [*_numbers(gradients), *_numbers(averages), len(gradients)]
    rows = gather_rows(group, torch.tensor(row, device=device), label="non-finite gradients").tolist()
    return [RankFindings(_found(r[:3]), _found(r[3:6]), r[6]) for r in rows]


def _numbers(found: Sequence[Found]) -> tuple[int, int, int]:
    kind, parameter, element = found[0] if found else (0, 0, 0)
    return kind, parameter, -1 if element is None else element


def _found(numbers: list[int]) -> Found | None:
    kind, parameter, element = numbers
    return Found(NonFiniteKind(kind), parameter, None if element < 0 else element) if kind else None


@dataclass(frozen=True, slots=True)
class NonFiniteReport:
    """What is known about a step. Every rank makes the same."""

    findings: Sequence[RankFindings]
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    hook: str
    averages_only: bool
    """Whether the hook only converts and adds up: then what no gradient explains is an overflow."""
    step: int
    in_grads: bool = False
    """Whether averages are in `.grad` before they are checked."""
    later: bool = False
    """Whether the device has decided, and the host reports it one step later."""
    advice: str = "Look at that rank's batch, loss and learning rate."
    """What to do about a gradient of a rank."""

    def error(self, policy: NonFinite) -> NonFiniteGradient:
        """The error, also where it is not raised."""
        for origin, wanted in (
            (Origin.GRADIENT, (NonFiniteKind.NAN, NonFiniteKind.INFINITE)),
            (Origin.OVERFLOW, (NonFiniteKind.BEYOND,)),
        ):
            ranks = [r for r, a in enumerate(self.findings) if a.gradient is not None and a.gradient.kind in wanted]
            if ranks:
                return self._of_ranks(origin, ranks, policy)
        return self._of_average(policy)

    def _of_ranks(self, origin: Origin, ranks: list[int], policy: NonFinite) -> NonFiniteGradient:
        found, count = self.findings[ranks[0]].gradient, self.findings[ranks[0]].gradients - 1
        assert found is not None
        more = f", as in {count} other parameter{'s' * (count > 1)}" if count else ""
        others = f" So it is on {_ranks(ranks[1:])}." if len(ranks) > 1 else ""
        advice = self.advice
        if origin is Origin.OVERFLOW:
            advice = f"{self.hook} converts it: use a wider dtype, scaled_cast, or a smaller loss scale."
        return self._error(
            f"on rank {ranks[0]} the gradient of {self.names[found.parameter]} {_WHAT[found.kind]}{self._at(found)}"
            f"{more}.{others} {advice}",
            policy,
            found,
            (ranks[0], origin),
        )

    def _of_average(self, policy: NonFinite) -> NonFiniteGradient:
        ranks = [rank for rank, findings in enumerate(self.findings) if findings.average is not None]
        found = self.findings[ranks[0]].average
        assert found is not None
        text = f"the gradients of {self.names[found.parameter]} are finite on every rank, but "
        if self.averages_only:
            where = " (or that of a parameter in its bucket)" if found.element is None else f",{self._at(found)}"
            text += f"their average is not{where}: the sum overflows in {self.hook}. "
            text += "Reduce in a wider dtype, or scale the loss down."
            return self._error(text, policy, found, (None, Origin.OVERFLOW))
        whose = "" if len(ranks) == len(self.findings) else f" on {_ranks(ranks)} only"
        text += f"the result of the hook {self.hook} {_WHAT[found.kind]}{whose}{self._at(found)}. Check the hook, or use mean()."
        return self._error(text, policy, found, (ranks[0] if whose else None, Origin.HOOK))

    def _error(self, text: str, policy: NonFinite, found: Found, whose: tuple[int | None, Origin]) -> NonFiniteGradient:
        afterwards = (_LATER if self.later else _AFTERWARDS)[policy]
        if self.in_grads and policy is NonFinite.RAISE:
            afterwards = _IN_GRADS
        return NonFiniteGradient(
            f"averaging gradients in step {self.step}: {text} {afterwards}",
            rank=whose[0],
            parameter=self.names[found.parameter],
            index=self._index(found),
            origin=whose[1],
            step=self.step,
        )

    def _at(self, found: Found) -> str:
        index = self._index(found)
        return "" if index is None else f" at {list(index)}"

    def _index(self, found: Found) -> tuple[int, ...] | None:
        if found.element is None:
            return None
        shape, rest, index = self.shapes[found.parameter], found.element, []
        for dimension in range(len(shape)):  # not unravel_index: FSDP's rows without names have length 0
            at, rest = divmod(rest, math.prod(shape[dimension + 1 :]))
            index.append(at)
        return tuple(index)


class NonFiniteHandler:
    """Applies the NonFinite policy to a report."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self.skipped = 0
        """How many steps were skipped so far; without one whose result has not been read."""
        self._in_a_row = 0
        self._last = -1
        self._shown = False

    def handle(self, report: NonFiniteReport, group: Group) -> StepRejected | None:
        """Record what was found. Returns what drops the step, on all ranks of `group` alike."""
        error = report.error(self._policy)
        group.ledger.events.warn(str(error), step=report.step)
        if self._policy is NonFinite.RAISE:
            return StepRejected(error)
        if self._policy is NonFinite.SKIP:
            self.skipped += 1
            self._in_a_row = self._in_a_row + 1 if report.step == self._last + 1 else 1
            self._last = report.step
        if group.rank == 0 and not self._shown:
            warn_user(f"{error} Later ones are recorded only.")
        elif group.rank == 0 and self._in_a_row in _MANY:
            warn_user(
                f"{self._in_a_row} steps in a row were skipped, so the model no longer trains. The last one: {error}"
            )
        self._shown = True
        return StepSkipped(error) if self._policy is NonFinite.SKIP else None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
