"""Tells the reducer when gradients are ready. Holds the reducer weakly: parameters own their hooks, and a hook that owned the
reducer, which owns the parameters, would keep a dropped model alive until the garbage collector comes.

Note [Which hooks]
On the CPU parameters carry hooks that can be taken off without a trace while the reducer listens to all of them, and none at
all, but on a few, while it is silent: see [Silent gradients] in `reducer/watch.py` and [Hooks that leave a trace] in
`autograd/brief.py`. Once the reducer wants to hear of all gradients quietly, every parameter gets torch's own hook, for good.
On CUDA it has that from the start. There a gradient is there when its stream says so, and one thread per device runs a
backward, so neither looking at `.grad` nor being told one late is enough; and the host's costs hide behind kernels anyway.

Note [After the hooks of others]
Hooks that others put on a parameter to be called after accumulation (`Tensor.register_post_accumulate_grad_hook`), before or after
it was replicated, may still write to `.grad`: they clamp it, or count it. So a gradient that may launch its bucket is heard of
by a hook on its accumulator node, which runs after all hooks on the tensor, as in torch's DDP.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.autograd.brief import BriefHooks
from gradwire.autograd.graph import tensors_in
from gradwire.events import Handle
from gradwire.reducer import Reducer


def attach_ready(parameters: Sequence[Tensor], reducer: Reducer, *, undefined_too: bool) -> list[Handle]:
    """Call `reducer.on_ready(i)` whenever parameter i's gradient has been accumulated.

    With `undefined_too`, also when the engine reaches a parameter without a gradient for it, as happens when an output of
    the model is not part of the loss. That needs a hook on the accumulator node, which costs a little more.
    """
    if undefined_too:
        reducer.ears = None
        weak = weakref.ref(reducer)
        return [_on_node(parameter, weak, i) for i, parameter in enumerate(parameters)]
    plain = all(p.device.type == "cpu" and type(p) in (Tensor, nn.Parameter) for p in parameters)
    # A parameter knows its accumulator only weakly; as long as somebody holds it, no forward has to make a new one.
    nodes = [_accumulator(p) for p in parameters]
    ears = (_RemovableHooks if plain else _TensorHooks)(parameters, nodes, reducer)
    reducer.ears = ears
    return [Handle(ears.close)]


def hear_backward(output: Any, reducer: Reducer) -> bool:
    """Call `reducer.backward_begins()` when a backward comes to the model's outputs. Whether there are any to come to."""
    weak = weakref.ref(reducer)

    def begun(_: Tensor) -> None:
        reducer = weak()
        if reducer is not None:
            reducer.backward_begins()

    outputs = [t for t in tensors_in(output) if t.requires_grad]
    if any(t.grad_fn is None for t in outputs):
        return False  # a hook on a leaf, such as a parameter that the model returns, would stay, one more in each step
    for tensor in outputs:
        tensor.register_hook(begun)
    return bool(outputs)


class _TensorHooks:
    """A hook on every parameter, that calls the reducer or, quietly, appends to `reducer.arrived`: see [Quiet gradients].

    Those that call are on the accumulator nodes: see [After the hooks of others]. Those that append are on the tensors, for
    nothing is launched by them, and there the list's own method will do, which the engine calls without a Python frame.
    """

    may_be_silent = False

    def __init__(self, parameters: Sequence[Tensor], nodes: Sequence[Any], reducer: Reducer) -> None:
        self._parameters = list(parameters)
        self._nodes = list(nodes)
        self._reducer = weakref.ref(reducer)
        self._arrived = reducer.arrived
        self._calling: dict[int, Any] = {}
        self._appending: dict[int, Any] = {}
        self.listen_to_all()

    def listen_to_all(self) -> None:
        """Let the hooks of all parameters call."""
        self.listen_to(range(len(self._parameters)))

    def listen_to(self, few: Collection[int]) -> None:
        """Let the hooks of these parameters call, those of all others be quiet."""
        for i, parameter in enumerate(self._parameters):
            loud = i in few
            old, new = (self._appending, self._calling) if loud else (self._calling, self._appending)
            if i in old:
                old.pop(i).remove()
            if i in new:
                continue
            if loud:
                new[i] = _call_after_node(self._nodes[i], self._reducer, i)
            elif parameter.requires_grad:
                new[i] = parameter.register_post_accumulate_grad_hook(self._arrived.append)

    def listen_only_to(self, few: Collection[int]) -> None:
        """As these hooks leave a trace, nothing is gained by taking any of them off."""
        self.listen_to(few)

    def settle(self) -> None:
        """Nothing is told late."""

    def close(self) -> None:
        """Take the hooks off."""
        for handle in [*self._calling.values(), *self._appending.values()]:
            handle.remove()
        self._calling, self._appending = {}, {}
        self._nodes.clear()


