"""CheckedHook: a user's hook as torch calls it. It checks what the hook returns by torch's rules, in torch's words.

It knows values only, and holds no tensor or node, only text that describes its target. How it is registered is in `attach`.

Note [Written to be traced]
    Under compiled autograd torch does not check what hooks return, and passes lists to node hooks where the engine passes tuples. A
    CheckedHook keeps its rules there too, provided that dynamo can trace it. So: no `is` between tuples, which dynamo refuses,
    nothing but plain attributes on the path of a call, and text, where a hook's place is looked up, is only made for errors.
    `tests/unit/autograd/test_compiled.py` traces every kind as one graph.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gradwire.errors import AutogradHookError, AutogradHookTypeError, UsageTypeError

Hook = Callable[..., Any]


class Kind(enum.Enum):
    """When a hook runs and what it is given."""

    ON_GRAD = "on_grad"
    """`fn(grad)`, once the gradient of a tensor is complete; may return another gradient."""
    BEFORE_NODE = "before_node"
    """`fn(grad_outputs)`, before a node runs; may return another tuple of the same length."""
    AFTER_NODE = "after_node"
    """`fn(grad_inputs, grad_outputs)`, after a node has run; may return another tuple in place of the first."""
    AFTER_ACCUMULATE = "after_accumulate"
    """`fn(tensor)`, when the `.grad` of a leaf has been updated; returns None."""


_TUPLE_LIKE = "Return None, or a tuple of the same length; each value None or like the gradient it stands for."
_ADVICE = {
    Kind.ON_GRAD: "Return None, or a tensor of the shape, dtype, layout and device of the gradient that was given.",
    Kind.BEFORE_NODE: _TUPLE_LIKE,
    Kind.AFTER_NODE: _TUPLE_LIKE,
    Kind.AFTER_ACCUMULATE: "Tensor post accumulate grad hooks should return None. Change `tensor.grad` in place instead.",
}


class CheckedHook:
    """One registration of `fn`. Calling it returns what replaces the first argument, or None.

    None or the very same object means unchanged; anything else is checked.

    >>> double = CheckedHook(lambda grad: grad * 2, Kind.ON_GRAD, "tensor 'w'")
    >>> double(torch.ones(2))
    tensor([2., 2.])
    >>> CheckedHook(lambda grad: None, Kind.ON_GRAD, "tensor 'w'")(torch.ones(2)) is None
    True
    """

    def __init__(self, fn: Hook, kind: Kind, target: str) -> None:
        # torch takes any object for a hook and fails in the next backward; here it fails where the mistake is.
        if not callable(fn):
            raise UsageTypeError(
                f"cannot register {fn!r} as {kind.value} hook on {target}: it is not callable. Pass a function."
            )
        named = fn if isinstance(getattr(fn, "__qualname__", None), str) else type(fn)
        self.name = f"{named.__module__}.{named.__qualname__}"
        self.table: Callable[[], Mapping[int, Any] | None] = lambda: None
        """torch's table of the hooks of this kind on the target, once this is in it."""
        self._fn, self._kind, self._target = fn, kind, target
        self._of_node = kind in (Kind.BEFORE_NODE, Kind.AFTER_NODE)
        if hasattr(fn, "__torch_unserializable__"):  # torch warns on pickling a tensor with a hook that lacks this mark
            self.__torch_unserializable__ = True

    def __repr__(self) -> str:
        return f"<{self._kind.value} hook {self.name}>"

    def __call__(self, value: Any, *rest: Any) -> Any:
        """Run the hook on `value`. `rest` is shown to it and cannot be replaced."""
        fn, of_node = self._fn, self._of_node
        if of_node:
            value, rest = tuple(value), tuple([tuple(grads) for grads in rest])
        try:
            result = fn(value, *rest)
        except Exception as error:
            error.add_note(f"raised in {self._whereabouts()}")
            raise
        if result is None or (not of_node and result is value):
            return None
        broken = find_broken_tuple(fn, value, result) if of_node else find_broken(fn, value, result)
        if broken is None and self._kind is Kind.AFTER_ACCUMULATE:
            broken = Broken("it must not return a value", f"It returned {describe_value(result)}.")
        if broken is not None:
            raise self._error(broken)
        return tuple(result) if of_node else result  # torch's own hooks would fail on a subclass of tuple

    def _error(self, broken: Broken) -> AutogradHookError:
        parts = (f"{broken.words}: {self._whereabouts()}.", broken.details, _ADVICE[self._kind])
        message = " ".join(part for part in parts if part)
        place = self._place()[0]
        return broken.error(message, hook=hook_name(self._fn), kind=self._kind.value, place=place, target=self._target)

    def _whereabouts(self) -> str:
        hook = f"{self._kind.value} hook {self.name}"
        if torch.compiler.is_compiling():
            # What follows cannot be traced; where graphs must not break, this is the message.
            torch._dynamo.graph_break(msg=f"failed: {hook} on {self._target}")
        place, count = self._place()
        return f"{hook} on {self._target}" if place is None else f"{hook}, {place} of {count} on {self._target}"

    def _place(self) -> tuple[int | None, int]:
        """The position among gradwire's hooks on the target, counted from 1 (None once it is removed), and their number."""
        hooks = [hook for hook in list((self.table() or {}).values()) if isinstance(hook, CheckedHook)]
        return (hooks.index(self) + 1 if self in hooks else None), len(hooks)


