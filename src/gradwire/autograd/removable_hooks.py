"""RemovableHooks: called when gradients have been accumulated, by hooks that cost nothing once they are removed.

Registers such hooks and removes them. It must not know who is called, or why only for a while.

Note [Hooks that leave a trace]
    The hook that torch offers for this, `register_post_accumulate_grad_hook`, cannot be undone: `remove()` empties a table,
    but the engine still takes the interpreter lock and wraps the parameter before it finds the table empty, which is three
    quarters of the cost of calling a hook. The same holds for hooks on the accumulator node as long as the node lives, and it
    lives on from graph to graph in every loop that still holds its last loss when it computes the next. What can be undone is
    a hook on the gradient that is *about to be* accumulated (`Tensor.register_hook`): once it is removed, the table can be
    set to None, and nothing is left.

Note [One late]
    Such a hook is called before the gradient has been accumulated. So a parameter is reported as ready when the next one is
    about to get its gradient, or when the backward ends: on the CPU one thread runs a backward, and the accumulation follows
    its hooks immediately. `torch.autograd.grad` runs these hooks too but accumulates nothing, so a parameter is reported only
    if its `.grad` has changed: it is another tensor than before, or its version is higher. If someone else's hook has taken
    the gradient away again (None before, None after), that cannot be seen, and the parameter counts as ready.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.compiled.foreign_hooks import ABOUT_TO_ACCUMULATE
from gradwire.runtime.threads import weakly


class RemovableHooks:
    """Calls `on_ready(index)` once `params[index].grad` has been updated, while registered. For leaves on the CPU.

    The object of `on_ready`, if it is a bound method, is held weakly.

    >>> import torch
    >>> class Listener:
    ...     def ready(self, index: int) -> None:
    ...         print("ready", index)
    >>> model, listener = torch.nn.Linear(2, 1), Listener()
    >>> hooks = RemovableHooks(list(model.parameters()), listener.ready)
    >>> hooks.register()
    >>> model(torch.ones(1, 2)).sum().backward()
    ready 1
    ready 0
    >>> hooks.remove()
    >>> model(torch.ones(1, 2)).sum().backward()
    """

    def __init__(self, params: Sequence[Tensor], on_ready: Callable[[int], object]) -> None:
        self._params = list(params)
        self._on_ready = weakly(on_ready)
        self._handles: dict[int, RemovableHandle] = {}
        self._due: tuple[int, Tensor | None, int] | None = None
        self._end_is_queued = False

    def register(self) -> None:
        """Report every gradient from now on, including those still to come in a backward that is running.

        A frozen parameter cannot be hooked; call this again once it requires grad.
        """
        if len(self._handles) == len(self._params):
            return
        weak = weakref.ref(self)
        for index, param in enumerate(self._params):
            if index not in self._handles and param.requires_grad:
                self._handles[index] = param.register_hook(_make_hook(weak, index))

    def remove(self) -> None:
        """Report nothing more, and leave no trace on parameters without hooks of others."""
        for index, handle in self._handles.items():
            handle.remove()
            if not self._params[index]._backward_hooks:
                self._params[index]._backward_hooks = None
        self._handles.clear()
        self._due = None

    def flush(self) -> None:
        """Between two gradients: the one that was about to be accumulated has been by now. See [One late]."""
        index = self.unreported()
        self._due = None
        if index is not None:
            self._on_ready(index)

    def unreported(self) -> int | None:
        """The parameter whose gradient has been accumulated and was not reported yet, if there is one. See [One late]."""
        due = self._due
        if due is None:
            return None
        index, before, version = due
        param = self._params[index]
        now = param.grad
        if now is None and before is None:
            changed = bool(param._post_accumulate_grad_hooks)
        else:
            changed = now is not before or (now is not None and now._version != version)
        return index if changed else None

    def _about_to_accumulate(self, index: int) -> None:
        self.flush()
        grad = self._params[index].grad
        self._due = index, grad, 0 if grad is None else grad._version
        if not self._end_is_queued:
            at_backward_end(self._ended, failed=self._failed)
            self._end_is_queued = True

    def _ended(self) -> None:
        self._end_is_queued = False
        self.flush()

    def _failed(self) -> None:
        self._end_is_queued = False
        self._due = None


def _make_hook(weak: weakref.ref[RemovableHooks], index: int) -> Callable[[Tensor], None]:
    def about_to_accumulate(grad: Tensor | None) -> None:
        hooks = weak()
        if hooks is not None and grad is not None:  # None: the engine came by without a gradient
            hooks._about_to_accumulate(index)

    about_to_accumulate.__name__ = ABOUT_TO_ACCUMULATE
    return about_to_accumulate
