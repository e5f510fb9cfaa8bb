"""`capture`: whether a hook's reductions are recorded as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.errors import UsageTypeError
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.periodic.base import OuterHook


@dataclass(frozen=True, slots=True, repr=False)
class Capture(Wrapped):
    enabled: bool

    @property
    def passes_nonfinite(self) -> bool:
        return self.inner.passes_nonfinite

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return (yield from self.inner.reduce(grad, state, turn))

    def capture_key(self, turn: Turn) -> int | None:
        return 0 if self.enabled else None

    def __repr__(self) -> str:
        return f"capture({self.inner!r}, enabled={self.enabled})"


def capture(hook: CommHook, *, enabled: bool = True) -> CommHook:
    """Record a hook of your own as CUDA graphs, or (`enabled=False`) do not record one of gradwire's.

    On CUDA a hook of many small kernels takes more time on the host than on the device. A captured one takes one launch between two
    collectives, and more memory. Nothing is captured unless GRADWIRE_CAPTURE=1 is set when gradwire is imported. Then gradwire's
    hooks are, where that is possible (not with random numbers, nor with sizes that change), and `capture` returns them as they are.
    For a hook of your own it states that `reduce` does the same in every step: the same kernels and collectives, on tensors of the
    same sizes, with state changed in place and no tensor read on the host. Otherwise a warning names the reason, and it runs
    eagerly. What depends on `turn.step` can be in the key that `CommHook.capture_key` returns, instead of this function.

    >>> from gradwire.hooks import mean, quantize
    >>> capture(quantize(bits=8)) == quantize(bits=8)
    True
    >>> capture(mean(), enabled=False)
    capture(mean(), enabled=False)
    """
    if not isinstance(hook, CommHook):
        raise UsageTypeError(
            f"capture({hook!r}): `hook` must be a CommHook. Apply it to the inner hook: chain(stage, capture(hook))."
        )
    ours = type(hook).__module__.startswith("gradwire.")
    return hook if isinstance(hook, OuterHook) or (enabled and ours) else Capture(hook, enabled)