class Broken(NamedTuple):
    """A rule that a hook broke: torch's words for it, what it returned, and the error to raise."""

    words: str
    details: str
    error: type[AutogradHookError] = AutogradHookError


def find_broken(fn: Hook, value: Any, result: Any) -> Broken | None:
    """Compare the one tensor that hook `fn` returned with the one it was given, in torch's order.

    Unlike torch's, the comparison of devices includes the index.

    >>> find_broken(len, torch.ones(2), torch.ones(3)).words
    "hook 'len' has changed the size of value"
    """
    if result is None or result is value:
        return None
    if value is None:
        return Broken("can't replace a None gradient with a non-None value", f"It returned {describe_value(result)}.")
    if not isinstance(result, torch.Tensor):
        return Broken(f"expected Variable, but hook returned '{type(result).__name__}'", "", AutogradHookTypeError)
    if value.dtype != result.dtype or value.layout != result.layout or value.device != result.device:
        became = f"type of value (was {_type_name(value)} got {_type_name(result)})"
    elif value.shape != result.shape:
        became = "size of value"
    else:
        return None
    details = f"It was given {describe_value(value)} and returned {describe_value(result)}."
    return Broken(f"hook '{hook_name(fn)}' has changed the {became}", details)


def find_broken_tuple(fn: Hook, values: tuple[Any, ...], results: Any) -> Broken | None:
    """Compare the tuple that node hook `fn` returned with the one it was given, element by element."""
    if not isinstance(results, tuple):
        return Broken(f"expected tuple, but hook returned '{type(results).__name__}'", "", AutogradHookTypeError)
    if len(results) != len(values):
        counts = f"(got {len(results)}, but expected {len(values)})"
        return Broken(f"hook '{hook_name(fn)}' has returned an incorrect number of values {counts}", "")
    for index, (value, result) in enumerate(zip(values, results)):
        broken = find_broken(fn, value, result)
        if broken is not None:
            return broken._replace(details=f"This is value {index} of {len(values)}. {broken.details}".strip())
    return None


def hook_name(fn: Hook) -> str:
    """The name torch gives a hook in its messages: `__name__` where that is a string."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else "<unknown>"


def _type_name(tensor: torch.Tensor) -> str:
    """torch's name for dtype, layout and device together, where it has one."""
    try:
        return str(tensor.type())
    except RuntimeError:
        return f"{tensor.dtype} {tensor.layout} on {tensor.device}"


def describe_value(value: Any) -> str:
    """A value in few words; a tensor by its shape and type, never by its contents."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {value.layout}, on {value.device}"
    return f"a value of type '{type(value).__name__}'"
