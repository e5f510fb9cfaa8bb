"""Combinators: hooks made of hooks."""

from __future__ import annotations

from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.base import CommHook, Stage


def chain(*parts: Stage | CommHook) -> CommHook:
    """Compose stages around a hook, the left one outermost: `chain(cast(torch.bfloat16), mean())`.

    >>> import torch
    >>> from gradwire.hooks import cast, mean
    >>> chain(cast(torch.bfloat16), mean())
    cast(torch.bfloat16) > mean()
    """
    if not parts:
        raise UsageError("chain() of nothing. End it with a hook that communicates, such as mean().")
    *stages, hook = parts
    if not isinstance(hook, CommHook):
        raise UsageTypeError(
            f"chain(...): the last part, {hook!r}, is a stage. End the chain with a hook that communicates, such as mean()."
        )
    for stage in reversed(stages):
        if isinstance(stage, CommHook):
            raise UsageTypeError(
                f"chain(...): {stage!r} communicates by itself, so nothing may stand to the right of it."
            )
        if not callable(stage):
            raise UsageTypeError(f"chain(...): {stage!r} is not a stage. A stage takes a hook and returns one.")
        hook = stage(hook)
        if not isinstance(hook, CommHook):
            raise UsageTypeError(f"chain(...): the stage {stage!r} returned {hook!r}, not a CommHook.")
    return hook
