"""GradHooks: the hooks on a model's parameters, which report gradients as soon as they have been accumulated.

Which gradients call back, and which are only noted, is chosen by a HookMode. This module knows parameters and the autograd
engine; it must not know buckets, or why a mode was chosen (`reducer/intake/hook_modes.py` chooses).

Note [Which hooks]
On the CPU parameters carry hooks that can be removed without a trace (see `removable_hooks.py`) in the mode ALL, and none but a
few in the mode POLL. The mode LAST_PER_BUCKET gives every parameter torch's own hook, for good. On CUDA they have that from the
start: there a gradient is complete when its stream says so, and one thread per device runs a backward, so neither looking at
`.grad` nor being told one late is enough; and the host's costs hide behind kernels anyway.

Note [After the hooks of others]
Hooks that others put on a parameter to run after accumulation (`Tensor.register_post_accumulate_grad_hook`), before or after the
model was replicated, may still write to `.grad`: they clamp it, or count it. So a gradient that may launch its bucket is reported
by a hook on its accumulator node, which runs after all hooks on the tensor, as in torch's DDP.

Hooks hold the object of `on_ready` weakly: parameters own their hooks, and a hook that owned the reducer, which owns the
parameters, would keep a dropped model alive until the garbage collector runs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.autograd.compiled.foreign_hooks import ACCUMULATED
from gradwire.autograd.graph import tensors_in
from gradwire.autograd.removable_hooks import RemovableHooks
from gradwire.runtime.threads import weakly

OnReady = Callable[[int], object]
"""A bound method, called with the index of a parameter whose gradient has been accumulated."""


class HookMode(Enum):
    """How gradients are reported."""

    ALL = "all"
    """Call for every gradient, perhaps one late; also for those still to come in a backward that is running."""
    LAST_PER_BUCKET = "last per bucket"
    """Call for a few gradients, and append the parameters of all others to a list, which takes no Python frame."""
    POLL = "poll"
    """Call for a few gradients, and have no hooks on the other parameters: their `.grad` is looked at instead."""


class GradHooks(Protocol):
    """The hooks on the parameters of one model. They begin in the mode ALL."""

    @property
    def can_poll(self) -> bool:
        """Whether parameters that do not call in the mode POLL cost nothing."""
        return False

    def listen(self, mode: HookMode, few: Collection[int] = ()) -> None:
        """Report gradients in this mode from now on; `few` are the parameters that call where not all do."""
        return

    def flush(self) -> None:
        """Between two gradients: report now what would be reported one late."""
        return

    def unreported(self) -> int | None:
        """The parameter whose gradient has been accumulated and is reported one late, if there is one."""
        return None

    def remove(self) -> None:
        """Remove the hooks."""


def grad_hooks(parameters: Sequence[Tensor], on_ready: OnReady, arrived: list[Tensor]) -> GradHooks:
    """Call `on_ready(i)` when the gradient of parameter i has been accumulated, or append the parameter to `arrived`."""
    plain = all(p.device.type == "cpu" and type(p) in (Tensor, nn.Parameter) for p in parameters)
    # A parameter knows its accumulator only weakly; as long as it is held, no forward has to make a new one.
    nodes = [_accumulator(p) for p in parameters]
    return (PollableHooks if plain else PermanentHooks)(parameters, nodes, on_ready, arrived)


def on_backward(output: Any, begun: Callable[[], object]) -> bool:
    """Call the bound method `begun` when a backward reaches the model's outputs. False if there are none to hook.

    Its object is held weakly.
    """
    outputs = [t for t in tensors_in(output) if t.requires_grad]
    if any(t.grad_fn is None for t in outputs):
        return False  # a hook on a leaf, such as a parameter that the model returns, would stay, one more in each step
    call = weakly(begun)

    def reached(_: Tensor) -> None:
        call()

    for tensor in outputs:
        tensor.register_hook(reached)
    return bool(outputs)


class NodeHooks(GradHooks):
    """A hook on every accumulator node, which calls in every mode. With `undefined`, gradients that are None are reported too.

    The engine reaches a parameter without a gradient for it when an output of the model is not part of the loss. Only hooks
    on nodes are called then, and they cost a little more than hooks on tensors.
    """

    def __init__(self, parameters: Sequence[Tensor], on_ready: OnReady, *, undefined: bool) -> None:
        # A tensor knows its accumulator only weakly: who holds it keeps the hook on it alive.
        self._nodes = [_accumulator(p) for p in parameters]
        self._handles = [_call_after_node(node, on_ready, i, undefined=undefined) for i, node in enumerate(self._nodes)]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []


class PermanentHooks(GradHooks):
    """A hook on every parameter, which calls or appends.

    Those that call are on the accumulator nodes: see [After the hooks of others]. Those that append are on the tensors, as
    nothing is launched by them, and there the list's own method will do, which the engine calls without a Python frame.
    """

    def __init__(
        self, parameters: Sequence[Tensor], nodes: Sequence[Any], on_ready: OnReady, arrived: list[Tensor]
    ) -> None:
        self._parameters = list(parameters)
        self._nodes = list(nodes)
        self._on_ready = weakref.WeakMethod(on_ready)
        self._append = arrived.append
        self._calling: dict[int, Any] = {}
        self._appending: dict[int, Any] = {}
        self.listen(HookMode.ALL)

    def listen(self, mode: HookMode, few: Collection[int] = ()) -> None:
        """Let some hooks call and the others append. As these hooks leave a trace, POLL would gain nothing."""
        calling = range(len(self._parameters)) if mode is HookMode.ALL else few
        for i, parameter in enumerate(self._parameters):
            calls = i in calling
            old, new = (self._appending, self._calling) if calls else (self._calling, self._appending)
            if i in old:
                old.pop(i).remove()
            if i in new:
                continue
            if calls:
                new[i] = _call_after_node(self._nodes[i], self._on_ready(), i)
            elif parameter.requires_grad:
                new[i] = parameter.register_post_accumulate_grad_hook(self._append)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in [*self._calling.values(), *self._appending.values()]:
            handle.remove()
        self._calling, self._appending = {}, {}
        self._nodes.clear()

    @property
    def calling(self) -> Collection[int]:
        """The parameters whose gradients call."""
        return self._calling.keys()


class PollableHooks(GradHooks):
    """Hooks on all parameters or on a few, with nothing left on the others: see [Which hooks]."""

    def __init__(
        self, parameters: Sequence[Tensor], nodes: Sequence[Any], on_ready: OnReady, arrived: list[Tensor]
    ) -> None:
        self._parameters = list(parameters)
        self._nodes = list(nodes)
        self._on_ready = weakref.WeakMethod(on_ready)
        self._arrived = arrived
        self._all = RemovableHooks(parameters, on_ready)
        self._few: dict[int, Any] = {}
        self._permanent: PermanentHooks | None = None
        self._all.register()

    @property
    def can_poll(self) -> bool:
        """Whether parameters that do not call cost nothing."""
        return self._permanent is None

    def listen(self, mode: HookMode, few: Collection[int] = ()) -> None:
        """LAST_PER_BUCKET is for good: from then on every parameter has a hook."""
        if mode is HookMode.LAST_PER_BUCKET and self._permanent is None and (on_ready := self._on_ready()) is not None:
            self._all.remove()
            self._keep(())
            self._permanent = PermanentHooks(self._parameters, self._nodes, on_ready, self._arrived)
        if self._permanent is not None:
            self._permanent.listen(mode, few)
        elif mode is HookMode.ALL:
            self._keep(())
            self._all.register()
        else:
            self._poll(few)

    def _poll(self, few: Collection[int]) -> None:
        self._all.remove()
        self._keep(few)
        for i in few:
            if i not in self._few:
                self._few[i] = _call_after_node(self._nodes[i], self._on_ready(), i)

    def flush(self) -> None:
        """Report the gradient that has been accumulated last."""
        self._all.flush()

    def unreported(self) -> int | None:
        """The parameter whose gradient would be reported by `flush`."""
        return self._all.unreported()

    def remove(self) -> None:
        """Remove the hooks."""
        self._all.remove()
        self._keep(())
        self._nodes.clear()
        if self._permanent is not None:
            self._permanent.remove()

    @property
    def calling(self) -> Collection[int]:
        """The parameters that call, each at once: all others have nothing left on their accumulators."""
        return self._few.keys() if self._permanent is None else self._permanent.calling

    def _keep(self, few: Collection[int]) -> None:
        for i in [i for i in self._few if i not in few]:
            self._few.pop(i).remove()
            if self._parameters[i].requires_grad:
                self._nodes[i] = None  # a new node has no trace of the hook, unless a graph holds the old one
                self._nodes[i] = _accumulator(self._parameters[i])


def _call_after_node(node: Any, on_ready: OnReady | None, index: int, *, undefined: bool = False) -> Any:
    """Call the bound method `on_ready` with `index` after an accumulator has run. Its object is held weakly."""
    assert isinstance(on_ready, types.MethodType)
    weak, method = weakref.ref(on_ready.__self__), on_ready.__func__

    def ready(_: Any, incoming: tuple[Tensor | None, ...]) -> None:
        owner = weak()
        if owner is not None and (undefined or incoming[0] is not None):
            method(owner, index)

    ready.__name__ = ACCUMULATED
    return node.register_hook(ready)


def _accumulator(parameter: Tensor) -> Any:
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