class _RemovableHooks:
    """Hooks on all parameters or on a few, with nothing left on the others: see [Which hooks]."""

    def __init__(self, parameters: Sequence[Tensor], nodes: Sequence[Any], reducer: Reducer) -> None:
        self._parameters = list(parameters)
        self._nodes = list(nodes)
        self._reducer = weakref.ref(reducer)
        self._brief = BriefHooks(parameters, reducer.on_ready)
        self._brief.put_on()
        self._few: dict[int, Any] = {}
        self._for_good: _TensorHooks | None = None

    @property
    def may_be_silent(self) -> bool:
        """Whether parameters that are not listened to cost nothing."""
        return self._for_good is None

    def listen_to_all(self) -> None:
        """Hear of every gradient, of most of them one late: see [One late] in `autograd/brief.py`."""
        if self._for_good is not None:
            self._for_good.listen_to_all()
            return
        self._keep(())
        self._brief.put_on()

    def listen_only_to(self, few: Collection[int]) -> None:
        """Hear of these alone."""
        if self._for_good is not None:
            self._for_good.listen_only_to(few)
            return
        self._brief.take_off()
        self._keep(few)
        weak = self._reducer
        for i in few:
            if i not in self._few:
                self._few[i] = _call_after_node(self._nodes[i], weak, i)

    def listen_to(self, few: Collection[int]) -> None:
        """Let these call, and the others append to a list: from now on every parameter has a hook."""
        reducer = self._reducer()
        if self._for_good is None and reducer is not None:
            self._brief.take_off()
            self._keep(())
            self._for_good = _TensorHooks(self._parameters, self._nodes, reducer)
        if self._for_good is not None:
            self._for_good.listen_to(few)

    def settle(self) -> None:
        """Tell of the gradient that has come last."""
        self._brief.settle()

    def _keep(self, few: Collection[int]) -> None:
        for i in [i for i in self._few if i not in few]:
            self._few.pop(i).remove()
            if self._parameters[
                i
            ].requires_grad:  # a new node has no trace of the hook, unless a graph holds the old one
                self._nodes[i] = None
                self._nodes[i] = _accumulator(self._parameters[i])

    def close(self) -> None:
        """Take the hooks off."""
        self._brief.take_off()
        self._keep(())
        self._nodes.clear()
        if self._for_good is not None:
            self._for_good.close()


def _call_after_node(node: Any, weak: weakref.ref[Reducer], index: int) -> Any:
    def ready(_: Any, incoming: tuple[Tensor | None, ...]) -> None:
        reducer = weak()
        if reducer is not None and incoming[0] is not None:
            reducer.on_ready(index)

    return node.register_hook(ready)


def _accumulator(parameter: Tensor) -> Any:
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _on_node(parameter: Tensor, weak: weakref.ref[Reducer], index: int) -> Handle:
    def ready(_: Any, incoming: tuple[Tensor | None, ...]) -> None:
        reducer = weak()
        if reducer is not None and (incoming[0] is not None or reducer.track_unused):
            # A static graph counts gradients only: what it reaches without one in the first step, through the sink, it does
            # not reach at all in the next.
            reducer.on_ready(index)

    node = _accumulator(parameter)
    remove: Callable[[], None] = node.register_hook(ready).remove

    def take_off(kept: Any = node) -> None:
        # A tensor knows its accumulator only weakly; this closure is what keeps it, and the hook on it, alive.
        remove()

    return Handle(take_off)
