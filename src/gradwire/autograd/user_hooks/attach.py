"""Registers hooks of the four kinds with torch, by tensor, by node and by parameter name."""

from __future__ import annotations

import difflib
import fnmatch
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradwire.autograd.user_hooks.checked_hook import CheckedHook, Hook, Kind, describe_value, hook_name
from gradwire.errors import AutogradHookError, UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.runtime.dynamo import untraced_call
from gradwire.runtime.threads import weakly

_FROZEN = "cannot register a hook on a tensor that doesn't require gradient"
_NO_LEAF = "post accumulate grad hooks cannot be registered on non-leaf tensors"
# Held while a hook is registered: torch loses hooks when two threads register the first ones of a tensor at the same time.
_registering = threading.RLock()


def on_grad(tensor: torch.Tensor, fn: Hook) -> Handle:
    """Call `fn(grad)` when the gradient of `tensor` is complete; what it returns, unless None, takes its place.

    >>> w = torch.ones(2, requires_grad=True)
    >>> with on_grad(w, lambda grad: grad * 10):
    ...     (w * 3).sum().backward()
    >>> w.grad
    tensor([30., 30.])
    """
    return _on_tensor(tensor, Kind.ON_GRAD, fn)


def after_accumulate(tensor: torch.Tensor, fn: Hook) -> Handle:
    """Call `fn(tensor)` when the `.grad` of the leaf `tensor` has been updated.

    >>> def clip(leaf):
    ...     leaf.grad.clamp_(max=1.0)
    >>> w = torch.ones(2, requires_grad=True)
    >>> handle = after_accumulate(w, clip)
    >>> (w * 3).sum().backward()
    >>> w.grad
    tensor([1., 1.])
    """
    return _on_tensor(tensor, Kind.AFTER_ACCUMULATE, fn)


def before_node(node: Node, fn: Hook) -> Handle:
    """Call `fn(grad_outputs)` before `node` runs; a tuple it returns takes the place of the gradients the node is given.

    >>> w = torch.ones(2, requires_grad=True)
    >>> loss = (w * 3).sum()
    >>> handle = before_node(loss.grad_fn, lambda grads: tuple(grad * 2 for grad in grads))
    >>> loss.backward()
    >>> w.grad
    tensor([6., 6.])
    """
    return _on_node(node, Kind.BEFORE_NODE, fn)


def after_node(node: Node, fn: Hook) -> Handle:
    """Call `fn(grad_inputs, grad_outputs)` after `node` ran; a tuple it returns takes the place of the node's results.

    >>> w = torch.ones(2, requires_grad=True)
    >>> loss = (w * 3).sum()
    >>> handle = after_node(loss.grad_fn, lambda grad_inputs, grad_outputs: print(len(grad_inputs), len(grad_outputs)))
    >>> loss.backward()
    1 1
    """
    return _on_node(node, Kind.AFTER_NODE, fn)


def attach(module: torch.nn.Module, pattern: str, kind: Kind | str, fn: Hook) -> Handle:
    """Register `fn` on every parameter of `module` whose full name matches the glob `pattern`; one handle removes all.

    For the node kinds the node is the parameter's gradient accumulator. A parameter with several names is registered once.
    Either all are registered or, where one cannot be, none.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> handle = attach(model, "*.bias", Kind.ON_GRAD, torch.zeros_like)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> [name for name, p in model.named_parameters() if not p.grad.any()]
    ['0.bias', '1.bias']
    """
    try:
        kind = Kind(kind)
    except ValueError:
        raise UsageError(f"attach(..., kind={kind!r}): the kinds are {', '.join(k.value for k in Kind)}.") from None
    matches = _matching(module, pattern)
    frozen = [name for name, parameter in matches.items() if not parameter.requires_grad]
    if frozen:
        advice = f"Narrow the pattern {pattern!r}, or call requires_grad_() first."
        raise _refused(_FROZEN, kind, fn, f"parameter {', '.join(map(repr, frozen))}", advice)
    with ExitStack() as handles:
        for name, parameter in matches.items():
            if kind is Kind.ON_GRAD or kind is Kind.AFTER_ACCUMULATE:
                handles.enter_context(_on_tensor(parameter, kind, fn, f"parameter {name!r}"))
            else:
                handles.enter_context(_on_accumulator(module, name, kind, fn))
        return Handle(handles.pop_all().close)


