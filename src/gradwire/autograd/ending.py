"""What is to be done when the backward now running has ended, or has failed.

Knows the engine's queue of final callbacks. It must not know what runs in them.

The engine calls what was queued when the *current graph task* ends: of a re-entrant backward (a checkpoint with
use_reentrant=True) that is the inner one. It calls nothing of a graph task that failed, but drops it; so what is queued here
is an object that notices its own deletion, as soon as the failed backward has returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


def at_the_end(ended: Callable[[], object], *, lost: Callable[[], object]) -> None:
    """Call the bound method `ended` when the current graph task has ended, or `lost` when it has failed.

    Their objects are held weakly. What `ended` raises comes out of `backward()`; `lost` must not raise.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_Ending(ended, lost))


class _Ending:
    __slots__ = ("_ended", "_lost")

    def __init__(self, ended: Callable[[], object], lost: Callable[[], object]) -> None:
        self._ended = weakref.WeakMethod(ended)
        self._lost: weakref.WeakMethod[Callable[[], object]] | None = weakref.WeakMethod(lost)

    def __call__(self) -> None:
        self._lost = None
        ended = self._ended()
        if ended is not None:
            ended()

    def __del__(self) -> None:
        weak = getattr(self, "_lost", None)  # compiled autograd makes such objects without calling __init__
        lost = None if weak is None else weak()
        if lost is not None:
            lost()
