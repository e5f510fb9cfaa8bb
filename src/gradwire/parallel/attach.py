"""Tells the reducer when gradients are ready. Holds the reducer weakly: parameters own their hooks, and a hook that owned the
reducer, which owns the parameters, would keep a dropped model alive until the garbage collector comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradwire.events import Handle
from gradwire.reducer import Reducer


def attach_ready(parameters: Sequence[Tensor], reducer: Reducer, *, undefined_too: bool) -> list[Handle]:
    """Call `reducer.on_ready(i)` whenever parameter i's gradient has been accumulated.

    With `undefined_too`, also when the engine reaches a parameter without a gradient for it, as happens when an output of
    the model is not part of the loss. That needs a hook on the accumulator node, which costs a little more.
    """
    weak = weakref.ref(reducer)
    make = _on_node if undefined_too else _on_tensor
    return [make(parameter, weak, i) for i, parameter in enumerate(parameters)]


def _on_tensor(parameter: Tensor, weak: weakref.ref[Reducer], index: int) -> Handle:
    def ready(_: Tensor) -> None:
        reducer = weak()
        if reducer is not None:
            reducer.on_ready(index)

    return Handle(parameter.register_post_accumulate_grad_hook(ready).remove)


def _on_node(parameter: Tensor, weak: weakref.ref[Reducer], index: int) -> Handle:
    def ready(_: Any, incoming: tuple[Tensor | None, ...]) -> None:
        reducer = weak()
        if reducer is not None and (incoming[0] is not None or reducer.track_unused):
            # A static graph counts gradients only: what it reaches without one in the first step, through the sink, it does
            # not reach at all in the next.
            reducer.on_ready(index)

    node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    remove: Callable[[], None] = node.register_hook(ready).remove

    def take_off(kept: Any = node) -> None:
        # A tensor knows its accumulator only weakly; this closure is what keeps it, and the hook on it, alive.
        remove()

    return Handle(take_off)