def _on_accumulator(module: torch.nn.Module, name: str, kind: Kind, fn: Hook) -> Handle:
    """Register `fn` on the gradient accumulator of a parameter, and again before a forward that finds another accumulator."""
    accumulator = _Accumulator(name, kind, fn)
    accumulator(module)
    accumulator.before_forward = module.register_forward_pre_hook(accumulator)
    return Handle(weakly(accumulator.remove))  # a handle keeps no tensor alive; the module owns the accumulator


class _Accumulator:
    """A hook on the accumulator of the parameter `name` of a module, which owns this as a forward pre-hook.

    A tensor holds its accumulator weakly, so the hook would be gone before the first backward if the node were not kept here. torch
    makes another accumulator when the dtype or the device of a parameter changes, as `module.to()` does.
    """

    before_forward: RemovableHandle

    def __init__(self, name: str = "", kind: Kind = Kind.AFTER_NODE, fn: Any = None) -> None:
        self._name, self._kind, self._fn = name, kind, fn
        self._node: Node | None = None
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self._on: tuple[torch.dtype, torch.device] | None = None
        self._handle: Handle | None = None

    def __call__(self, module: torch.nn.Module, inputs: object = ()) -> None:
        if not self._name:  # a copy
            return
        parameter = module.get_parameter(self._name)
        on = parameter.dtype, parameter.device
        same = self._parameter is not None and self._parameter() is parameter and on == self._on
        if same or not parameter.requires_grad:
            return
        self._release()
        self._parameter, self._on = weakref.ref(parameter), on
        self._node = get_gradient_edge(parameter).node
        target = f"the gradient accumulator of parameter {self._name!r}"
        self._handle = _on_node(self._node, self._kind, self._fn, target)

    def remove(self) -> None:
        self.before_forward.remove()
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._node = self._on = self._handle = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Accumulator, ()


def _matching(module: torch.nn.Module, pattern: str) -> dict[str, torch.nn.Parameter]:
    """The parameters whose name matches, each under the first of its names that does."""
    named = list(module.named_parameters(remove_duplicate=False))
    first: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in named:
        if fnmatch.fnmatchcase(name, pattern):
            first.setdefault(id(parameter), (name, parameter))
    if first:
        return dict(first.values())
    names = [name for name, _ in named]
    close = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
    hint = f"Close names: {', '.join(close)}." if close else "It has no parameters."
    raise UsageError(
        f"attach(..., {pattern!r}): no parameter of {type(module).__name__} has a name that matches. {hint} "
        f"Patterns are globs over full names, such as '*.bias' or 'encoder.*'."
    )


def _describe(target: Any) -> str:
    if isinstance(target, Node):
        return f"node {target.name()}"
    if isinstance(target, torch.Tensor):
        kind = "parameter" if isinstance(target, torch.nn.Parameter) else "tensor"
        return f"{kind} of shape {tuple(target.shape)}"
    return describe_value(target)


def _on_tensor(tensor: torch.Tensor, kind: Kind, fn: Hook, target: str = "") -> Handle:
    target = target or _describe(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise UsageTypeError(f"cannot register a {kind.value} hook on {target}: it is not a tensor.")
    if not tensor.requires_grad:
        raise _refused(_FROZEN, kind, fn, target, "Call requires_grad_() first.")
    if kind is Kind.AFTER_ACCUMULATE and tensor.grad_fn is not None:
        raise _refused(_NO_LEAF, kind, fn, target, "Use on_grad for results of operations.")
    register = tensor.register_hook if kind is Kind.ON_GRAD else tensor.register_post_accumulate_grad_hook
    return _register(register, kind, fn, target)


def _on_node(node: Node, kind: Kind, fn: Hook, target: str = "") -> Handle:
    target = target or _describe(node)
    if not isinstance(node, Node):
        raise UsageTypeError(
            f"cannot register a {kind.value} hook on {target}: it is not a node of the graph. Pass a tensor's `grad_fn`, or "
            f"for a leaf `torch.autograd.graph.get_gradient_edge(leaf).node` and keep that node alive."
        )
    return _register(node.register_prehook if kind is Kind.BEFORE_NODE else node.register_hook, kind, fn, target)


def _refused(problem: str, kind: Kind, fn: Hook, target: str, advice: str) -> AutogradHookError:
    message = f"{problem}: {kind.value} hook on {target}. {advice}"
    return AutogradHookError(message, hook=hook_name(fn), kind=kind.value, target=target)


@untraced_call
def _register(register: Callable[[CheckedHook], RemovableHandle], kind: Kind, fn: Hook, target: str) -> Handle:
    hook = CheckedHook(fn, kind, target)
    with _registering:
        registration = register(hook)
    hook.table = registration.hooks_dict_ref
    return Handle(registration.remove)
