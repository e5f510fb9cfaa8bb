"""Checks whether the gradients of a step, and their averages, are finite (see `policies.NonFinite`).

A healthy step costs one sum over each bucket before its reduction and one after it, and, when all reductions are done, one
all-gather of 8 bytes per rank. Ranks decide together, because a hook may give each of them a different result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import all_gather_into_tensor
from gradwire.concurrency import weakly
from gradwire.errors import NonFiniteGradient
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.reducer.drive import Pending
from gradwire.reducer.hook_runner import HookRunner
from gradwire.reducer.reductions import StepRejected

Names = Callable[[], list[str]]
"""Returns the names of the parameters with a non-finite value; waits for the device."""


class NonFiniteChecked:
    """A runner that checks every bucket of a step, and rejects the step on all ranks if one of them finds a non-finite value."""

    def __init__(self, inner: HookRunner, names: Sequence[str]) -> None:
        self._inner = inner
        self._names = list(names)
        self._gradients: list[Names] = []
        self._averages: list[Names] = []
        self._check = weakly(self._verify)  # the runner, which this object holds, holds the check

    @property
    def name(self) -> str:
        """The inner runner's."""
        return self._inner.name

    @property
    def checks(self) -> list[Callable[[int], None]]:
        """The inner runner's."""
        return self._inner.checks

    def start(self, bucket: GradBucket) -> Pending:
        """Start the reduction of `bucket`, and check its input and its result."""
        if self._check not in self.checks:  # the first bucket of a step
            self._gradients, self._averages = [], []
            self._device = bucket.spec.device
            self.checks.append(self._check)
        self._gradients.append(look(bucket.spec, bucket.buffer()))
        return _Looked(self._inner.start(bucket), bucket.spec, self._averages)

    def buckets_changed(self) -> None:
        """As the inner runner."""
        self._inner.buckets_changed()

    def _verify(self, step: int) -> None:
        """Exchange what ranks have found: 0, or the parameter's number from 1 on, negative for an average."""
        gradients, averages = _first(self._gradients), _first(self._averages)
        found = 0
        if gradients is not None:
            found = self._names.index(gradients) + 1
        elif averages is not None:
            found = -(self._names.index(averages) + 1)
        mine = torch.tensor([found], device=self._device)
        group = self._inner.group
        gathered = mine.new_empty(group.size)
        group.submit(all_gather_into_tensor(gathered, mine, label="finite?")).wait()
        answers = gathered.tolist()
        if any(answers):
            raise StepRejected(self._error(answers, step))

    def _error(self, answers: list[int], step: int) -> NonFiniteGradient:
        doing = f"averaging gradients in step {step}"
        after = "No average was written and the model can be used again: call zero_grad() before the next backward."
        ranks = [rank for rank, answer in enumerate(answers) if answer > 0]
        if ranks:
            name = self._names[answers[ranks[0]] - 1]
            others = f" Ranks {ranks[1:]} have some too." if len(ranks) > 1 else ""
            return NonFiniteGradient(
                f"{doing}: on rank {ranks[0]} the gradient of {name} holds NaN or infinity.{others} Look at that rank's batch, "
                f"loss and learning rate. {after}",
                rank=ranks[0],
                parameter=name,
            )
        name = self._names[-min(answers) - 1]
        return NonFiniteGradient(
            f"{doing}: the gradients of {name} were finite on every rank, but their average is not. Reduce in a wider dtype, or "
            f"scale the loss down. {after}",
            parameter=name,
        )


class _Looked:
    """A reduction whose result is checked."""

    def __init__(self, pending: Pending, spec: BucketSpec, averages: list[Names]) -> None:
        self._pending = pending
        self._spec = spec
        self._averages = averages

    def wait(self) -> Tensor:
        """The result."""
        result = self._pending.wait()
        self._averages.append(look(self._spec, result))
        return result


def look(spec: BucketSpec, buffer: Tensor) -> Names:
    """Find the parameters whose part of `buffer` is not finite; on a GPU, without waiting for it.

    >>> spec = BucketSpec(0, ("a", "b"), ((2,), (1,)), ((1,), (1,)), torch.float32, torch.device("cpu"))
    >>> look(spec, torch.tensor([1.0, 2.0, float("nan")]))()
    ['b']
    """
    buffer = buffer.detach()
    if buffer.is_sparse:
        parts = [buffer._values()]
    elif buffer.device.type == "cpu" and math.isfinite(abs(buffer.sum().item())):
        return list  # the usual case, in one pass; a sum that is not finite may also have overflowed
    else:
        parts = spec.views(buffer.reshape(-1))
    named = [(name, part) for name, part in zip(spec.names, parts, strict=True) if part.numel()]
    if not named:
        return list
    peaks = torch.stack([torch.linalg.vector_norm(part, torch.inf) for _, part in named])
    if buffer.device.type == "cpu":
        names = _not_finite(named, peaks)
        return lambda: names
    return lambda: _not_finite(named, peaks)


def _not_finite(named: list[tuple[str, Tensor]], peaks: Tensor) -> list[str]:
    return [name for (name, _), finite in zip(named, torch.isfinite(peaks).tolist(), strict=True) if not finite]


def _first(buckets: list[Names]) -> str | None:
    return next((name for names in buckets for name in names()), None)
