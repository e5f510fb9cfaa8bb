"""HookChain: how the hooks of one kind on one tensor or node are called. Once, for all kinds.

Knows values only: it can be called with any tensors, without an engine. It must not know how torch stores or fires hooks
(that is `attach`), and it holds no tensor or node, only words that describe its target. What a hook may return is in
`rules`.

Note [Written to be traced]
    Under compiled autograd torch does not check what hooks return, takes its snapshot of them when backward starts, and
    hands lists to node hooks where the engine hands tuples. A chain that is itself the one torch hook of its tensor keeps
    all of its rules there too, provided that dynamo can trace it. So: no `is` between tuples (dynamo refuses; elements are
    compared instead), nothing but plain slots on the path of a call, and words are only made once something is wrong.
    `tests/unit/autograd/test_compiled.py` traces every kind as one graph.
"""

from __future__ import annotations

import enum
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradwire.autograd.user_hooks.hook_rules import (
    Broken,
    Hook,
    describe_hook,
    describe_value,
    find_broken,
    find_broken_tuple,
    hook_name,
)
from gradwire.errors import AutogradHookError, UsageTypeError
from gradwire.events import Handle


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

_TENSOR_LIKE = "Return None, or a tensor of the shape, dtype, layout and device of the gradient that was given."
_TUPLE_LIKE = "Return None, or a tuple of the same length; each value None or like the gradient it stands for."
_ADVICE = {
    Kind.ON_GRAD: _TENSOR_LIKE,
    Kind.BEFORE_NODE: _TUPLE_LIKE,
    Kind.AFTER_NODE: _TUPLE_LIKE,
    Kind.AFTER_ACCUMULATE: "Tensor post accumulate grad hooks should return None. Change `tensor.grad` in place instead.",
}


class Entry(NamedTuple):
    """One registration: the hook, and in words what it is called and what it was put on."""

    fn: Hook
    name: str
    target: str


class HookChain:
    """Hooks of one kind in registration order; calling it runs them and returns what replaces the argument, or None.

    The rule for all kinds: walk a snapshot, so a hook may remove itself or others, and one added meanwhile runs from the
    next call on. None or the very same object means unchanged; anything else is checked, and is what the next hook sees.

    `uninstall` is called, under `registration_lock`, when the last hook has gone.

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
        """Put `fn` at the end. The handle knows the chain weakly and does not hold `fn`."""
        require_callable(fn, self.kind, target)
        with registration_lock:
            self._number = number = self._number + 1
            self._entries[number] = Entry(fn, describe_hook(fn), target)
        return Handle(functools.partial(_discard, weakref.ref(self), number))

    def discard(self, number: int) -> None:
        """Take out registration `number`; nothing happens where it is gone already."""
        with registration_lock:
            gone = self._entries.pop(number, None)
            if gone is not None and not self._entries and self.uninstall is not None:
                self.uninstall()

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
        entries = list(self._entries.values())
        if self._of_node:
            return self._run_on_tuple(entries, tuple(value), [tuple(grads) for grads in rest])
        replacement = None
        for index, entry in enumerate(entries):
            try:
                result = entry.fn(value)
            except Exception as error:
                error.add_note(f"raised in {self._whereabouts(entries, index)}")
                raise
            if result is None or result is value:
                continue
            broken = find_broken(entry.fn, value, result)
            if broken is None and self.kind is Kind.AFTER_ACCUMULATE:
                broken = Broken("it must not return a value", f"It returned {describe_value(result)}.")
            if broken is not None:
                raise self._error(entries, index, broken)
            value = replacement = result
        return replacement

    def _run_on_tuple(self, entries: list[Entry], values: tuple[Any, ...], rest: list[tuple[Any, ...]]) -> Any:
        changed = False
        for index, entry in enumerate(entries):
            try:
                result = entry.fn(values, *rest)
            except Exception as error:
                error.add_note(f"raised in {self._whereabouts(entries, index)}")
                raise
            if result is None:
                continue
            broken = find_broken_tuple(entry.fn, values, result)
            if broken is not None:
                raise self._error(entries, index, broken)
            values, changed = result, True
        # A hook may return a subclass of tuple. The hooks after it here see that very object; torch's own hooks on the
        # same node would trip over it.
        return tuple(values) if changed else None

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


def require_callable(fn: Any, kind: Kind, target: str) -> None:
    """torch takes any object for a hook and fails in the next backward; here it fails where the mistake is."""
    if not callable(fn):
        raise UsageTypeError(
            f"cannot register {fn!r} as {kind.value} hook on {target}: it is not callable. Pass a function."
        )


def _discard(chain: weakref.ref[HookChain], number: int) -> None:
    alive = chain()
    if alive is not None:
        alive.discard(number)
