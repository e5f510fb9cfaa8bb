"""Checks for arguments that must be hooks, with advice if a stage was passed.

A stage changes gradients around the hook that communicates them, so it cannot be used in place of a hook.
"""

from __future__ import annotations

from typing import Any

from gradwire.errors import HookTypeError
from gradwire.hooks.base import CommHook, Stage


class NamedStage:
    """A stage whose repr is the call that made it.

    >>> from gradwire.hooks import error_feedback
    >>> error_feedback()
    error_feedback()
    """

    def __init__(self, call: str, stage: Stage) -> None:
        self._call = call
        self._stage = stage

    def __call__(self, inner: CommHook) -> CommHook:
        return self._stage(inner)

    def __repr__(self) -> str:
        return self._call


def check_hooks(where: str, **hooks: Any) -> None:
    """Raise HookTypeError unless each of these arguments of `where` is a hook."""
    for name, hook in hooks.items():
        refuse_stage(where, hook)
        if not isinstance(hook, CommHook):
            raise HookTypeError(
                f"{where}(...): `{name}` must be a CommHook, got {hook!r}. End a chain of stages with a hook that communicates, "
                "e.g. chain(stage, mean()); register_comm_hook takes torch-style hooks.",
                hook=repr(hook),
            )


def refuse_stage(where: str, hook: Any) -> None:
    """Raise HookTypeError if `hook` is one of our stages."""
    if isinstance(hook, NamedStage):
        raise HookTypeError(
            f"{where}({hook!r}): {hook!r} is a stage, which communicates nothing by itself. End it with a hook that communicates: "
            f"chain({hook!r}, mean()).",
            hook=repr(hook),
        )
