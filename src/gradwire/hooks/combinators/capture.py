"""`capture`: whether a hook's reductions are recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.composite import Reduce, Wrapped
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.state import held


@dataclass(frozen=True, slots=True, repr=False)
class Capture(Wrapped):
    enabled: bool
    keyed: list[CommHook] = field(compare=False)  # those in it that state which of their reductions are alike

    @property
    def passes_nonfinite(self) -> bool:
        return self.inner.passes_nonfinite

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return (yield from reduce(grad, state, turn))

    def capture_key(self, turn: Turn) -> Any:
        keys = [hook.capture_key(turn) for hook in self.keyed]
        return tuple(keys) if self.enabled and None not in keys else None

    def __repr__(self) -> str:
        return f"capture({self.inner!r}, enabled={self.enabled})"


def _find(hook: Any, wanted: Callable[[CommHook], bool], depth: int = 8) -> list[CommHook]:
    if isinstance(hook, CommHook) and wanted(hook):
        return [hook]
    walks = depth > 0 and isinstance(hook, (CommHook, dict, list, tuple)) and type(hook) is not Capture
    return [found for part in (held(hook) if walks else ()) for found in _find(part, wanted, depth - 1)]


def _is_silent(hook: CommHook) -> bool:
    """Whether it is a user's, and does not state which of its reductions are alike."""
    return not type(hook).__module__.startswith("gradwire.") and type(hook).capture_key is CommHook.capture_key


def capture(hook: CommHook, *, enabled: bool = True) -> CommHook:
    """Record a hook of your own as CUDA graphs, or (`enabled=False`) do not record one of gradwire's.

    A captured hook takes the host one launch between two collectives. `reduce_scatter_mean`, `quantize`, `sign`, `top_k`,
    `chunked_top_k`, `random_k`, `power_sgd`, `dgc` and `decoupled_momentum` are captured, also inside `error_feedback`,
    `after`, `every`, `partition`, `masked` and `by_size`. For a hook of your own, `capture` states that `reduce` does the same
    in every step: the same kernels and collectives on tensors of the same sizes, with state changed in place and no tensor read
    on the host. A read, another size or a new tensor in the state is noticed: a warning names it, and the hook runs eagerly.
    What `turn.step` or the host's random numbers decide, or Python does besides, is not: it would be as in the first steps. Put
    it into the key that `CommHook.capture_key` returns, which is enough without `capture`, or on the device by
    `turn.on_device`; `testing.check_hook` tests both.

    Meanwhile, in one of the first steps, torch refuses other threads random numbers from the device's default generator: give them
    a `torch.Generator` of their own, or set GRADWIRE_CAPTURE=0 before gradwire is imported, which turns capturing off.

    >>> from gradwire.hooks import quantize
    >>> capture(quantize(bits=8)) == quantize(bits=8)
    True
    >>> capture(quantize(bits=8), enabled=False).capture_key(None) is None
    True
    """
    if not isinstance(hook, CommHook):
        raise UsageTypeError(
            f"capture({hook!r}): `hook` must be a CommHook. Apply it to the inner hook: chain(stage, capture(hook))."
        )
    if not enabled:
        return hook if isinstance(hook, OuterHook) else Capture(hook, enabled, [])
    if _is_silent(hook):
        return Capture(hook, enabled, _find(hook, lambda inside: not _is_silent(inside)))
    for own in _find(hook, _is_silent):
        raise UsageError(f"capture({hook!r}): {own!r} inside is not gradwire's. Apply it to that: capture({own!r}).")
    return hook
