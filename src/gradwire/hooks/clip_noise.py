"""Stages that change this rank's gradient on purpose before it is sent: clipping and noise.

They have the trait `DISTORTS`: error feedback around them would undo the change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage, checks_arguments
from gradwire.hooks.base import Reduction, Stage, Trait, Turn
from gradwire.hooks.composite import Reduce, Wrapped
from gradwire.hooks.numerics.elementwise import clip_norms_, real, wide
from gradwire.hooks.numerics.rng import generator


@dataclass(frozen=True, slots=True, repr=False)
class Clip(Wrapped):
    norm: float | None
    value: float | None

    made_by = "clip"
    dense_only = True
    adds = Trait.DISTORTS

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        clipped = grad if turn.donated else grad.clone()
        flat = real(clipped)
        if self.value is not None:
            # An infinite element stays infinite: clipping must not hide that something is wrong.
            flat.copy_(torch.where(flat.isinf(), flat, flat.clamp(-self.value, self.value)))
        elif self.norm is not None:
            clip_norms_(flat, turn.spec, self.norm)
        return (yield from reduce(clipped, state, turn))


@checks_arguments(norm="(0, inf)", value="(0, inf)")
def clip(*, norm: float | None = None, value: float | None = None) -> Stage:
    """Clip this rank's gradient before it is sent: each parameter's norm to at most `norm`, or each element to at most `value`.

    The norm is that of each parameter, because a bucket is sent before the other gradients exist: that of the whole gradient is at
    most norm * sqrt(P) for P parameters. NaN and infinite elements are not hidden: clipped by norm, the parameter becomes NaN; by
    value, they stay. Put error feedback to the right of it. On the wire: as the inner hook.

    >>> from gradwire.hooks import chain, mean
    >>> from gradwire.testing import simulate
    >>> simulate(chain(clip(norm=1.0), mean()), [torch.tensor([3.0, 4.0])]).reduced[0].value
    tensor([0.6000, 0.8000])
    """
    if (norm is None) == (value is None):
        raise UsageError(f"clip(norm={norm}, value={value}): no bound given. Pass one of norm and value.")
    call = f"clip(norm={norm})" if value is None else f"clip(value={value})"
    return NamedStage(call, lambda inner: Clip(inner, norm, value))


@dataclass(frozen=True, slots=True, repr=False)
class AddNoise(Wrapped):
    std: float
    seed: int

    made_by = "add_noise"
    dense_only = True
    adds = Trait.DISTORTS

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        flat = real(grad)
        rng = generator(self.seed, turn, shared=False)
        noise = torch.randn(flat.numel(), generator=rng, dtype=wide(flat.dtype), device=flat.device)
        noisy = noise.mul_(self.std).add_(flat).to(flat.dtype)
        noisy = torch.view_as_complex(noisy.view(-1, 2)) if grad.is_complex() else noisy
        # Noise stages to its right with the same seed draw different noise.
        return (yield from reduce(noisy, state, replace(turn, path=f"{turn.path}/noise")))


@checks_arguments(std="(0, inf)")
def add_noise(*, std: float, seed: int = 0) -> Stage:
    """Add Gaussian noise of this standard deviation to each element, independent on each rank. (arXiv 1511.06807, 1607.00133)

    The average then has noise of std / sqrt(n) for n ranks. With `clip(norm=c)` to its left a rank sends the output of a Gaussian
    mechanism with a sensitivity of c * sqrt(P) for P parameters. Not differential privacy by itself: there is no accounting, and
    who has the seed can subtract the noise. On the wire: as the inner hook.
    """
    return NamedStage(f"add_noise(std={std})", lambda inner: AddNoise(inner, std, seed))
