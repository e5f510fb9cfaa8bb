"""Reports gradients from inside a backward that torch.compile has compiled, each as soon as it has been computed.

Responsible for the op `gradwire::ready`, and for finding whose gradient it was given. It must not know buckets, or what is done
with a gradient that is reported; `inductor_pass.py` puts the op into graphs.

Note [A compiled backward is one node]
For the engine, a compiled graph is a single node: its gradients leave it together when all have been computed, and only then are
they accumulated and do hooks on parameters run. So the op stands behind each gradient in the compiled backward. It passes the
gradient on to the listener of that parameter, while the rest of the backward still runs; the gradient also takes its usual way.

Note [What the op does not know]
Compiled code is shared by the blocks of a model and, through inductor's cache, by processes. So the op has only the position of a
gradient among the inputs of the compiled graph. When it runs, the engine is evaluating the node of that graph, whose edges lead to
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
    "ready(Tensor(a!) grad, Tensor? previous, int position, int inputs) -> Tensor", tags=[torch.Tag.flexible_layout]
)

_listeners: dict[int, _Listener] = {}
"""By the id of a parameter."""
graphs_without_op = 1
"""How many graphs were compiled without the op, as far as is known."""
_TARGETS = "_gradwire_targets"


class _Listener:
    """The callback for the gradients of one parameter."""

    __slots__ = ("early", "index", "parameter")

    def __init__(self, parameter: Tensor, index: int, early: weakref.WeakMethod[Any]) -> None:
        self.parameter, self.index, self.early = weakref.ref(parameter), index, early

    def report(self, grad: Tensor) -> None:
        """The gradient of the parameter has been computed."""
        call, parameter = self.early(), self.parameter()
        if call is None or parameter is None:
            return
        if grad.shape == parameter.shape and grad.dtype == parameter.dtype:
            call([self.index], [grad])


def on_compiled_gradients(parameters: Sequence[Tensor], early: OnGradients) -> Handle:
    """Call the bound method `early(indices, gradients)` inside a compiled backward when it has computed gradients.

    Its object is held weakly. A parameter has one listener, the last one.
    """
    assert isinstance(early, types.MethodType)
    method = weakref.WeakMethod(early)
    added = {id(p): _Listener(p, index, method) for index, p in enumerate(parameters)}
    _listeners.update(added)

    def remove() -> None:
        for key, listener in added.items():
            if _listeners.get(key) is listener:
                del _listeners[key]

    weakref.finalize(early.__self__, remove).atexit = False
    return Handle(remove)


def _listener(accumulator: Any) -> _Listener | None:
    variable = getattr(accumulator, "variable", None)  # only gradient accumulators have one
    found = None if variable is None else _listeners.get(id(variable))
    return found if found is not None and found.parameter() is variable else None


def _targets(node: Any, inputs: int) -> dict[int, _Listener]:
    """The callbacks for the gradients of a compiled graph, by the position of the input. Kept on its node."""
    found: dict[int, _Listener] | None = getattr(node, _TARGETS, None)
    if found is None:
        needed = getattr(node, "needs_input_grad", ())
        positions = [i for i, needs in enumerate(needed) if needs]
        edges = [edge[0] for edge in getattr(node, "next_functions", ()) if edge[0] is not None]
        found = {}
        if len(needed) == inputs and len(positions) == len(edges):
            listeners = zip(positions, map(_listener, edges), strict=True)
            found = {i: listener for i, listener in listeners if listener is not None}
            setattr(node, _TARGETS, found)
    return found


@untraced_call
def _ready(grad: Tensor, previous: Tensor | None, position: int, inputs: int) -> Tensor:
    node = torch._C._current_autograd_node()
    target = None if node is None else _targets(node, inputs).get(position)
    if target is not None:
        target.report(grad)
    return grad.new_empty(0)


_library.impl("ready", _ready, "CompositeExplicitAutograd")
_library.impl("ready", lambda grad, *rest: grad.new_empty(0), "Meta")


def reports() -> bool:
    """Whether the graph that is compiled now gets the op: if any parameters are listened to, perhaps those of another model."""
    global graphs_without_op
    if not _listeners:
        graphs_without_op += 1
    return bool(_listeners)
