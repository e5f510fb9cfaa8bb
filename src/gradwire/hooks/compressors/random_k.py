"""`random_k`: the same random elements on every rank, so that any dense hook can carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.compressors.sparse import check_ratio, share_of
from gradwire.hooks.numerics.elementwise import check_dense, refuse_sparse
from gradwire.hooks.numerics.rng import key, noise
from gradwire.hooks.shaping import Clip


@dataclass(frozen=True, slots=True)
class RandomK(Wrapped):
    """See `random_k`."""

    ratio: float
    seed: int

    def __post_init__(self) -> None:
        # What it keeps of one element it would add to another in the next step. What is not saved is no state, but a plan.
        probe = self.inside(BucketSpec(0, ("probe",), ((8,),), ((1,),), torch.float32, torch.device("cpu")))
        keeps = self.inner.traits & (Trait.REMEMBERS | Trait.CONTINUES | Trait.LOCAL)
        if keeps or self.inner.save(self.inner.init(probe), probe):
            raise UsageError(
                f"random_k(ratio={self.ratio}) around {self.inner!r}: the hook inside keeps state from step to step, but its "
                "bucket holds other elements in every step. Put error_feedback() to the left of random_k, and a hook without "
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

    def check(self, spec: BucketSpec) -> None:
        """Dense, and what the hook inside asks for."""
        check_dense(f"random_k(ratio={self.ratio})", spec)
        self.inner.check(self.inside(spec))

    def inside(self, spec: BucketSpec) -> BucketSpec:
        """A bucket of k elements that belong to no parameter."""
        k = share_of(spec.numel, ratio=self.ratio)
        return replace(spec, names=("random_k",), shapes=((k,),), strides=((1,),))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Take k elements out, reduce them, put them back among zeros."""
        refuse_sparse(grad, f"random_k(ratio={self.ratio})", turn.spec)
        places = self._places(turn)
        # Its bucket has no parameters that would tell it apart.
        inside = replace(turn, spec=self.inside(turn.spec), path="/".join([turn.path, *turn.spec.names[:1]]))
        value, sent = yield from self.inner.reduce(grad[places], state, inside)
        return Reduced(
            torch.zeros_like(grad).index_copy_(0, places, value.view(-1)),
            grad if turn.donated else torch.zeros_like(grad).index_copy_(0, places, sent.view(-1)),
        )

    def _places(self, turn: Turn) -> Tensor:
        """One place in each of k stretches of the bucket, as long as each other to one element: ascending, none twice."""
        numel, k = turn.spec.numel, share_of(turn.spec.numel, ratio=self.ratio)
        device = turn.spec.device
        bounds = torch.arange(k + 1, device=device) * numel // max(k, 1)
        # Not from a generator of the device: those of other models draw other numbers, and ranks would choose other elements.
        chance = noise(torch.arange(k, device=device), key(self.seed, turn, shared=True) & 0x7FFFFFFF)
        return bounds[:-1] + (chance.double() * bounds.diff()).long()

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        """Nothing was kept."""
        return self.init(spec)

    @property
    def structure(self) -> str:
        """No state."""
        return ""

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Nothing."""
        return {}

    def __repr__(self) -> str:
        return f"random_k(ratio={self.ratio}, seed={self.seed}) > {self.inner!r}"


def random_k(ratio: float, *, seed: int = 0) -> Stage:
    """Reduce only a random `ratio`-th part of the bucket, the same on every rank, by the hook inside. (arXiv 1809.07599)

    The seed tells every rank which elements it is this time, so no places travel, and what is left is a shorter dense bucket:
    any hook without state can carry it, such as `chain(random_k(0.01), cast(torch.bfloat16), mean())`. The bucket is cut into k
    = ratio * numel stretches and one element taken of each, so that every element has the same chance. The others' gradients
    are zero in that step; put `error_feedback()` around it to have them sent later.

    On the wire: as the hook inside for k elements; it does not grow with the ranks, as `top_k` does.

    >>> from gradwire.hooks import chain, mean
    >>> from gradwire.testing import simulate
    >>> done = simulate(chain(random_k(0.5), mean()), [torch.ones(4), torch.ones(4)])
    >>> done.reduced[0].value.sum(), done.nbytes
    (tensor(2.), 8)
    """
    check_ratio(f"random_k({ratio})", ratio)

    def stage(inner: CommHook) -> CommHook:
        return RandomK(inner, ratio, seed)

    return NamedStage(f"random_k({ratio})", stage)
