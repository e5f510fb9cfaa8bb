"""Warns when one rank's parameters are saved while the ranks' parameters differ, as between outer steps of DiLoCo."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from gradwire.events import Handle
from gradwire.reducer.hook.outer_optimizer import OuterOptimizer
from gradwire.reducer.hook.runner import HookRunner


class UnequalReplicas(UserWarning):
    """`state_dict()` of a model whose replicas differ."""


def warn_when_saved(module: nn.Module, runner: HookRunner) -> Handle:
    """Warn when `module.state_dict()` is called while the ranks' parameters differ."""
    return Handle(module.register_state_dict_pre_hook(_Warning(runner)).remove)


class _Warning:
    """The hook on `state_dict()`. In a copy or a pickle of the module it does nothing."""

    def __init__(self, runner: HookRunner | None = None) -> None:
        self._runner = None if runner is None else weakref.ref(runner)
        self._warned: weakref.ref[OuterOptimizer] | None = None

    def __call__(self, *_: Any) -> None:
        runner = None if self._runner is None else self._runner()
        outer = None if runner is None else runner.outer
        if outer is None or not outer.differ or (self._warned is not None and self._warned() is outer):
            return
        self._warned = weakref.ref(outer)
        warnings.warn(
            f"state_dict() on rank {outer.group.rank} after step {outer.step} with {outer.hook!r}: the ranks' parameters differ, "
            "and these are this rank's. Call average_parameters() on every rank first to save one model. To resume from here "
            "later, save state_dict() and hook_state_dict() on every rank.",
            UnequalReplicas,
            stacklevel=4,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Warning, ()
