"""The sink, as in torch's DDP: an identity at the end of forward through which all outputs pass together.

When only some outputs are part of the loss, backward would never reach the parameters behind the others. Passing all of them
through one node makes the engine continue from each, with undefined gradients where there are none, so that every parameter's
hook is called.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradwire.runtime.dynamo import untraced_call


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clone: bool, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)  # None stays None
        if clone:
            # A loss computed in place on an output would otherwise be refused as a write into a view.
            return tuple(v.clone() if isinstance(v, Tensor) else v for v in values)
        return values

    @staticmethod
    @untraced_call
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *grads)


def through_sink(output: Any, *, clone: bool) -> Any:
    """The same structure of outputs, with every tensor that has a history passed through the sink."""
    values, rebuild = _flatten(output)
    passed = _Sink.apply(clone, *values)
    kept = [v if isinstance(v, Tensor) and v.grad_fn is None else p for v, p in zip(values, passed, strict=True)]
    return rebuild(iter(kept))


def _flatten(output: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """Flatten nested containers: (leaves, a function that rebuilds them from other leaves). Unlike pytree, handles dataclasses."""
    leaves, structure = tree_flatten(output)
    parts = [_flatten_fields(leaf) if _is_dataclass(leaf) else ([leaf], next) for leaf in leaves]

    def rebuild(values: Iterator[Any]) -> Any:
        return tree_unflatten([rebuild_part(values) for _, rebuild_part in parts], structure)

    return [value for values, _ in parts for value in values], rebuild


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _flatten_fields(record: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}
    values, rebuild_part = _flatten(fields)

    def rebuild(values: Iterator[Any]) -> Any:
        # Not by its constructor, which may take other arguments than its fields, or have side effects.
        copied = copy.copy(record)
        for name, value in rebuild_part(values).items():
            object.__setattr__(copied, name, value)
        return copied

    return values, rebuild
