"""CompiledGradients: the gradients of a step that compiled code has reported before they were accumulated.

Knows parameters and gradients; it must not know buckets or when they are launched. `autograd/compiled/op.py` reports.

Note [Early gradients]
A gradient that a compiled backward has just computed may be reduced at once if accumulating it later changes nothing but `.grad`:
- only one edge of the graph leads to the parameter, so the gradient is complete;
- no hook of others is on the parameter or on its accumulator, which may see or change the gradient before it is reduced;
- what has been accumulated in `.grad` before, under no_sync, is not a view of the bucket, where the gradient would be added again.
Every other gradient takes the usual way. So do all of them in the first step, which shows that there is compiled code.

At the end of backward each gradient has been accumulated too. It must then be the tensor that was reported, or equal to it, or, if
added to an earlier one, written to once. A second backward, or a re-entrant checkpoint, not to be foreseen, could have added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.grad_hooks import GradHooks
from gradwire.autograd.graph import sole_edges


class CompiledGradients:
    """What compiled code reports of one model's gradients. `in_buckets`: `.grad`s are views of buckets. See [Early gradients]."""

    def __init__(self, parameters: Sequence[Tensor], *, in_buckets: bool) -> None:
        self.reported: set[int] = set()
        """Parameters whose gradients were taken in this step."""
        self._parameters = list(parameters)
        self._in_buckets = in_buckets
        self._expected: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._accumulated: dict[int, tuple[Tensor, int]] = {}
        """By parameter: what `.grad` is once the gradient has been accumulated, and its version then."""
        self._launched: set[int] = set()

    def expect(self, tensors: Any, hooks: GradHooks) -> Callable[[], object] | None:
        """A backward from `tensors` begins, whose gradients may be taken. Returns what to call at its end."""
        found = sole_edges(tensors, self._parameters, hooks.accumulators)
        if not found:
            return None  # of another model
        self._expected.update(found.keys() - hooks.hooked_by_others(found))
        return self._expected.clear

    def take(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> list[int]:
        """These gradients have been computed. Returns those that are to be reduced now."""
        parameters, waiting, accumulated = self._parameters, self._waiting, self._accumulated
        expected, reported, taken = self._expected, self.reported, []
        for index, grad in zip(indices, gradients, strict=True):
            if index not in expected or index in reported:
                continue
            before = parameters[index].grad
            if before is None:
                # An alias: the engine makes `.grad` of a gradient that nothing else references, and copies any other.
                waiting[index] = alias = grad.detach()
                accumulated[index] = alias, alias._version
            elif self._in_buckets or before.layout != torch.strided:
                continue
            else:
                with torch.no_grad():
                    waiting[index] = before + grad
                accumulated[index] = before, before._version + 1
            taken.append(index)
        reported.update(taken)
        return taken

    def gradients(self, members: Sequence[int]) -> list[Tensor | None]:
        """The gradients of a bucket that is launched: those that were reported, and `.grad` of the others."""
        waiting = self._waiting
        self._launched.update(waiting.keys() & members)
        return [waiting.pop(i) if i in waiting else self._parameters[i].grad for i in members]

    def changed(self) -> list[int]:
        """At the end of backward: parameters whose gradients are not those that were launched."""
        found = []
        for index in sorted(self._launched):
            grad, (expected, version) = self._parameters[index].grad, self._accumulated[index]
            if grad is not None and grad.data_ptr() == expected.data_ptr():
                same = grad._version == version
            else:
                same = grad is not None and expected._version == version and _equal(grad, expected)
            if not same:
                found.append(index)
        return found

    def use_accumulated(self, indices: Sequence[int]) -> None:
        """These gradients will have been accumulated when their bucket is launched."""
        if self._waiting:
            for index in indices:
                self._waiting.pop(index, None)

    def clear(self) -> None:
        self.reported.clear()
        self._waiting.clear()
        self._accumulated.clear()
        self._launched.clear()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
