"""Tells the reducer when gradients are ready. Holds the reducer weakly: parameters own their hooks, and a hook that owned the
reducer, which owns the parameters, would keep a dropped model alive until the garbage collector comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from gradwire.events import Handle
from gradwire.reducer import Reducer


def attach_ready(parameters: Sequence[Tensor], reducer: Reducer, *, undefined_too: bool) -> list[Handle]:
    """Call `reducer.on_ready(i)` whenever parameter i's gradient has been accumulated.

    With `undefined_too`, also when the engine reaches a parameter without a gradient for it, as happens when an output of
    the model is not part of the loss. That needs a hook on the accumulator node, which costs a little more.
    """
    if not undefined_too:
        hooks = _TensorHooks(parameters, reducer)
        reducer.on_listen.append(hooks.listen_to)
        return [Handle(handle.remove) for handle in hooks.handles]
    weak = weakref.ref(reducer)
    return [_on_node(parameter, weak, i) for i, parameter in enumerate(parameters)]


class _TensorHooks:
    """One hook a parameter, that calls the reducer or, quietly, appends to `reducer.arrived`: see [Quiet gradients]."""

    def __init__(self, parameters: Sequence[Tensor], reducer: Reducer) -> None:
        weak = weakref.ref(reducer)
        self._loud = [_loud(weak, i) for i in range(len(parameters))]
        self._quiet = reducer.arrived.append  # the list's own method: the engine calls it without a Python frame
        self.handles = [p.register_post_accumulate_grad_hook(fn) for p, fn in zip(parameters, self._loud, strict=True)]

    def listen_to(self, few: Collection[int] | None) -> None:
        """Let the hooks of these parameters call, those of all others be quiet. None: let all call."""
        for i, (handle, loud) in enumerate(zip(self.handles, self._loud, strict=True)):
            table = handle.hooks_dict_ref()
            if table is not None and handle.id in table:
                table[handle.id] = loud if few is None or i in few else self._quiet


def _loud(weak: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    def ready(_: Tensor) -> None:
        reducer = weak()
        if reducer is not None:
            reducer.on_ready(index)

    return ready


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
