"""Stages that change this rank's gradient on purpose before it is sent: clipping, and noise.

They distort: what they took away or added is wanted so, and must not be made up for by error feedback around them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage
from gradwire.hooks.base import CommHook, Reduction, Stage, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.numerics.elementwise import check_dense, clip_norms_, real, refuse_sparse, wide
from gradwire.hooks.numerics.rng import generator


@dataclass(frozen=True, slots=True)
class Clip(Wrapped):
    """See `clip`."""

    norm: float | None
    value: float | None

    @property
    def traits(self) -> Trait:
        """It changes gradients on purpose; and those of the hook inside."""
        return self.inner.traits | Trait.DISTORTS

    def check(self, spec: BucketSpec) -> None:
        """Dense, and what the hook inside asks for."""
        check_dense(self._own(), spec)
        self.inner.check(self.inside(spec))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Clip, then as the hook inside."""
        refuse_sparse(grad, self._own(), turn.spec)
        clipped = grad if turn.donated else grad.clone()
        flat = real(clipped)
        if self.value is not None:
            # An infinite element stays infinite: it says that something is wrong, and a clip must not hide that.
            flat.copy_(torch.where(flat.isinf(), flat, flat.clamp(-self.value, self.value)))
        elif self.norm is not None:
            clip_norms_(flat, turn.spec, self.norm)
        return (yield from self.inner.reduce(clipped, state, turn))

    def _own(self) -> str:
        return f"clip(norm={self.norm})" if self.norm is not None else f"clip(value={self.value})"

    def __repr__(self) -> str:
        return f"{self._own()} > {self.inner!r}"


def clip(*, norm: float | None = None, value: float | None = None) -> Stage:
    """Clip this rank's gradient before it is sent: each parameter's norm to at most `norm`, or each element to at most `value`.

    The norm is that of each parameter, not of the whole model: a bucket is on its way before the other gradients are there, and
    which parameters share a bucket changes after the first step. So the whole gradient's norm is at most norm * sqrt(P), P being
    the number of parameters. One rank with a wild batch then cannot spoil the average. To clip by the norm of the whole model, use
    torch.nn.utils.clip_grad_norm_ on the average, before the optimizer's step.

    NaN and infinite elements are not hidden: clipped by norm, the parameter becomes NaN; by value, they stay. Error feedback goes
    inside, to the right of it: around it, it would send in the next step what was cut. On the wire: as the hook inside.

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

    def stage(inner: CommHook) -> CommHook:
        return Clip(inner, norm, value)

    return NamedStage(f"clip(norm={norm})" if value is None else f"clip(value={value})", stage)


@dataclass(frozen=True, slots=True)
class AddNoise(Wrapped):
    """See `add_noise`."""

    std: float
    seed: int

    @property
    def traits(self) -> Trait:
        """It changes gradients on purpose; and those of the hook inside."""
        return self.inner.traits | Trait.DISTORTS

    def check(self, spec: BucketSpec) -> None:
        """Dense, and what the hook inside asks for."""
        check_dense(f"add_noise(std={self.std})", spec)
        self.inner.check(self.inside(spec))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Add noise, then as the hook inside."""
        refuse_sparse(grad, f"add_noise(std={self.std})", turn.spec)
        flat = real(grad)
        chance = generator(self.seed, turn, shared=False)
        noise = torch.randn(flat.numel(), generator=chance, dtype=wide(flat.dtype), device=flat.device)
        noisy = noise.mul_(self.std).add_(flat).to(flat.dtype)
        noisy = torch.view_as_complex(noisy.view(-1, 2)) if grad.is_complex() else noisy
        # Noise to the right of it, with the same seed, is other noise.
        return (yield from self.inner.reduce(noisy, state, replace(turn, path=f"{turn.path}/noise")))

    def __repr__(self) -> str:
        return f"add_noise(std={self.std}, seed={self.seed}) > {self.inner!r}"


def add_noise(*, std: float, seed: int = 0) -> Stage:
    """Add Gaussian noise of this standard deviation to each element, other noise on each rank. (arXiv 1511.06807, 1607.00133)

    The average then has noise of std / sqrt(n), n being the ranks. `sent` has the noise in it, also on ranks that have run out of
    inputs. On the wire: as the hook inside.

    With `clip(norm=c)` to its left, `chain(clip(norm=1.0), add_noise(std=0.5), mean())`, what a rank sends is a Gaussian mechanism
    with a sensitivity of c * sqrt(P), P being the number of parameters, each of which is clipped by itself. That alone is no
    differential privacy: nothing here accounts for it, and the noise comes from a seed, so that a run can be repeated: anyone who
    knows the seed can subtract it.
    """
    if not (std > 0 and math.isfinite(std)):
        raise UsageError(f"add_noise(std={std}): the standard deviation must be finite and above 0.")

    def stage(inner: CommHook) -> CommHook:
        return AddNoise(inner, std, seed)

    return NamedStage(f"add_noise(std={std})", stage)
