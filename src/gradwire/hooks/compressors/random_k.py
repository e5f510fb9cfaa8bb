"""`random_k`: the same random elements on every rank, so that any dense hook can reduce them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage, checks_numbers
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.clip_noise import Clip
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.compressors.sparse import check_ratio, share_of
from gradwire.hooks.numerics.rng import key, noise


@dataclass(frozen=True, slots=True)
class RandomK(Wrapped):
    """The stage of `random_k`."""

    ratio: float
    seed: int

    dense_only = True

    def __post_init__(self) -> None:
        # A residual of one element would be added to another in the next step. What is not saved is not state but a plan.
        probe = self.inside(BucketSpec(0, ("probe",), ((8,),), ((1,),), torch.float32, torch.device("cpu")))
        keeps = self.inner.traits & (Trait.REMEMBERS | Trait.CONTINUES | Trait.LOCAL)
        if keeps or self.inner.save(self.inner.init(probe), probe):
            raise UsageError(
                f"random_k(ratio={self.ratio}) around {self.inner!r}: the inner hook keeps state from step to step, but its "
                "bucket holds different elements in every step. Put error_feedback() to the left of random_k, and a hook without "
                "state, such as mean(), inside."
            )

        part: CommHook = self.inner
        while isinstance(part, Wrapped):
            if isinstance(part, Clip) and part.norm is not None:
                raise UsageError(
                    f"random_k(ratio={self.ratio}) around {self.inner!r}: clip(norm=...) bounds the norm of each parameter, and "
                    "the random elements belong to no parameter. Put clip() to the left of random_k()."
                )
            part = part.inner

    def inside(self, spec: BucketSpec) -> BucketSpec:
        """A bucket of k elements that belong to no parameter."""
        k = share_of(spec.numel, ratio=self.ratio)
        return replace(spec, names=("random_k",), shapes=((k,),), strides=((1,),))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self.refuse_sparse(grad, turn.spec)
        indices = self._indices(turn)
        # The inner bucket has no parameter names to tell it apart by.
        inside = replace(turn, spec=self.inside(turn.spec), path="/".join([turn.path, *turn.spec.names[:1]]))
        value, sent = yield from self.inner.reduce(grad[indices], state, inside)
        return Reduced(
            torch.zeros_like(grad).index_copy_(0, indices, value.view(-1)),
            grad if turn.donated else torch.zeros_like(grad).index_copy_(0, indices, sent.view(-1)),
        )

    def _indices(self, turn: Turn) -> Tensor:
        """One index in each of k ranges of the bucket of almost equal length: ascending and unique."""
        numel, k = turn.spec.numel, share_of(turn.spec.numel, ratio=self.ratio)
        device = turn.spec.device
        bounds = torch.arange(k + 1, device=device) * numel // max(k, 1)
        # Not from a generator of the device: those of other models draw other numbers, and ranks would choose other elements.
        uniform = noise(torch.arange(k, device=device), key(self.seed, turn, shared=True) & 0x7FFFFFFF)
        return bounds[:-1] + (uniform.double() * bounds.diff()).long()

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return {}

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        return self.init(spec)

    @property
    def structure(self) -> str:
        return ""

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        return {}

    def __repr__(self) -> str:
        return f"random_k(ratio={self.ratio}, seed={self.seed}) > {self.inner!r}"


@checks_numbers
def random_k(ratio: float, *, seed: int = 0) -> Stage:
    """Reduce only a random part of the bucket, the same on every rank, with the inner hook. (arXiv 1809.07599)

    Every rank derives the elements from the seed, so no indices are sent, and any hook without state can reduce them, such as
    `chain(random_k(0.01), cast(torch.bfloat16), mean())`. One element is drawn from each of k = ratio * numel ranges. The gradients
    of the others are zero in that step; put `error_feedback()` around it to send them later.

    On the wire: as the inner hook for k elements; unlike `top_k` it does not grow with the number of ranks.

    >>> from gradwire.hooks import chain, mean
    >>> from gradwire.testing import simulate
    >>> done = simulate(chain(random_k(0.5), mean()), [torch.ones(4), torch.ones(4)])
    >>> done.reduced[0].value.sum(), done.nbytes
    (tensor(2.), 8)
    """
    check_ratio(f"random_k({ratio})", ratio)
    return NamedStage(f"random_k({ratio})", lambda inner: RandomK(inner, ratio, seed))
