"""Reports gradients from inside a backward that torch.compile has compiled, while the rest of it still runs.

Responsible for the op `gradwire::ready`, and for finding whose gradients it was given. It must not know what is done with gradients
that are reported; `inductor_pass.py` puts the op into graphs.

An op passes the gradients since the last one on to the listeners of their parameters; they also take their usual way. How it
finds these: see "Gradients of a compiled model" in docs/design.md. A parameter may also be used in another graph, another call of
the same one, or outside the model. So a listener that acts on a report must first have checked, with `sole_edges`, that only one
edge of the whole autograd graph leads to the parameter.

Note [The order of reports]
Two models may be in one graph and reduce over one group, where the n-th collectives of all ranks must meet. Where ops stand depends
on all models of a process, which may differ between ranks. So gradients are reported in the order in which the graph computes them,
and a listener must act on several as it would on one after another.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.events import Handle
from gradwire.runtime.dynamo import untraced_call
from gradwire.runtime.threads import weakly

OnGradients = Callable[[Sequence[int], Sequence[Tensor]], object]
"""A bound method, called with the indices of parameters and their gradients, which have not been accumulated yet."""
Limits = tuple[int, ...]
"""The sizes in bytes of a model's first, second, … bucket; the last one applies to all that follow."""

_library = torch.library.Library("gradwire", "DEF")
# Gradients count as written to, although they are not, because an op whose result is not used is removed as dead code. The result,
# an empty tensor, is the `previous` of the next op: see Note [The order of gradients] in `inductor_pass.py`.
_library.define(
    "ready(Tensor(a!)[] grads, Tensor? previous, int[] positions, int inputs) -> Tensor",
    tags=[torch.Tag.flexible_layout],
)

_TARGETS = "_gradwire_targets"


class _Listener:
    """The callback for the gradients of one model, and the sizes of its buckets in bytes."""

    def __init__(self, early: OnGradients, limits: Limits) -> None:
        self._early, self.limits = weakly(early), limits

    def report(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """These gradients have been computed, in this order."""
        self._early(indices, gradients)


_Target = tuple[_Listener, int, torch.Size, torch.dtype]
"""A parameter: its listener, its index there, its shape and its dtype."""
_listeners: set[_Listener] = set()
_parameters: dict[int, tuple[weakref.ref[Tensor], _Listener, int]] = {}
"""By the id of a parameter: its listener, and its index there."""
_accumulators: dict[Any, _Target] = {}
"""Those that graphs have led to, until listeners change."""
_graphs = 0
"""How many graphs were compiled."""
_without: dict[Limits, int] = {}
"""How many of them while there was no listener with these limits."""


def on_compiled_gradients(parameters: Sequence[Tensor], early: OnGradients, limits: Limits) -> Handle:
    """Call the bound method `early(indices, gradients)` inside a compiled backward when it has computed gradients. Its object is
    held weakly. A parameter has one listener, the last one. `limits`: see `bucket_limits`."""
    assert isinstance(early, types.MethodType)
    listener = _Listener(early, limits)
    added = {id(p): (weakref.ref(p), listener, index) for index, p in enumerate(parameters)}
    _listeners.add(listener)
    _without.setdefault(limits, _graphs)
    _parameters.update(added)
    _accumulators.clear()

    def remove() -> None:
        _listeners.discard(listener)
        for key, entry in added.items():
            if _parameters.get(key) is entry:
                del _parameters[key]
        _accumulators.clear()

    weakref.finalize(early.__self__, remove).atexit = False
    return Handle(remove)


def bucket_limits() -> list[Limits]:
    """The sizes of buckets for which the graph that is compiled now gets ops: those of all models that are listened to."""
    global _graphs
    limits = sorted({listener.limits for listener in list(_listeners)})  # a list first: other threads add and remove
    _graphs += 1
    for absent in set(_without).difference(limits):
        _without[absent] += 1
    return limits


def graphs_without(limits: Limits) -> int:
    """How many graphs may lack the ops for buckets of these sizes."""
    return _without.get(limits, 0)


def _target(accumulator: Any) -> _Target | None:
    variable: Tensor | None = getattr(accumulator, "variable", None)  # only gradient accumulators have one
    found = _parameters.get(id(variable))
    if variable is None or found is None or found[0]() is not variable:
        return None
    _accumulators[accumulator] = target = found[1], found[2], variable.shape, variable.dtype
    return target


def _targets(node: Any, inputs: int) -> dict[int, _Target]:
    """Whose gradients a compiled graph computes, by the position of the input. Kept on its node."""
    found: dict[int, _Target] | None = getattr(node, _TARGETS, None)
    if found is None:
        needed = getattr(node, "needs_input_grad", ())
        positions = [i for i, needs in enumerate(needed) if needs]
        edges = [successor for successor, _ in getattr(node, "next_functions", ()) if successor is not None]
        found = {}
        if len(needed) == inputs and len(positions) == len(edges):
            targets = [_accumulators.get(edge) or _target(edge) for edge in edges]
            found = {i: target for i, target in zip(positions, targets, strict=True) if target is not None}
            setattr(node, _TARGETS, found)
    return found


@untraced_call
def _ready(grads: Sequence[Tensor], previous: Tensor | None, positions: Sequence[int], inputs: int) -> Tensor:
    node = torch._C._current_autograd_node()
    targets = {} if node is None else _targets(node, inputs)
    listener: _Listener | None = None
    indices: list[int] = []
    gradients: list[Tensor] = []
    for position, grad in zip(positions, grads, strict=True):
        target = targets.get(position)
        if target is None or grad.shape != target[2] or grad.dtype != target[3]:
            continue
        if listener is not target[0]:  # not all of one model first: see Note [The order of reports]
            if listener is not None:
                listener.report(indices, gradients)
            listener, indices, gradients = target[0], [], []
        indices.append(target[1])
        gradients.append(grad)
    if listener is not None:
        listener.report(indices, gradients)
    return grads[0].new_empty(0)


_library.impl("ready", _ready, "CompositeExplicitAutograd")
_library.impl("ready", lambda grads, *rest: grads[0].new_empty(0), "Meta")
