"""CompiledReports: decides which gradients that compiled code reports are reduced at once, and makes them ready.

`compiled_gradients.py` keeps those gradients until their buckets are launched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from gradwire.reducer.buckets.buffers import Buckets
from gradwire.reducer.intake.compiled_gradients import CompiledGradients
from gradwire.reducer.intake.used_parameters import UsedParameters
from gradwire.reducer.machine import Machine, State


class _Reducer(Protocol):
    machine: Machine
    used: UsedParameters
    buckets: Buckets
    leave_gradients: bool
    manual: bool

    def on_ready(self, index: int, *, reported: bool = False) -> None: ...


class CompiledReports:
    """What compiled code reports to a reducer, which is held weakly."""

    def __init__(self, gradients: CompiledGradients, reducer: _Reducer) -> None:
        self._gradients = gradients
        self._reducer = weakref.ref(reducer)

    def on_gradient(self, index: int, grad: Tensor) -> None:
        """The gradient of parameter `index` has been computed; it will be accumulated when all of its graph has run."""
        reducer, gradients = self._reducer(), self._gradients
        if reducer is None:
            return
        machine, uses = reducer.machine, reducer.machine.static_uses
        if machine.state is not State.RESTING and index not in machine.computed:
            machine.computed.add(index)
            machine.arrival.append(index)
        if not gradients.enabled:
            gradients.enable(self._backward_called)
        elif uses is not None and uses[index] != 1:
            return  # it is accumulated several times, by checkpoints whose edges cannot be seen
        elif gradients.take(index, grad, in_bucket=reducer.buckets.keep_views):
            reducer.on_ready(index, reported=True)

    def _backward_called(self, tensors: Any) -> Callable[[], object] | None:
        """`backward` is called, from this model or from another one: see [Early gradients] in `compiled_gradients.py`.

        Nothing is taken early where the first step of a static graph counts uses, where an optimizer steps in backward, and
        where the caller finalizes by hand, perhaps during backward.
        """
        reducer = self._reducer()
        if reducer is None or reducer.machine.state not in (State.ARMED, State.RUNNING):
            return None
        if reducer.used.learning or reducer.leave_gradients or reducer.manual:
            return None
        return self._gradients.expect(tensors)
