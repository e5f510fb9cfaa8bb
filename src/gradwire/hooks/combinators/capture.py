"""`capture`: whether a hook's reductions are recorded as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradwire.errors import UsageTypeError
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.state import held


@dataclass(frozen=True, slots=True, repr=False)
class Capture(Wrapped):
    enabled: bool
    keyed: list[CommHook] = field(compare=False)
    """The hook, or those in it, that state which of their reductions are alike."""

    @property
    def passes_nonfinite(self) -> bool:
        return self.inner.passes_nonfinite

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return (yield from self.inner.reduce(grad, state, turn))

    def capture_key(self, turn: Turn) -> Any:
        keys = [hook.capture_key(turn) for hook in self.keyed]
        return tuple(keys) if self.enabled and None not in keys else None

    def __repr__(self) -> str:
        return f"capture({self.inner!r}, enabled={self.enabled})"


def _keyed(hook: Any, depth: int = 4) -> list[CommHook]:
    if isinstance(hook, CommHook) and (_is_ours(hook) or type(hook).capture_key is not CommHook.capture_key):
        return [hook]
    return [found for part in held(hook) for found in _keyed(part, depth - 1)] if depth else []


def _is_ours(hook: CommHook) -> bool:
    return type(hook).__module__.startswith("gradwire.")


def capture(hook: CommHook, *, enabled: bool = True) -> CommHook:
    """Record a hook of your own as CUDA graphs, or (`enabled=False`) do not record one of gradwire's.

    On CUDA a hook of many small kernels takes more time on the host than on the device. A captured one takes one launch between two
    collectives, and more memory. gradwire's hooks are captured where that is possible (not with random numbers, nor with sizes that
    change), and `capture` returns them as they are. For a hook of your own it states that `reduce` does the same in every step: the
    same kernels and collectives, on tensors of the same sizes, with state changed in place and no tensor read on the host. If not,
    a warning names the reason, and it runs eagerly. What depends on `turn.step` can be in the key that `CommHook.capture_key`
    returns; hooks of gradwire's inside yours are asked for theirs.

    While a hook is captured, in one of its first steps, no other thread may draw random numbers from the device's default
    generator: torch raises there. Give such a thread a `torch.Generator` of its own, or set GRADWIRE_CAPTURE=0 before gradwire is
    imported, which turns capturing off.

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
    return hook if isinstance(hook, OuterHook) or (enabled and _is_ours(hook)) else Capture(hook, enabled, _keyed(hook))
