"""Finds hooks that others have put on a parameter or on its gradient accumulator, where they may see or change its gradient.

Knows the tables in which torch keeps hooks. It must not know why somebody asks.

Note [Tables of a node]
torch shows the hooks of a tensor, and hides those of a node. But all of a node's hooks of one kind are in one table, to which the
handle of a new one leads; so one is registered and removed again, once for each accumulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

ACCUMULATED = "gradwire_accumulated"
"""The name of gradwire's own hooks."""
_TABLES = "gradwire hook tables"


def has_foreign_hooks(parameter: Tensor, accumulator: Any) -> bool:
    """Whether anyone but gradwire has a hook on `parameter` or its `accumulator`.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> accumulator = torch.autograd.graph.get_gradient_edge(w).node
    >>> has_foreign_hooks(w, accumulator)
    False
    >>> handle = accumulator.register_prehook(lambda grads: (grads[0] * 2,))
    >>> has_foreign_hooks(w, accumulator)
    True
    """
    tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks, *_tables(accumulator)
    return any(getattr(hook, "__name__", "") != ACCUMULATED for table in tables if table for hook in table.values())


def _tables(node: Any) -> tuple[dict[int, Any] | None, ...]:
    found: tuple[dict[int, Any] | None, ...] | None = node.metadata.get(_TABLES)
    if found is None:
        found = node.metadata[_TABLES] = (_table(node.register_prehook), _table(node.register_hook))
    return found


def _table(register: Callable[[Callable[..., None]], RemovableHandle]) -> dict[int, Any] | None:
    handle = register(_no_hook)
    table: dict[int, Any] | None = handle.hooks_dict_ref()
    handle.remove()
    return table


def _no_hook(*_: Any) -> None:
    pass
