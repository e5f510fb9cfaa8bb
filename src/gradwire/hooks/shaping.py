"""Stages that change this rank's gradient on purpose before it is sent: clipping, and noise.

They distort: what they took away or added is wanted so, and must not be made up for by error feedback around them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.base import CommHook, Reduction, Stage, Trait, Turn, Wrapped
from gradwire.hooks.chance import generator
from gradwire.hooks.elements import length, real, refuse_sparse, wide


@dataclass(frozen=True, slots=True)
class Clip(Wrapped):
    """See `clip`."""

    norm: float | None
    value: float | None
    per_parameter: bool

    @property
    def traits(self) -> Trait:  # type: ignore[override]
        """It changes gradients on purpose; and those of the hook inside."""
        return self.inner.traits | Trait.DISTORTS

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Clip, then as the hook inside."""
        refuse_sparse(grad, self._own(), turn.spec)
        clipped = grad if turn.donated else grad.clone()
        flat = real(clipped)
        if self.value is not None:
            # An infinite element stays infinite: it says that something is wrong, and a clip must not hide that.
            flat.copy_(torch.where(flat.isinf(), flat, flat.clamp(-self.value, self.value)))
        elif self.norm is not None:
            parts = clipped.split(turn.spec.numels) if self.per_parameter else (clipped,)
            for part in map(real, parts):
                part.mul_((self.norm / length(part)).clamp(max=1))  # NaN or infinity make all of it NaN
        return (yield from self.inner.reduce(clipped, state, turn))

    def _own(self) -> str:
        bound = f"norm={self.norm}" if self.norm is not None else f"value={self.value}"
        return f"clip({bound}{', per_parameter=True' if self.per_parameter else ''})"

    def __repr__(self) -> str:
        return f"{self._own()} > {self.inner!r}"


def clip(*, norm: float | None = None, value: float | None = None, per_parameter: bool = False) -> Stage:
    """Clip this rank's gradient before it is sent: its norm to at most `norm`, or each element to at most `value`.

    The norm is that of the bucket, not of the whole model: a bucket is on its way before the others are full. With
    `per_parameter` it is that of each parameter, which does not depend on how buckets are cut. One rank with a wild batch then
    cannot spoil the average; to clip the average itself, use torch.nn.utils.clip_grad_norm_ before the optimizer's step.

    NaN and infinite elements are not hidden: clipped by norm, all becomes NaN; by value, they stay. Error feedback goes inside,
    to the right of it: around it, it would send in the next step what was cut. On the wire: as the hook inside.

    >>> from gradwire.hooks import chain, mean
    >>> from gradwire.testing import simulate
    >>> simulate(chain(clip(norm=1.0), mean()), [torch.tensor([3.0, 4.0])]).reduced[0].value
    tensor([0.6000, 0.8000])
    """
    what = f"clip(norm={norm}, value={value})"
    if (norm is None) == (value is None):
        raise UsageError(f"{what}: what is to be bounded? Pass one of norm and value.")
    bound = norm if norm is not None else value
    if bound is None or not (bound > 0 and math.isfinite(bound)):
        raise UsageError(f"{what}: the bound must be finite and above 0.")
    if per_parameter and norm is None:
        raise UsageError(f"{what}: per_parameter says whose norm is meant, and elements have none. Leave it out.")

    def stage(inner: CommHook) -> CommHook:
        return Clip(inner, norm, value, per_parameter)

    return stage


@dataclass(frozen=True, slots=True)
class AddNoise(Wrapped):
    """See `add_noise`."""

    std: float
    seed: int

    @property
    def traits(self) -> Trait:  # type: ignore[override]
        """It changes gradients on purpose; and those of the hook inside."""
        return self.inner.traits | Trait.DISTORTS

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Add noise, then as the hook inside."""
        refuse_sparse(grad, f"add_noise(std={self.std})", turn.spec)
        flat = real(grad)
        chance = generator(self.seed, turn, shared=False)
        noise = torch.randn(flat.numel(), generator=chance, dtype=wide(flat.dtype), device=flat.device)
        noisy = noise.mul_(self.std).add_(flat).to(flat.dtype)
        noisy = torch.view_as_complex(noisy.view(-1, 2)) if grad.is_complex() else noisy
        return (yield from self.inner.reduce(noisy, state, turn))

    def __repr__(self) -> str:
        return f"add_noise(std={self.std}, seed={self.seed}) > {self.inner!r}"


def add_noise(*, std: float, seed: int = 0) -> Stage:
    """Add Gaussian noise of this standard deviation to each element, other noise on each rank. (arXiv 1511.06807, 1607.00133)

    With `clip` to its left it is the mechanism of differentially private SGD, for ranks as the ones to be protected:
    `chain(clip(norm=1.0), add_noise(std=0.5), mean())`. The average then has noise of std / sqrt(n), n being the ranks. It keeps
    no account of what privacy is left, and its noise comes from a seed, so that a run can be repeated: who knows the
    seed can take the noise away. `sent` has the noise in it, also on ranks that have run out of inputs. On the wire: as the hook
    inside.
    """
    if not (std > 0 and math.isfinite(std)):
        raise UsageError(f"add_noise(std={std}): the standard deviation must be finite and above 0.")

    def stage(inner: CommHook) -> CommHook:
        return AddNoise(inner, std, seed)

    return stage
