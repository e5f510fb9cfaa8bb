"""Deep Gradient Compression: top-k with momentum correction, factor masking, local clipping and a warm-up. (arXiv 1712.01887)"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_numbers
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.compressors.sparse import (
    ALONE,
    Format,
    Pairs,
    check_bucket,
    check_ratio,
    check_values,
    exchange,
    share_of,
    value_dtype,
)
from gradwire.hooks.numerics.elementwise import clip_norms_, count, drop_nonfinite_, real, wide
from gradwire.hooks.numerics.select import largest
from gradwire.hooks.state import bundle, join_flat, pick, split_flat

START = 0.25
"""The ratio in the first step of a warm-up, as in the paper."""


@dataclass(slots=True)
class _Accumulated:
    velocity: Tensor
    """u of the paper: momentum of this rank's gradients."""
    unsent: Tensor
    """v of the paper: the sum of velocities that were not sent yet."""


@dataclass(frozen=True, slots=True)
class DGC(CommHook):
    """The hook of `dgc`."""

    ratio: float
    momentum: float
    warmup_steps: int
    clip: float | None
    values: torch.dtype | None

    collectives = 1
    dense_only = True
    traits = Trait.REMEMBERS
    alone = ALONE

    def check(self, spec: BucketSpec) -> None:
        check_bucket(self, spec, self.values)

    def init(self, spec: BucketSpec) -> Any:
        return self.load({}, spec)

    def ratio_at(self, step: int) -> float:
        """The ratio at a step: it decreases from a quarter to `ratio`, by the same factor in each step of the warm-up."""
        if step >= self.warmup_steps or self.ratio >= START:
            return self.ratio
        return START * math.pow(self.ratio / START, step / self.warmup_steps)

    def reduce(self, grad: Tensor, state: _Accumulated, turn: Turn) -> Reduction:
        """Accumulate, select, clear what was selected, gather, add."""
        self.refuse_sparse(grad, turn.spec)
        u, v = real(state.velocity), real(state.unsent)
        g = real(grad).to(u.dtype)
        if self.clip is not None:
            # The sum over n ranks of gradients of norm c / sqrt(n) has norm c, if they point in different directions.
            g = g.clone()
            clip_norms_(g, turn.spec, self.clip / math.sqrt(turn.world_size))
        u.mul_(self.momentum).add_(g)
        v.add_(u)
        form = Format(value_dtype(turn.spec, self.values))
        form.check(v.numel(), self)
        indices = largest(v, share_of(v.numel(), ratio=self.ratio_at(turn.step)))
        wanted = v[indices]
        values = wanted.to(form.values)
        v[indices] = wanted - values.to(v.dtype)  # zero, except for rounding
        u[indices] = 0
        drop_nonfinite_(u)
        drop_nonfinite_(v)
        value, sent = yield from exchange(Pairs(indices.to(form.indices), values), form, turn)
        return Reduced(value, sent)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        k = share_of(count(spec), ratio=self.ratio_at(step))
        return (world_size - 1) * k * Format(value_dtype(spec, self.values)).nbytes

    def save(self, state: _Accumulated, spec: BucketSpec) -> dict[str, Any]:
        return bundle(velocity=split_flat(state.velocity, spec), unsent=split_flat(state.unsent, spec))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        dtype = wide(spec.dtype)
        return _Accumulated(
            join_flat(pick(saved, "velocity"), spec, dtype=dtype), join_flat(pick(saved, "unsent"), spec, dtype=dtype)
        )

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The accumulated velocities. The velocity itself is momentum, which ends with the hook."""
        return pick(saved, "unsent")

    def __repr__(self) -> str:
        return (
            f"dgc(ratio={self.ratio}, momentum={self.momentum}, warmup_steps={self.warmup_steps}, clip={self.clip}, "
            f"values={self.values})"
        )


@checks_numbers
def dgc(
    ratio: float,
    *,
    momentum: float = 0.9,
    warmup_steps: int = 0,
    clip: float | None = None,
    values: torch.dtype | None = None,
) -> CommHook:
    """Deep Gradient Compression: send the largest `ratio` of the accumulated gradient, and keep the rest. (arXiv 1712.01887)

    The momentum is applied here, to this rank's gradients before they accumulate (momentum correction), and reset for elements
    that were just sent (factor masking): use SGD without momentum as the optimizer. During `warmup_steps` the ratio decreases from
    a quarter to `ratio`. `clip` bounds the norm of each parameter's gradient over all ranks: each rank clips its own to clip /
    sqrt(n), where the paper clips that of the whole model. Non-finite values are sent once and not kept.

    On the wire: (n - 1) k (4 + itemsize(values)) bytes for n ranks and k = ratio * numel, rounded up. Memory: two tensors of the
    bucket's size, in float32 for 16-bit gradients.

    >>> from gradwire.testing import simulate
    >>> first = simulate(dgc(0.5), [torch.tensor([1.0, 2.0])])
    >>> first.reduced[0].value
    tensor([0., 2.])
    >>> simulate(dgc(0.5), [torch.tensor([1.0, 2.0])], states=first.states, step=1).reduced[0].value
    tensor([2.9000, 0.0000])
    """
    what = f"dgc({ratio}, momentum={momentum}, warmup_steps={warmup_steps}, clip={clip})"
    check_ratio(what, ratio)
    if not 0 <= momentum < 1:
        raise UsageError(f"{what}: momentum must be at least 0 and below 1, or velocities grow without bound.")
    if warmup_steps < 0:
        raise UsageError(f"{what}: warmup_steps is negative. Pass the length of the warm-up, 0 for none.")
    if clip is not None and not (clip > 0 and math.isfinite(clip)):
        raise UsageError(f"{what}: clip is a norm. Pass a finite number above 0, or None.")
    check_values(what, values)
    return DGC(ratio, momentum, warmup_steps, clip, values)
