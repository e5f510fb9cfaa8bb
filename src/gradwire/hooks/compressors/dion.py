"""`dion`: what ranks send with the optimizer `optim.Dion`: two thin matrices of each momentum instead of a gradient.

Ahn et al. 2025 (arXiv 2504.05295), with its letters: G is a gradient of m x n, M its momentum, P m x r, R and Q n x r. On rank i:

    B_i = M_i + G_i,  P = orthonormal(mean B_i Q),  R_i = B_i^T P,  R = mean R_i,  M_i = B_i - (1 - mu) P R_i^T,
    Q = the columns of R divided by their norm; and P Q^T is the direction of the optimizer's step.

Each line is linear in what differs between ranks, so the mean of all M_i is the momentum that one process would have on the mean
gradient, and P, R and Q are its own. A rank subtracts its own R_i, not R, so that its momentum stays near the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec, Slices
from gradwire.hooks.dense import MEAN
from gradwire.hooks.numerics.elementwise import drop_nonfinite_, wide
from gradwire.hooks.numerics.orthogonal import keep_directions, orthonormal
from gradwire.hooks.numerics.rng import named_generator
from gradwire.hooks.state import Owed, bundle, pick
from gradwire.optim import Dion


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter of two or more dimensions: the first by the rest."""

    place: int
    """Among the parameters of the bucket."""
    momentum: Tensor
    q: Tensor


