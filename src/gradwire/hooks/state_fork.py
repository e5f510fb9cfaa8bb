"""`Fork`: the way back to a hook's state, before a step that may be dropped.

Note [A fork shares no memory]
A step changes the state where it is, and the fork has a copy of what was there. So a commit costs nothing, and a drop puts
everything back into the same objects and the same memory, which CUDA graphs of the reduction contain. The copies are kept
from step to step: copying into them takes a fraction of the time of `copy.deepcopy`, which allocates, and walks every view.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from enum import Enum
from numbers import Number
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.state import attributes

_CONSTANT = (Number, str, bytes, type(None), Enum, type, FunctionType, torch.dtype, torch.device, torch.layout)


class Fork:
    """A copy of what a state consists of: tensors, and what dicts, lists and attributes refer to.

    >>> state = {"residual": torch.zeros(2), "steps": 0}
    >>> fork = Fork(state)
    >>> state["residual"] += 1
    >>> state["steps"] = 1
    >>> fork.drop()
    {'residual': tensor([0., 0.]), 'steps': 0}
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self._opaque = True
        """Whether something in it can only be copied by `copy.deepcopy`; at first, it is not known what there is."""
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the state as it is now, if possible into the memory of the last copies."""
        if self._opaque or not self._unchanged():
            self._walk()
        if self._copies:
            torch._foreach_copy_(self._copies, self._copied)

    @torch.no_grad()
    def drop(self) -> Any:
        """Put everything back, and return the state: the same object, unless only `copy.deepcopy` can copy it."""
        for container, contents in self._contents:
            _put(container, contents)
        for tensor, alias in zip(self._tensors, self._aliases, strict=True):
            if _place(tensor) != _place(alias):
                tensor.data = alias
        if self._copies:
            torch._foreach_copy_(self._copied, self._copies)
        return self._root

    def _unchanged(self) -> bool:
        """Whether the state consists of the same objects in the same memory."""
        return all(_same(contents, _contents(container)) for container, contents in self._contents) and all(
            _place(tensor) == _place(alias) for tensor, alias in zip(self._tensors, self._aliases, strict=True)
        )

    def _walk(self) -> None:
        self._opaque = False
        self._contents: list[tuple[Any, dict[Any, Any]]] = []
        """What can be changed (dicts, lists and objects), and what each of them held."""
        self._tensors: list[Tensor] = []
        self._root = self._visit(self.state, {})
        self._aliases = [tensor.detach() for tensor in self._tensors]
        # Other tensors are views of these.
        self._copied = _cover(self._aliases)
        self._copies = [torch.empty_like(t) for t in self._copied]

    def _visit(self, value: Any, seen: dict[int, Any]) -> Any:
        """What to put back in place of `value`: itself, with everything in it restored, or a deep copy of it."""
        if isinstance(value, _CONSTANT):
            return value
        if id(value) not in seen:
            seen[id(value)] = value
            seen[id(value)] = self._visit_new(value, seen)
        return seen[id(value)]

    def _visit_new(self, value: Any, seen: dict[int, Any]) -> Any:
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            if torch._debug_has_internal_overlap(value) != 1:
                self._tensors.append(value)
                return value
        elif isinstance(value, tuple):
            if all(self._visit(part, seen) is part for part in value):
                return value
        elif (contents := _contents(value)) is not None:
            kept = {key: self._visit(part, seen) for key, part in contents.items()}
            params = getattr(type(value), "__dataclass_params__", None)
            if params is None or not params.frozen:
                self._contents.append((value, kept))
                return value
            if _same(kept, contents):
                return value
        self._opaque = True
        return copy.deepcopy(value)


def _contents(value: Any) -> dict[Any, Any] | None:
    """What a dict, a list or an object refers to; None for whatever must be copied in its own way."""
    if type(value) is dict:
        return dict(value)
    if type(value) is list:
        return dict(enumerate(value))
    kind: Any = type(value)
    usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    usual = usual and not hasattr(kind, "__deepcopy__") and not isinstance(value, dict | list)
    return attributes(value) if usual else None


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _put(container: Any, contents: dict[Any, Any]) -> None:
    if type(container) is dict:
        container.clear()
        container.update(contents)
    elif type(container) is list:
        container[:] = contents.values()
    else:
        for name in (_contents(container) or {}).keys() - contents.keys():
            object.__delattr__(container, name)
        for name, value in contents.items():
            object.__setattr__(container, name, value)


def _same(one: dict[Any, Any], other: dict[Any, Any] | None) -> bool:
    return other is not None and list(one) == list(other) and all(map(is_, one.values(), other.values()))


def _cover(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of which all others are views: copying these copies everything once."""

    def span(t: Tensor) -> tuple[str, int, int]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return str(t.device), t.data_ptr(), -(t.data_ptr() + (last + 1) * t.element_size())

    found, where, reach = [], "", 0
    for (device, start, minus_end), t in sorted(((span(t), t) for t in tensors if t.numel()), key=lambda one: one[0]):
        if device == where and -minus_end <= reach:
            continue
        found.append(t)
        if -minus_end - start == t.nbytes:  # without gaps
            where, reach = device, -minus_end
    return found
