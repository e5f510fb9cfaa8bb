"""`power_sgd`: gradients of matrices as products of two thin matrices.

After Vogels et al. 2019 (arXiv 1905.13727), in the paper's letters: M is a gradient as a matrix of n x m, P is n x r, Q is m x r.

Note [One step of power iteration]
P = M Q is averaged over the ranks and orthonormalized, Q = M^T P is averaged, and P Q^T is the gradient. All ranks hold the same
P, so a rank in effect sends P Q_i^T with its own Q_i, and the value is exactly the mean of these. The next step starts from Q: as
gradients change slowly, one iteration per step is enough (warm start). It takes the columns of Q divided by their norm, and keeps
its own in place of one whose norm is zero or not finite, which would stay that in every later step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn, always_alike
from gradwire.hooks.bucket import BucketSpec, Slices, is_dense
from gradwire.hooks.dense import MEAN
from gradwire.hooks.numerics.elementwise import GPU_KERNELS, as_dtype, count, number_dtype, padded, real
from gradwire.hooks.numerics.orthogonal import keep_directions, multiply, orthonormal
from gradwire.hooks.numerics.rng import device_key, named_generator, noise
from gradwire.runtime.jit import kernels


@dataclass(frozen=True, slots=True)
class _Matrix:
    name: str
    offset: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a bucket of real numbers is sent. Factors are ordered by length, so that those of equal length are one batch."""

    rank: int
    by_rows: tuple[_Matrix, ...]
    by_cols: tuple[_Matrix, ...]
    rest: Slices
    numel: int
    """The bucket's elements, including padding."""

    @property
    def sent(self) -> int:
        return self.rest.numel + self.rank * sum(m.rows + m.cols for m in self.by_rows)

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """The matrices as views of `flat`, in the order of P."""
        return [flat.as_strided((m.rows, m.cols), (m.cols, 1), flat.storage_offset() + m.offset) for m in self.by_rows]

    def batches(self, flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        found, at = [], 0
        for length in dict.fromkeys(lengths):
            times = lengths.count(length)
            found.append(flat.narrow(0, at, times * length * self.rank).view(times, length, self.rank))
            at += times * length * self.rank
        return found


def _plan(found: list[_Matrix], rest: Sequence[tuple[int, int]], rank: int, numel: int) -> _Plan:
    by_rows, by_cols = sorted(found, key=lambda m: m.rows), sorted(found, key=lambda m: m.cols)
    return _Plan(rank, tuple(by_rows), tuple(by_cols), Slices.of(rest), numel)


def _by_layer(spec: BucketSpec, rank: int, gain: float) -> _Plan:
    """Every parameter of two or more dimensions that is compressed enough; complex numbers are pairs of real ones."""
    pair = 2 if spec.dtype.is_complex else 1
    found, rest = [], []
    for name, shape, stride, offset, numel in zip(
        spec.names, spec.shapes, spec.strides, spec.offsets, spec.numels, strict=True
    ):
        # In memory the rows are the dimension of largest stride: the first, unless the parameter is a transposed view.
        outer = max(range(len(shape)), key=lambda d: stride[d], default=0) if is_dense(shape, stride) else 0
        rows = shape[outer] if len(shape) > 1 else 1
        cols = pair * numel // rows if rows else 0
        if (rows + cols) * rank * gain < rows * cols:
            found.append(_Matrix(name, pair * offset, rows, cols))
        else:
            rest.append((pair * offset, pair * numel))
    return _plan(found, rest, rank, pair * spec.numel)


def _as_square(spec: BucketSpec, rank: int, gain: float) -> _Plan:
    numel = count(spec)
    side = math.isqrt(max(numel - 1, 0)) + 1
    if 2 * side * rank * gain < numel:
        return _plan([_Matrix("", 0, side, side)], [], rank, side * side)
    return _plan([], [(0, numel)], rank, numel)


class _Qs:
    """All Q of a bucket in one tensor, each stored transposed: writing M^T P to that layout is faster."""

    def __init__(self, plan: _Plan, like: Tensor) -> None:
        lengths = [m.cols for m in plan.by_cols]
        self.flat = like.new_empty(plan.rank * sum(lengths))
        self.batches = [b.view(len(b), plan.rank, -1).mT for b in plan.batches(self.flat, lengths)]
        each = (q for batch in self.batches for q in batch.unbind())
        by_name = {m.name: q for m, q in zip(plan.by_cols, each, strict=True)}
        self.each = [by_name[m.name] for m in plan.by_rows]
        self.turned = [q.mT for q in self.each]


class _Factors:
    """The state of a bucket: Q, and memory and views for the factors, which take longer to create than to use."""

    def __init__(self, plan: _Plan, like: Tensor) -> None:
        self.plan = plan
        self.q, self.new, self.mine = (_Qs(plan, like) for _ in range(3))
        """The start of the next step, with columns of unit norm; the averaged product of this step; this rank's own product."""
        self.row = like.new_empty(plan.rest.numel + plan.rank * sum(m.rows for m in plan.by_rows))
        """What is sent uncompressed, followed by all P."""
        self.p_batches = plan.batches(self.row[plan.rest.numel :], [m.rows for m in plan.by_rows])
        self.p = [p for batch in self.p_batches for p in batch.unbind()]
        ends = torch.tensor([0, *(m.cols for m in plan.by_cols for _ in range(plan.rank))], device="cpu").cumsum(0)
        self.begins = ends.to(like.device) if like.is_cuda else None
        """The offsets of the columns of Q, and the end of the last one."""
        self.given: dict[str, Any] = {}
        """If batched: what was loaded for other buckets, kept until this one is reduced."""


@dataclass(frozen=True, slots=True, repr=False)
class PowerSGD(CommHook):
    rank: int
    batched: bool
    warm_start: bool
    min_compression: float
    seed: int

    made_by = "power_sgd"
    capture_key = always_alike
    dense_only = uses_room = True

    @property
    def traits(self) -> Trait:
        warm = Trait.CONTINUES if self.warm_start else Trait(0)
        return Trait.AVERAGES | warm | (Trait(0) if self.batched else Trait.MATRICES)

    def plan(self, spec: BucketSpec) -> _Plan:
        return (_as_square if self.batched else _by_layer)(spec, self.rank, self.min_compression)

    def init(self, spec: BucketSpec) -> _Factors:
        """Each Q from the seed and its parameter's name, so that all ranks start with the same."""
        plan = self.plan(spec)
        state = _Factors(plan, torch.empty(0, dtype=number_dtype(spec.dtype), device=spec.device))
        if self.warm_start:
            for m, q in zip(plan.by_rows, state.q.each, strict=True):
                rng = named_generator(self.seed, m.name or spec.names[0])
                q.copy_(torch.nn.functional.normalize(torch.randn(q.shape, generator=rng), dim=0))
        return state

    def reduce(self, grad: Tensor, state: _Factors, turn: Turn) -> Reduction:
        """See Note [One step of power iteration]."""
        plan = state.plan
        if not plan.by_rows:
            return (yield from MEAN.reduce(grad, None, turn))
        row, head, q = state.row, plan.rest.numel, state.q.flat
        if not self.warm_start:
            # Any numbers that are the same on devices of different models.
            index = torch.arange(q.numel(), device=q.device)
            q.copy_(noise(index, device_key(self.seed, turn, shared=True)).sub_(0.5))
        label = f"bucket {turn.spec.index}"
        own = real(grad)
        flat = padded(own.to(q.dtype), plan.numel)
        m = plan.matrices(flat)

        row[:head].copy_(plan.rest.take(flat))
        multiply(m, state.q.each, state.p)
        wire = row.to(own.dtype)
        yield all_reduce(wire, op=ReduceOp.AVG, label=f"{label}, P")
        row.copy_(wire)  # to the dtype of computation; nothing is copied if it is the same
        p = [each for batch in orthonormal(state.p_batches) for each in batch.unbind()]

        new = state.new
        multiply([each.mT for each in m], p, new.each)
        wire = new.flat.to(own.dtype)
        if not turn.donated:
            state.mine.flat.copy_(wire)
        yield all_reduce(wire, op=ReduceOp.AVG, label=f"{label}, Q")
        new.flat.copy_(wire)
        if self.warm_start:
            _warm_start(state)

        if turn.share != 1:
            new.flat.mul_(turn.share)
            row[:head].mul_(turn.share)
        room = own if turn.room is None else real(turn.room)
        value = flat if turn.donated or flat is not own else torch.empty_like(flat) if room is own else room
        multiply(p, new.turned, plan.matrices(value))
        plan.rest.put(value, row[:head])
        if turn.donated:
            return Reduced(as_dtype(value[: own.numel()], grad.dtype), grad)
        sent = torch.empty_like(flat)
        multiply(p, state.mine.turned, plan.matrices(sent))
        plan.rest.put(sent, plan.rest.take(own).to(sent.dtype))
        return Reduced(*(as_dtype(row[: own.numel()], grad.dtype) for row in (value, sent)))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        if spec.sparse:
            return None
        return 2 * (world_size - 1) / world_size * self.plan(spec).sent * spec.dtype.to_real().itemsize

    def error(self, spec: BucketSpec) -> float:
        return CommHook.error(self, spec) * self.rank

    def save(self, state: _Factors, spec: BucketSpec) -> dict[str, Any]:
        """Each parameter's Q; if batched, the bucket's Q under its first parameter."""
        if not self.warm_start or not state.plan.by_rows:
            return dict(state.given)
        if not self.batched:
            return {one.name: q.clone() for one, q in zip(state.plan.by_rows, state.q.each, strict=True)}
        return dict(state.given) or {spec.names[0]: {"bucket": list(spec.names), "q": state.q.flat.clone()}}

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Factors:
        """Each parameter's Q if its shape fits; if batched, only for the same parameters in the same order."""
        state = self.init(spec)
        if not self.batched:
            for one, q in zip(state.plan.by_rows, state.q.each, strict=True):
                old = saved.get(one.name)
                if isinstance(old, Tensor) and old.shape == q.shape:
                    q.copy_(old)
            return state
        state.given = {name: saved[name] for name in spec.names if isinstance(saved.get(name), Mapping)}
        old = state.given.get(spec.names[0]) if spec.names else None
        if old is not None and old["bucket"] == list(spec.names) and old["q"].shape == state.q.flat.shape:
            state.q.flat.copy_(old["q"])
            state.given = {}
        return state

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return dict(saved)


def _warm_start(state: _Factors) -> None:
    fast = kernels(GPU_KERNELS) if state.begins is not None else None
    if fast is not None:
        fast.keep_directions(state.new.flat, state.q.flat, state.begins)
    else:
        keep_directions(state.new.batches, state.q.batches)
    state.given = {}


@checks_arguments(rank="[1, inf)", min_compression="[1, inf]")
def power_sgd(
    rank: int, *, batched: bool = False, warm_start: bool = True, min_compression: float = 2.0, seed: int = 0
) -> CommHook:
    """PowerSGD (Vogels et al. 2019, arXiv 1905.13727): each matrix as the product of two matrices with `rank` columns.

    Parameters of two or more dimensions are matrices of the first dimension by the rest; vectors, and matrices whose factors are
    not at least `min_compression` times smaller, are sent uncompressed. `batched` treats the whole bucket as one square matrix
    instead: fewer and larger products, but its rows have no meaning.
    With `warm_start` a step starts from the factors of the last one; without it, from random numbers.
    Use it with error feedback: `chain(error_feedback(), power_sgd(rank=4))`.

    Memory: r (n + 3 m) numbers for a matrix of n x m. State is kept by parameter; with `batched` it belongs to the bucket and is
    reset when buckets are rebuilt. Gradients narrower than float32 are computed in float32.
    On the wire: 2 (N - 1) / N of r (n + m) numbers per matrix and of all that is sent uncompressed, for N ranks; two all-reduces
    per bucket, or one if nothing in it is a matrix.
    """
    return PowerSGD(rank, batched, warm_start, float(min_compression), seed)
