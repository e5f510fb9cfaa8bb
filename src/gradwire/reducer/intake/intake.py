"""GradientIntake: collects the gradients of a step as they arrive, and returns the buckets that are full.

It combines the hooks on parameters, the gradients that compiled code reports early and the state machine, which counts. It must not
know what is done with a full bucket.

Note [Who calls]
To be called for every gradient is what costs most, and all but a few of these calls change nothing: in a step like the last one,
buckets are filled by the same gradients. So once a step has shown which these are, all others are only appended to a list (see
`autograd/grad_hooks.py`), and the state machine counts them, in order, when one of the few arrives, when backward ends, and when a
new step begins. Nothing is launched later: only a bucket's own last gradient can fill it, and when one of the few fills other
buckets than last time, every gradient calls until the end of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from gradwire.autograd.backward_errors import BEGINS, around_backward
from gradwire.autograd.compiled.op import Limits, on_compiled_gradients
from gradwire.autograd.grad_hooks import GradHooks
from gradwire.events import Handle
from gradwire.reducer.intake.compiled import CompiledGradients
from gradwire.reducer.machine import Launch, Machine, State

_RESTING = State.RESTING


class GradientIntake:
    """The gradients of one model, step by step."""

    def __init__(self, parameters: Sequence[Tensor], machine: Machine, *, in_buckets: bool, limits: Limits) -> None:
        self.compiled = CompiledGradients(parameters, in_buckets=in_buckets)
        self.hooks: GradHooks | None = None
        self._parameters = list(parameters)
        self.machine = machine
        self.limits = limits
        self._compiled_handle: Handle | None = None
        self._before_backward: Handle | None = None
        """Once it is known that the model has compiled code that reports gradients."""
        self._fillers: dict[int, int] = {}
        """The gradients that filled buckets in the last step, each with how many."""
        self._filled: dict[int, int] = {}
        """Those of the current step."""
        self._selected: dict[int, int] | None = None
        """The fillers that call in the current step; None: every gradient calls."""
        self._may_take_early = False

    def attach(
        self, on_arrival: Callable[[], object], early: Callable[[Sequence[int], Sequence[Tensor]], object]
    ) -> None:
        """Put hooks on the parameters. They call `on_arrival()`, and compiled code calls `early(indices, gradients)`."""
        self._compiled_handle = on_compiled_gradients(self._parameters, early, self.limits)
        self.hooks = GradHooks(self._parameters, on_arrival)

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None
        for handle in (self._compiled_handle, self._before_backward):
            if handle is not None:
                handle.remove()
        self._before_backward = None

    def prepare(self, *, all_call: bool, unused: Collection[int], may_take_early: bool) -> None:
        """Before the backward of a step. `all_call`: every gradient is to call. `unused` parameters will not arrive.
        `may_take_early`: gradients that compiled code reports may be reduced before they are accumulated."""
        self.compiled.clear()
        self._may_take_early = may_take_early
        self._filled = {}
        fillers = self._fillers
        self._select(None if all_call or not fillers or any(i in fillers for i in unused) else fillers)

    def _select(self, few: dict[int, int] | None) -> None:
        if self.hooks is not None and few is not self._selected:
            self._selected = few
            self.hooks.select(range(len(self._parameters)) if few is None else few)

    def pop(self) -> list[int]:
        """The parameters whose gradients have arrived since the last call, in order, without those that were taken early."""
        if self.hooks is None:
            return []
        early, arrived = self.compiled.reported, self.hooks.pop()
        return [i for i in arrived if i not in early] if early else arrived

    def early(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> list[int]:
        """Compiled code has computed these gradients. Returns those that are to be reduced now."""
        machine, compiled, uses = self.machine, self.compiled, self.machine.static_uses
        if machine.state is not _RESTING:
            machine.computed_early(indices)
        if self._before_backward is None:
            self._before_backward = around_backward(BEGINS, self._backward_called)
            return []
        if uses is not None and any(uses[i] != 1 for i in indices):
            # Where a static graph has several uses, checkpoints accumulate several times, whose edges cannot be seen.
            sole = [n for n, i in enumerate(indices) if uses[i] == 1]
            indices, gradients = [indices[n] for n in sole], [gradients[n] for n in sole]
        return compiled.take(indices, gradients)

    def _backward_called(self, tensors: Any) -> Callable[[], object] | None:
        """`backward` is called, from this model or from another one: see [Early gradients] in `compiled.py`."""
        expected = self.machine.state in (State.ARMED, State.RUNNING) and self._may_take_early
        return self.compiled.expect(tensors, self.hooks) if expected and self.hooks is not None else None

    def count(self, indices: Sequence[int]) -> list[Launch]:
        """These gradients have arrived, in this order. Returns the buckets to be launched now, in order."""
        launches = self.machine.arrived(indices)
        filled: dict[int, int] = {}
        for launch in launches:
            filled[launch.filler] = filled.get(launch.filler, 0) + 1
            self._filled[launch.filler] = self._filled.get(launch.filler, 0) + 1
        selected = self._selected
        if selected is not None and filled != {i: selected[i] for i in indices if i in selected}:
            self._select(None)
        return launches

    def gradients(self, members: Sequence[int]) -> list[Tensor | None]:
        """The gradients with which a bucket is launched."""
        if self.compiled.reported:
            return self.compiled.gradients(members)
        parameters = self._parameters
        return [parameters[i].grad for i in members]

    def ended(self) -> None:
        self._fillers = self._filled
        self.compiled.clear()

    def abandon(self) -> None:
        """The step has failed, or its gradients are not reduced."""
        if self.hooks is not None:
            self.hooks.pop()
        self.compiled.clear()

    def forget(self) -> None:
        """Buckets have changed: it is not known which gradients fill them."""
        self._fillers, self._filled = {}, {}


_MOST_NAMES = 1000
reducers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of this process."""


def awaited_gradients() -> list[dict[str, Any]]:
    """Of each model that is in a step: the bucket that is to be launched next, and the parameters in it without a gradient. Changes
    nothing; any thread may call it."""
    return [_facts(reducer) for reducer in list(reducers) if reducer.machine.state is not _RESTING]


def _facts(reducer: Any) -> dict[str, Any]:
    machine, hooks, used = reducer.machine, reducer.intake.hooks, reducer.used.uses
    bucket = min(machine.next_bucket, len(machine.members) - 1)
    arrived = frozenset() if hooks is None else hooks.waiting()
    missing = [i for i in machine.members[bucket] if not (machine.ready[i] or i in arrived or i in used)]
    return {
        "group": reducer.group.name,
        "group_id": reducer.group.ledger.events.group_id,
        "model": reducer.events.model,
        "rank": reducer.group.rank,
        "step": reducer.iterations.number,
        "bucket": bucket,
        "missing": [machine.names[i] for i in missing[:_MOST_NAMES]],
    }
