"""`chain`: stages around a hook."""

from __future__ import annotations

from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.base import CommHook, Stage, Trait
from gradwire.hooks.dense import Mean


def chain(*parts: Stage | CommHook) -> CommHook:
    """Compose stages around a hook, the left one outermost: `chain(cast(torch.bfloat16), mean())`.

    A hook that averages by itself, such as `quantize`, may be followed by `mean()`, which is then redundant.

    >>> import torch
    >>> from gradwire.hooks import cast, mean
    >>> chain(cast(torch.bfloat16), mean())
    cast(torch.bfloat16) > mean()
    """
    if not parts:
        raise UsageError("chain() without arguments. End it with a hook that communicates, such as mean().")
    *stages, hook = parts
    if not isinstance(hook, CommHook):
        raise UsageTypeError(
            f"chain(...): the last part, {hook!r}, is a stage, or a function that was not called. End with a hook such as mean()."
        )
    for stage in reversed(stages):
        if isinstance(stage, CommHook):
            if Trait.AVERAGES in stage.traits and hook == Mean():
                hook = stage
                continue
            why = f": {stage.alone}" if stage.alone else ""
            raise UsageTypeError(
                f"chain(...): {stage!r} communicates by itself{why}; {hook!r} would never be reached. End the chain with it."
            )
        if not callable(stage):
            raise UsageTypeError(f"chain(...): {stage!r} is not a stage. A stage takes a hook and returns one.")
        hook = stage(hook)
        if not isinstance(hook, CommHook):
            raise UsageTypeError(f"chain(...): the stage {stage!r} returned {hook!r}, not a CommHook.")
    return hook
