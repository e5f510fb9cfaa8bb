"""`at_backward_end`: run something when the backward now running has ended, or when it has failed.

The engine calls what was queued when the *current graph task* ends: for a re-entrant backward (a checkpoint with
use_reentrant=True) that is the inner one. It drops the callbacks of a graph task that failed, so what is queued here is an
object that notices its own deletion as soon as the failed backward has returned.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

import torch

from gradwire.runtime.dynamo import untraced_call
from gradwire.runtime.threads import weakly


@untraced_call
def at_backward_end(ended: Callable[[], object], *, failed: Callable[[], object] | None = None) -> None:
    """Call `ended` when the current graph task has ended, or `failed` when it has raised.

    The objects of bound methods are held weakly. What `ended` raises, `backward()` raises; `failed` must not raise.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_BackwardEnd(ended, failed))


class _BackwardEnd:
    __slots__ = ("_ended", "_failed", "_owner")

    def __init__(self, ended: Callable[..., object], failed: Callable[[], object] | None) -> None:
        self._owner = None
        if isinstance(ended, types.MethodType):
            self._owner, ended = weakref.ref(ended.__self__), ended.__func__
        self._ended = ended
        self._failed = None if failed is None else weakly(failed)

    @untraced_call
    def __call__(self) -> None:
        self._failed = None
        if self._owner is None:
            self._ended()
        elif (owner := self._owner()) is not None:
            self._ended(owner)

    @untraced_call
    def __del__(self) -> None:
        failed = getattr(self, "_failed", None)  # compiled autograd makes such objects without calling __init__
        if failed is not None:
            failed()
