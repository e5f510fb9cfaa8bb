"""The sink: an identity at the end of forward through which all outputs pass together.

When only some outputs are part of the loss, backward would never reach the parameters behind the others. Passing all of them
through one node makes the engine go on from every one, with undefined gradients where there are none, so that the reducer
hears of every parameter.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from gradwire.parallel.replica import Replica


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weak: weakref.ref[Replica], *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)  # None stays None
        ctx.weak = weak
        replica = weak()
        if replica is not None and replica.sink_clones:
            # A loss computed in place on an output would otherwise be refused as a write into a view.
            return tuple(v.clone() if isinstance(v, Tensor) else v for v in values)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        replica = ctx.weak()
        if replica is not None:
            replica.first_static_backward()
        return (None, *grads)


def through_sink(replica: Replica, output: Any) -> Any:
    """The same structure of outputs, with every tensor that has a history passed through the sink."""
    values, structure = tree_flatten(output)
    passed = _Sink.apply(weakref.ref(replica), *values)
    kept = [v if isinstance(v, Tensor) and v.grad_fn is None else p for v, p in zip(values, passed, strict=True)]
    return tree_unflatten(kept, structure)