@dataclass(frozen=True, slots=True, repr=False)
class LowRankMomentum(CommHook):
    rank: int
    mu: float
    seed: int

    made_by = "dion"
    dense_only = True
    traits = Trait.REMEMBERS | Trait.CONTINUES | Trait.MOMENTUM | Trait.MATRICES
    real_only = "the optimizer Dion is for real ones"

    def init(self, spec: BucketSpec) -> list[_Matrix]:
        return self.load({}, spec)

    def _ranks(self, spec: BucketSpec) -> dict[int, tuple[int, int, int]]:
        """m, n and r of each matrix, by the parameter's place in the bucket."""
        found = {}
        for place, (shape, numel) in enumerate(zip(spec.shapes, spec.numels, strict=True)):
            if len(shape) > 1 and numel:
                m, n = shape[0], numel // shape[0]
                found[place] = (m, n, min(self.rank, m, n))
        return found

    def _rest(self, spec: BucketSpec) -> Slices:
        """What is averaged as it is: vectors and scalars."""
        matrices = self._ranks(spec)
        ranges = zip(spec.offsets, spec.numels, strict=True)
        return Slices.of([one for place, one in enumerate(ranges) if place not in matrices])

    def reduce(self, grad: Tensor, state: list[_Matrix], turn: Turn) -> Reduction:
        if not state:
            return (yield from MEAN.reduce(grad, None, turn))
        Dion.hook_ran = True
        spec, rest, label = turn.spec, self._rest(turn.spec), f"bucket {turn.spec.index}"
        flat = grad.to(wide(grad.dtype))
        views = spec.views(flat)
        b = [one.momentum.add_(views[one.place].reshape(one.momentum.shape)) for one in state]

        products = [each @ one.q for each, one in zip(b, state, strict=True)]
        wire = torch.cat([rest.take(flat), *(each.flatten() for each in products)]).to(grad.dtype)
        yield all_reduce(wire, op=ReduceOp.AVG, label=f"{label}, P")
        dense, *products = wire.to(flat.dtype).split([rest.numel, *(each.numel() for each in products)])
        columns = [each.view(1, -1, one.q.shape[1]) for each, one in zip(products, state, strict=True)]
        p = [each[0] for each in orthonormal(columns)]

        wire = torch.cat([(each.mT @ basis).flatten() for each, basis in zip(b, p, strict=True)]).to(grad.dtype)
        mine = _like(wire.to(flat.dtype, copy=True), state)
        yield all_reduce(wire, op=ReduceOp.AVG, label=f"{label}, R")
        mean = _like(wire.to(flat.dtype).mul_(turn.share), state)

        value, sent = torch.empty_like(flat), torch.empty_like(flat)
        rest.put(value, dense * turn.share)
        rest.put(sent, rest.take(flat))
        outs, least = (spec.views(value), spec.views(sent)), 16 * torch.finfo(grad.dtype).eps
        for one, basis, own, r in zip(state, p, mine, mean, strict=True):
            drop_nonfinite_(one.momentum.addmm_(basis, own.mT, alpha=self.mu - 1))
            keep_directions([r.unsqueeze(0)], [one.q.unsqueeze(0)])
            length = r.norm(dim=0)
            # Zeros and rounding errors have no direction: they are not made as long as the others. NaN stays NaN.
            unit = torch.where(length > least * length.max(), 1 / length, 0)
            for out, factor in zip(outs, (r, own), strict=True):
                out[one.place].copy_((basis @ (factor * unit).mT).view(spec.shapes[one.place]))
        return Reduced(value.to(grad.dtype), sent.to(grad.dtype))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        if spec.sparse:
            return None
        numbers = self._rest(spec).numel + sum(r * (m + n) for m, n, r in self._ranks(spec).values())
        return 2 * (world_size - 1) / world_size * numbers * spec.dtype.itemsize

    def error(self, spec: BucketSpec) -> float:
        return CommHook.error(self, spec) * self.rank

    def save(self, state: list[_Matrix], spec: BucketSpec) -> dict[str, Any]:
        kinds = {key: {spec.names[one.place]: getattr(one, key).clone() for one in state} for key in ("momentum", "q")}
        return bundle(**kinds)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> list[_Matrix]:
        """What was saved, where its shape fits; else no momentum, and a Q from the seed and the parameter's name."""
        number, state = wide(spec.dtype), []
        for place, (m, n, r) in self._ranks(spec).items():
            name = spec.names[place]
            q = torch.nn.functional.normalize(
                torch.randn(n, r, generator=named_generator(self.seed, name), device="cpu"), dim=0
            )
            one = _Matrix(place, torch.zeros(m, n, dtype=number, device=spec.device), q.to(spec.device, number))
            for key, tensor in (("momentum", one.momentum), ("q", one.q)):
                old = pick(saved, key).get(name)
                if isinstance(old, Tensor) and old.shape == tensor.shape:
                    tensor.copy_(old)
            state.append(one)
        return state

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Q, which all ranks compute alike."""
        return bundle(q=pick(saved, "q"))

    def owed(self, saved: Mapping[str, Any]) -> Owed:
        """The momentum, whose mean over the ranks is that of one process on the mean gradient, and stays that."""
        return list(pick(saved, "momentum").items())


def _like(flat: Tensor, state: list[_Matrix]) -> list[Tensor]:
    """The parts of `flat` in the shapes of all Q."""
    parts = flat.split([one.q.numel() for one in state])
    return [part.view(one.q.shape) for part, one in zip(parts, state, strict=True)]


@checks_arguments(rank="[1, inf)", mu="[0, 1)")
def dion(rank: int, *, mu: float = 0.95, seed: int = 0) -> CommHook:
    """The hook of the optimizer `optim.Dion` (arXiv 2504.05295): the direction of its step, from P and R instead of gradients.

    Every parameter of two or more dimensions is a matrix of the first dimension by the rest, and its result is an orthonormalized
    update of `rank` columns, at most as many as the matrix has; vectors and scalars are averaged. Each rank keeps a momentum of
    its own gradients, which `mu` decays in the directions that were sent, so `error_feedback()` around it is refused.

    Memory: the momentum, in float32 at least, and Q of n x r. A rank that joins later starts without momentum. A NaN affects one
    step of its matrix, and clears its momentum.
    On the wire: two all-reduces, 2 (N - 1) / N of r (m + n) numbers per matrix of m x n and of all vectors, for N ranks.
    """
    return LowRankMomentum(rank, mu, seed)
