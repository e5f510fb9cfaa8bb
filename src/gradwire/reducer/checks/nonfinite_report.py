"""What all ranks have found that is not finite, and the error that says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.collectives import all_gather_into_tensor
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups.base import Group
from gradwire.policies import NonFinite
from gradwire.reducer.checks.nonfinite_search import Found, Kind

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
_WHAT = {
    Kind.NAN: "is NaN",
    Kind.INFINITE: "is infinite",
    Kind.BEYOND: "is too large for the dtype in which it is reduced",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank has found first, and in how many parameters."""

    gradient: Found | None
    gradients: int
    average: Found | None
    averages: int


def any_rank(mine: bool, group: Group, device: torch.device) -> bool:
    """Whether any rank has found something. A collective: on the wire, 8 bytes per rank."""
    flag = torch.tensor([int(mine)], dtype=torch.int64, device=device)
    flags = flag.new_empty(group.size)
    group.submit(all_gather_into_tensor(flags, flag, label="finite?")).wait()
    return any(flags.tolist())


def exchange(
    group: Group, gradients: Sequence[Found], averages: Sequence[Found], *, device: torch.device
) -> list[Answer]:
    """What every rank has found. A collective: on the wire, 64 bytes per rank."""
    gradients = sorted(gradients, key=lambda found: found.kind is Kind.BEYOND)  # which is no error next to a NaN
    row = [value for found in (gradients, averages) for value in (*(found[0] if found else (0, 0, 0)), len(found))]
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    gathered = mine.new_empty(group.size * len(row))
    group.submit(all_gather_into_tensor(gathered, mine, label="non-finite gradients")).wait()
    return [Answer(_found(r[:3]), r[3], _found(r[4:7]), r[7]) for r in gathered.view(group.size, -1).tolist()]


def _found(numbers: list[int]) -> Found | None:
    kind, parameter, element = numbers
    return Found(Kind(kind), parameter, element) if kind else None


@dataclass(frozen=True, slots=True)
class Report:
    """What is known about a step. Every rank makes the same."""

    answers: Sequence[Answer]
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    hook: str
    averages_only: bool
    """Whether the hook only converts and adds up: then what gradients do not explain is an overflow."""
    step: int
    in_grads: bool = False
    """Whether averages are in `.grad` before they are checked."""
    later: bool = False
    """Whether the device has decided, so that the host reports it in the next step."""
    advice: str = "Look at that rank's batch, loss and learning rate."
    """What to do about a gradient of a rank."""

    def error(self, policy: NonFinite) -> NonFiniteGradient:
        """The error, also where it is not raised."""
        for origin, wanted in ((Origin.GRADIENT, (Kind.NAN, Kind.INFINITE)), (Origin.OVERFLOW, (Kind.BEYOND,))):
            ranks = [r for r, a in enumerate(self.answers) if a.gradient is not None and a.gradient.kind in wanted]
            if ranks:
                return self._of_ranks(origin, ranks, policy)
        return self._of_average(policy)

    def _of_ranks(self, origin: Origin, ranks: list[int], policy: NonFinite) -> NonFiniteGradient:
        answer = self.answers[ranks[0]]
        found = answer.gradient
        assert found is not None
        more = f", as in {_counted(answer.gradients - 1, 'other parameter')}" if answer.gradients > 1 else ""
        others = f" So it is on {_ranks(ranks[1:])}." if len(ranks) > 1 else ""
        advice = self.advice
        if origin is Origin.OVERFLOW:
            advice = f"{self.hook} converts it: use a wider dtype, scaled_cast, or a smaller loss scale."
        return self._error(
            f"on rank {ranks[0]} the gradient of {self.names[found.parameter]} {_WHAT[found.kind]} at {self._index(found)}"
            f"{more}.{others} {advice}",
            policy,
            found,
            (ranks[0], origin),
        )

    def _of_average(self, policy: NonFinite) -> NonFiniteGradient:
        ranks = [rank for rank, answer in enumerate(self.answers) if answer.average is not None]
        found = self.answers[ranks[0]].average
        assert found is not None
        where = f"at {self._index(found)}"
        if self.averages_only:
            text = f"the gradients of {self.names[found.parameter]} are finite on every rank, but their average is not, {where}: "
            text += f"the sum overflows in {self.hook}. Reduce in a wider dtype, or scale the loss down."
            return self._error(text, policy, found, (None, Origin.OVERFLOW))
        whose = "" if len(ranks) == len(self.answers) else f" on {_ranks(ranks)} only"
        text = f"the gradients of {self.names[found.parameter]} are finite on every rank, but what the hook {self.hook} makes of "
        text += f"them {_WHAT[found.kind]}{whose}, {where}. Look at the hook, or use mean()."
        return self._error(text, policy, found, (ranks[0] if whose else None, Origin.HOOK))

    def _error(self, text: str, policy: NonFinite, found: Found, whose: tuple[int | None, Origin]) -> NonFiniteGradient:
        afterwards = (_LATER if self.later else _AFTERWARDS)[policy]
        if self.in_grads and policy is NonFinite.RAISE:
            afterwards = _IN_GRADS
        return NonFiniteGradient(
            f"averaging gradients in step {self.step}: {text} {afterwards}",
            rank=whose[0],
            parameter=self.names[found.parameter],
            index=self._index_tuple(found),
            origin=whose[1],
            step=self.step,
        )

    def _index(self, found: Found) -> str:
        return str(list(self._index_tuple(found)))

    def _index_tuple(self, found: Found) -> tuple[int, ...]:
        shape, rest, index = self.shapes[found.parameter], found.element, []
        for dimension in range(len(shape)):
            at, rest = divmod(rest, math.prod(shape[dimension + 1 :]))
            index.append(at)
        return tuple(index)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
