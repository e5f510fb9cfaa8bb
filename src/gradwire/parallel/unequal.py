"""Warns when the parameters of one rank are saved while the ranks' parameters differ, as between outer steps of DiLoCo."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from gradwire.events import Handle
from gradwire.reducer.outer_optimizer import OuterHalf


class UnequalReplicas(UserWarning):
    """`state_dict()` of a model whose replicas differ."""


def warn_when_saved(module: nn.Module, outer: OuterHalf) -> Handle:
    """Warn, once, when `module.state_dict()` is called while the ranks' parameters differ."""
    return Handle(module.register_state_dict_pre_hook(_Warning(outer)).remove)


class _Warning:
    """The hook on `state_dict()`. In a copy or a pickle of the module it does nothing."""

    def __init__(self, outer: OuterHalf | None = None) -> None:
        self._outer = None if outer is None else weakref.ref(outer)

    def __call__(self, *_: Any) -> None:
        outer = None if self._outer is None else self._outer()
        if outer is None or not outer.differ:
            return
        self._outer = None
        warnings.warn(
            f"state_dict() on rank {outer.group.rank} after step {outer.step} with {outer.hook!r}: the ranks' parameters differ, "
            "and these are one rank's. Call average_parameters() on every rank first to save one model. To go on from here later, "
            "save state_dict() and hook_state_dict() on every rank.",
            UnequalReplicas,
            stacklevel=4,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Warning, ()
