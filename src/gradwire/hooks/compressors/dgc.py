"""Deep Gradient Compression: top-k with momentum correction, factor masking, local clipping and a warm-up. (arXiv 1712.01887)"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.composite import Composite
from gradwire.hooks.compressors.sparse import VALUES, Pairs, SendsPairs, exchange, share_of
from gradwire.hooks.numerics.elementwise import clip_norms_, count, drop_nonfinite_, real
from gradwire.hooks.numerics.select import largest

START = 0.25
"""The ratio in the first step of a warm-up, as in the paper."""


@dataclass(frozen=True, slots=True, repr=False)
class DGC(SendsPairs, Composite):
    ratio: float
    momentum: float
    warmup_steps: int
    clip: float | None
    values: torch.dtype | None

    made_by = "dgc"
    collectives = 1
    traits = Trait.REMEMBERS
    tensors = ("velocity", "unsent")
    """u of the paper, the momentum of this rank's gradients, and v, the sum of velocities that were not sent yet."""
    owes = ("unsent",)
    """The velocity itself is momentum: it ends with the hook, and with its rank."""

    def ratio_at(self, step: int) -> float:
        """The ratio at a step: it decreases from a quarter to `ratio`, by the same factor in each step of the warm-up."""
        if step >= self.warmup_steps or self.ratio >= START:
            return self.ratio
        return START * math.pow(self.ratio / START, step / self.warmup_steps)

    def reduce(self, grad: Tensor, state: dict[str, Any], turn: Turn) -> Reduction:
        """Accumulate, select, clear what was selected, gather, add."""
        u, v = real(state["velocity"]), real(state["unsent"])
        g = real(grad).to(u.dtype)
        if self.clip is not None:
            # The sum over n ranks of gradients of norm c / sqrt(n) has norm c, if they point in different directions.
            g = g.clone()
            clip_norms_(g, turn.spec, self.clip / math.sqrt(turn.world_size))
        u.mul_(self.momentum).add_(g)
        v.add_(u)
        form = self.form(turn.spec)
        indices = largest(v, share_of(v.numel(), ratio=self.ratio_at(turn.step)))
        wanted = v[indices]
        values = wanted.to(form.values)
        v.index_copy_(0, indices, wanted - values.to(v.dtype))  # zero, except for rounding
        u.index_fill_(0, indices, 0)
        drop_nonfinite_(u)
        drop_nonfinite_(v)
        return (yield from exchange(Pairs(indices.to(form.indices), values), form, turn))

    def capture_key(self, turn: Turn) -> int | None:
        return 0 if turn.step >= self.warmup_steps else None

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return (world_size - 1) * share_of(count(spec), ratio=self.ratio_at(step)) * self.form(spec).nbytes


@checks_arguments(ratio="(0, 1]", momentum="[0, 1)", warmup_steps="[0, inf)", clip="(0, inf)", values=VALUES)
def dgc(
    ratio: float,
    *,
    momentum: float = 0.9,
    warmup_steps: int = 0,
    clip: float | None = None,
    values: torch.dtype | None = None,
) -> CommHook:
    """Deep Gradient Compression: send the largest `ratio` of the accumulated gradient, and keep the rest. (arXiv 1712.01887)

    The momentum is applied to this rank's gradients before they accumulate (momentum correction), and reset for elements that were
    just sent (factor masking): use SGD without momentum as the optimizer. During `warmup_steps` the ratio decreases from a quarter
    to `ratio`. Each rank clips the norm of each parameter's gradient to clip / sqrt(n), where the paper clips that of the whole
    model. Non-finite values are sent once and not kept.

    On the wire: (n - 1) k (4 + itemsize(values)) bytes for n ranks and k = ratio * numel, rounded up. Memory: two tensors of the
    bucket's size, in float32 for 16-bit gradients.

    >>> from gradwire.testing import simulate
    >>> first = simulate(dgc(0.5), [torch.tensor([1.0, 2.0])])
    >>> first.reduced[0].value
    tensor([0., 2.])
    >>> simulate(dgc(0.5), [torch.tensor([1.0, 2.0])], states=first.states, step=1).reduced[0].value
    tensor([2.9000, 0.0000])
    """
    return DGC(ratio, momentum, warmup_steps, clip, values)
