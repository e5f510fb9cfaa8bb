"""Reports gradients from inside a backward that torch.compile has compiled, a bucket of them as soon as it has been computed.

Responsible for the op `gradwire::ready`, and for finding whose gradients it was given. It must not know buckets, or what is done
with a gradient that is reported; `inductor_pass.py` puts the op into graphs.

Note [A compiled backward is one node]
For the engine, a compiled graph is a single node: its gradients leave it together when all have been computed, and only then are
they accumulated and do hooks on parameters run. So an op in the compiled backward stands behind as many gradients as fill a bucket.
It passes them on to the listener of these parameters, while the rest of the backward still runs; they also take their usual way.

Note [What the op does not know]
Compiled code is shared by the blocks of a model and, through inductor's cache, by processes. So the op has only the positions of
gradients among the inputs of the compiled graph. When it runs, the engine is evaluating the node of that graph, whose edges lead to
the accumulators of the inputs.

Note [Which reports are complete]
A parameter may also be used in another graph, another call of the same one, or outside the model. So a listener that acts on a
report must first have checked, with `sole_edges`, that only one edge of the whole autograd graph leads to the parameter.
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

OnGradients = Callable[[Sequence[int], Sequence[Tensor]], object]
"""A bound method, called with the indices of parameters and their gradients, which have not been accumulated yet."""

_library = torch.library.Library("gradwire", "DEF")
# The gradient counts as written to, although it is not, because an op whose result is not used is removed as dead code. The result,
# an empty tensor, is the `previous` of the next op: see Note [The order of gradients] in `inductor_pass.py`.
_library.define(
    "ready(Tensor(a!)[] grads, Tensor? previous, int[] positions, int inputs) -> Tensor",
    tags=[torch.Tag.flexible_layout],
)


class _Model:
    """Whose gradients are reported to `early`, and the sizes in bytes of its buckets."""

    __slots__ = ("early", "limits")

    def __init__(self, early: weakref.WeakMethod[Any], limits: tuple[int, ...]) -> None:
        self.early, self.limits = early, limits

    def report(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """These gradients have been computed."""
        early = self.early()
        if early is not None:
            early(indices, gradients)


_Target = tuple[torch.Size, torch.dtype, _Model, int]
"""A parameter's shape and dtype, its model, and its index there."""
_listeners: dict[int, tuple[weakref.ref[Tensor], _Model, int]] = {}
"""By the id of a parameter."""
graphs_without_op = 1
"""How many graphs were compiled without the op, as far as is known."""
_TARGETS = "_gradwire_targets"


def on_compiled_gradients(parameters: Sequence[Tensor], early: OnGradients, limits: Sequence[int]) -> Handle:
    """Call the bound method `early(indices, gradients)` inside a compiled backward, when it has computed gradients of as many bytes
    as the first of `limits`, then of the second, and so on; the last holds for all that follow.

    Its object is held weakly. A parameter has one listener, the last one.
    """
    assert isinstance(early, types.MethodType)
    model = _Model(weakref.WeakMethod(early), tuple(limits))
    added = {id(p): (weakref.ref(p), model, index) for index, p in enumerate(parameters)}
    _listeners.update(added)

    def remove() -> None:
        for key, listener in added.items():
            if _listeners.get(key) is listener:
                del _listeners[key]

    weakref.finalize(early.__self__, remove).atexit = False
    return Handle(remove)


def _target(accumulator: Any) -> _Target | None:
    variable: Tensor | None = getattr(accumulator, "variable", None)  # only gradient accumulators have one
    found = _listeners.get(id(variable))
    if variable is None or found is None or found[0]() is not variable:
        return None
    return variable.shape, variable.dtype, *found[1:]


def _targets(node: Any, inputs: int) -> dict[int, _Target]:
    """Whose gradients a compiled graph computes, by the position of the input. Kept on its node."""
    found: dict[int, _Target] | None = getattr(node, _TARGETS, None)
    if found is None:
        needed = getattr(node, "needs_input_grad", ())
        positions = [i for i, needs in enumerate(needed) if needs]
        edges = [edge[0] for edge in getattr(node, "next_functions", ()) if edge[0] is not None]
        found = {}
        if len(needed) == inputs and len(positions) == len(edges):
            targets = zip(positions, map(_target, edges), strict=True)
            found = {i: target for i, target in targets if target is not None}
            setattr(node, _TARGETS, found)
    return found


@untraced_call
def _ready(grads: Sequence[Tensor], previous: Tensor | None, positions: Sequence[int], inputs: int) -> Tensor:
    node = torch._C._current_autograd_node()
    targets = {} if node is None else _targets(node, inputs)
    reports: dict[_Model, tuple[list[int], list[Tensor]]] = {}
    for position, grad in zip(positions, grads, strict=True):
        target = targets.get(position)
        if target is not None and grad.shape == target[0] and grad.dtype == target[1]:
            indices, gradients = reports.setdefault(target[2], ([], []))
            indices.append(target[3])
            gradients.append(grad)
    for model, report in reports.items():
        model.report(*report)
    return grads[0].new_empty(0)


_library.impl("ready", _ready, "CompositeExplicitAutograd")
_library.impl("ready", lambda grads, *rest: grads[0].new_empty(0), "Meta")


def group_limits() -> tuple[int, ...] | None:
    """How many bytes of gradients an op takes in the graph that is compiled now, which may be any model's: those with the smallest
    buckets decide. None if no parameters are listened to."""
    global graphs_without_op
    if not _listeners:
        graphs_without_op += 1
    return min({model.limits for _, model, _ in _listeners.values()}, default=None)
