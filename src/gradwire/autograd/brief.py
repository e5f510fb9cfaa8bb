"""BriefHooks: tells when gradients have been accumulated, by hooks that cost nothing once they are taken off.

Responsible for putting such hooks on and taking them off. It must not know who listens, or why only for a while.

Note [Hooks that leave a trace]
    The hook that torch offers for this, `register_post_accumulate_grad_hook`, cannot be undone: `remove()` empties a table,
    but the engine goes on to take the interpreter lock and to wrap the parameter before it finds the table empty, which is
    three quarters of what calling a hook costs. The same holds for hooks on the accumulator node, as long as the node
    lives; and it does, from graph to graph, in every loop that still holds its last loss when it computes the next. What
    can be undone is a hook on the gradient that is *about to be* accumulated (`Tensor.register_hook`): without it the table
    can be set to None, and then nothing is left.

Note [One late]
    Such a hook is called before the gradient is there. So "ready" is said of a parameter when the next one is about to get
    its gradient, or when the backward ends: on the CPU one thread runs a backward, and the accumulation follows its hooks at
    once. `torch.autograd.grad` runs these hooks too but accumulates nothing, so it is said only if `.grad` has changed: it
    is another tensor than before, or its version has gone up. Where a hook of somebody else has taken the gradient away
    again (None before, None after), that cannot be seen, and is believed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.autograd.ending import at_the_end


class BriefHooks:
    """Calls `on_ready(index)` once `params[index].grad` has been updated, while the hooks are on. For leaves on the CPU.

    The object of `on_ready`, a bound method, is held weakly.

    >>> import torch
    >>> class Listener:
    ...     def ready(self, index: int) -> None:
    ...         print("ready", index)
    >>> model, listener = torch.nn.Linear(2, 1), Listener()
    >>> hooks = BriefHooks(list(model.parameters()), listener.ready)
    >>> hooks.put_on()
    >>> model(torch.ones(1, 2)).sum().backward()
    ready 1
    ready 0
    >>> hooks.take_off()
    >>> model(torch.ones(1, 2)).sum().backward()
    """

    def __init__(self, params: Sequence[Tensor], on_ready: Callable[[int], object]) -> None:
        self._params = list(params)
        self._on_ready = weakref.WeakMethod(on_ready)
        self._handles: dict[int, RemovableHandle] = {}
        self._due: tuple[int, Tensor | None, int] | None = None
        self._end_is_queued = False

    def put_on(self) -> None:
        """Hear of every gradient from now on, also of those still to come in a backward that is running.

        A parameter that has been frozen cannot be hooked; call this again once it is not.
        """
        if len(self._handles) == len(self._params):
            return
        weak = weakref.ref(self)
        for index, param in enumerate(self._params):
            if index not in self._handles and param.requires_grad:
                self._handles[index] = param.register_hook(_make_hook(weak, index))

    def take_off(self) -> None:
        """Hear of nothing more, and leave no trace on parameters that have no hooks of others."""
        for index, handle in self._handles.items():
            handle.remove()
            if not self._params[index]._backward_hooks:
                self._params[index]._backward_hooks = None
        self._handles.clear()
        self._due = None

    def _coming(self, index: int) -> None:
        self.settle()
        grad = self._params[index].grad
        self._due = index, grad, 0 if grad is None else grad._version
        if not self._end_is_queued:
            at_the_end(self._ended, lost=self._lost)
            self._end_is_queued = True

    def _ended(self) -> None:
        self._end_is_queued = False
        self.settle()

    def _lost(self) -> None:
        self._end_is_queued = False
        self._due = None

    def settle(self) -> None:
        """Between two gradients: the one that was about to be accumulated has been by now. See [One late]."""
        if self._due is None:
            return
        (index, before, version), self._due = self._due, None
        param, on_ready = self._params[index], self._on_ready()
        now = param.grad
        if now is None and before is None:
            changed = bool(param._post_accumulate_grad_hooks)
        else:
            changed = now is not before or (now is not None and now._version != version)
        if changed and on_ready is not None:
            on_ready(index)


def _make_hook(weak: weakref.ref[BriefHooks], index: int) -> Callable[[Tensor], None]:
    def gradwire_coming(grad: Tensor | None) -> None:
        hooks = weak()
        if hooks is not None and grad is not None:  # None: the engine came by without a gradient
            hooks._coming(index)

    return gradwire_coming
