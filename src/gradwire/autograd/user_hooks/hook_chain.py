"""HookChain: calls the hooks of one kind on one tensor or node, and checks what they return by torch's rules, in torch's words.

It knows values only, and holds no tensor or node, only text that describes its target. How torch stores and runs hooks is in
`attach`.

Note [Written to be traced]
    Under compiled autograd torch does not check what hooks return, takes its snapshot of them when backward starts, and passes
    lists to node hooks where the engine passes tuples. A chain, the one torch hook of its tensor, keeps all of its rules there too,
    provided that dynamo can trace it. So: no `is` between tuples, which dynamo refuses, nothing but plain slots on the path of a
    call, and text is only made for errors. `tests/unit/autograd/test_compiled.py` traces every kind as one graph.
"""

from __future__ import annotations

import enum
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradwire.errors import AutogradHookError, AutogradHookTypeError, UsageTypeError
from gradwire.events import Handle

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


# Held while chains gain or lose hooks and while torch's tables of hooks are searched for one; never while hooks run. One
# lock for all chains, and re-entrant, because dropping a hook may run finalizers that remove other hooks.
registration_lock = threading.RLock()

_TUPLE_LIKE = "Return None, or a tuple of the same length; each value None or like the gradient it stands for."
_ADVICE = {
    Kind.ON_GRAD: "Return None, or a tensor of the shape, dtype, layout and device of the gradient that was given.",
    Kind.BEFORE_NODE: _TUPLE_LIKE,
    Kind.AFTER_NODE: _TUPLE_LIKE,
    Kind.AFTER_ACCUMULATE: "Tensor post accumulate grad hooks should return None. Change `tensor.grad` in place instead.",
}


class Entry(NamedTuple):
    """One registration: the hook, its name and what it was put on."""

    fn: Hook
    name: str
    target: str


class HookChain:
    """Hooks of one kind in registration order; calling it runs them and returns what replaces the argument, or None.

    The rule for all kinds: iterate over a snapshot, so a hook may remove itself or others, and one added meanwhile runs from the
    next call on. None or the very same object means unchanged; anything else is checked, and is what the next hook sees.

    `uninstall` is called, under `registration_lock`, when the last hook has been removed.

    >>> import torch
    >>> chain = HookChain(Kind.ON_GRAD)
    >>> double = chain.add(lambda grad: grad * 2, target="tensor 'w'")
    >>> chain(torch.ones(2))
    tensor([2., 2.])
    >>> double.remove()
    >>> chain(torch.ones(2)) is None
    True
    """

    __slots__ = ("__weakref__", "_entries", "_number", "_of_node", "kind", "uninstall")

    def __init__(self, kind: Kind, *, uninstall: Callable[[], None] | None = None) -> None:
        self.kind = kind
        self.uninstall = uninstall
        self._entries: dict[int, Entry] = {}
        self._number = 0
        self._of_node = kind in (Kind.BEFORE_NODE, Kind.AFTER_NODE)

    def add(self, fn: Hook, *, target: str) -> Handle:
        """Put `fn` at the end. The handle holds the chain weakly, and does not hold `fn`."""
        require_callable(fn, self.kind, target)
        named = fn if isinstance(getattr(fn, "__qualname__", None), str) else type(fn)
        with registration_lock:
            self._number = number = self._number + 1
            self._entries[number] = Entry(fn, f"{named.__module__}.{named.__qualname__}", target)
        return Handle(functools.partial(_discard, weakref.ref(self), number))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        names = ", ".join(entry.name for entry in self._entries.values())
        return f"<{self.kind.value} hooks: {names}>"

    @property
    def __torch_unserializable__(self) -> bool:
        """torch warns on pickling a tensor with a hook that lacks this mark; a chain has it when all of its hooks have."""
        if not all(hasattr(entry.fn, "__torch_unserializable__") for entry in self._entries.values()):
            raise AttributeError("__torch_unserializable__")
        return True

    def __call__(self, value: Any, *rest: Any) -> Any:
        """Run the hooks on `value`. `rest` is shown to them and cannot be replaced."""
        # The snapshot. Not tuple(): that allocates between taking the iterator and using it, which may run finalizers that
        # remove hooks from this very chain.
        entries, of_node = list(self._entries.values()), self._of_node
        if of_node:
            value, rest = tuple(value), tuple([tuple(grads) for grads in rest])
        replacement = None
        for index, entry in enumerate(entries):
            try:
                result = entry.fn(value, *rest)
            except Exception as error:
                error.add_note(f"raised in {self._whereabouts(entries, index)}")
                raise
            if result is None or (not of_node and result is value):
                continue
            broken = find_broken_tuple(entry.fn, value, result) if of_node else find_broken(entry.fn, value, result)
            if broken is None and self.kind is Kind.AFTER_ACCUMULATE:
                broken = Broken("it must not return a value", f"It returned {describe_value(result)}.")
            if broken is not None:
                raise self._error(entries, index, broken)
            value = replacement = result
        # A hook may return a subclass of tuple, which the hooks after it here see; torch's own would fail on it.
        return replacement if replacement is None or not of_node else tuple(replacement)

    def _error(self, entries: list[Entry], index: int, broken: Broken) -> AutogradHookError:
        fn, _, target = entries[index]
        parts = (f"{broken.words}: {self._whereabouts(entries, index)}.", broken.details, _ADVICE[self.kind])
        message = " ".join(part for part in parts if part)
        return broken.error(message, hook=hook_name(fn), kind=self.kind.value, place=index + 1, target=target)

    def _whereabouts(self, entries: list[Entry], index: int) -> str:
        _, name, target = entries[index]
        where = f"{self.kind.value} hook {name}, {index + 1} of {len(entries)} on {target}"
        if torch.compiler.is_compiling():
            # What follows cannot be traced; where graphs must not break, this is the message.
            torch._dynamo.graph_break(msg=f"failed: {where}")
        return where


def _discard(weak: weakref.ref[HookChain], number: int) -> None:
    chain = weak()
    if chain is not None:
        with registration_lock:
            removed = chain._entries.pop(number, None)
            if removed is not None and not chain._entries and chain.uninstall is not None:
                chain.uninstall()


def require_callable(fn: Any, kind: Kind, target: str) -> None:
    """torch takes any object for a hook and fails in the next backward; here it fails where the mistake is."""
    if not callable(fn):
        raise UsageTypeError(
            f"cannot register {fn!r} as {kind.value} hook on {target}: it is not callable. Pass a function."
        )


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
