"""Dense hooks, which send every element, and `chain`, which puts stages around a hook."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.arguments import NamedStage, refuse_traits
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Trait, Turn, always_alike
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.composite import Reduce, Wrapped
from gradwire.hooks.numerics.elementwise import padded, wide


@dataclass(frozen=True, slots=True, repr=False)
class Mean(CommHook):
    made_by = "mean"
    collectives = 1
    capture_key = always_alike
    passes_nonfinite = True

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        label = f"bucket {turn.spec.index}"
        value = grad if turn.donated else grad.clone()
        if turn.divisor is None:
            yield all_reduce(value, op=ReduceOp.AVG, label=label)
        else:
            value.div_(turn.divisor)
            yield all_reduce(value, op=ReduceOp.SUM, label=label)
        return Reduced(value, grad)

    def reduce_scatter(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value = grad.new_empty(grad.numel() // turn.world_size)
        yield reduce_scatter_tensor(value, grad, op=ReduceOp.AVG, label=f"bucket {turn.spec.index}")
        return Reduced(value if turn.divisor is None else value.mul_(turn.share), grad)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return None if spec.sparse else 2 * (world_size - 1) / world_size * spec.nbytes

    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return (world_size - 1) / world_size * spec.nbytes


MEAN = Mean()


def mean() -> CommHook:
    """The plain average, one all-reduce per bucket. On the wire: 2 (n - 1) / n of the bucket's bytes for n ranks."""
    return Mean()


@dataclass(frozen=True, slots=True, repr=False)
class ReduceScatterMean(Mean):
    made_by = "reduce_scatter_mean"
    collectives = 2
    dense_only = True

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        label, size = f"bucket {turn.spec.index}", turn.world_size
        row = padded(grad, -(-grad.numel() // size) * size)
        mine = grad.new_empty(row.numel() // size)
        yield reduce_scatter_tensor(mine, row, op=ReduceOp.AVG, label=label)
        if turn.divisor is not None:
            mine.mul_(turn.share)
        value = row if turn.donated or row is not grad else torch.empty_like(row)
        yield all_gather_into_tensor(value, mine, label=label)
        return Reduced(value[: grad.numel()], grad)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 2 * (world_size - 1) * -(-spec.numel // world_size) * spec.dtype.itemsize


def reduce_scatter_mean() -> CommHook:
    """The plain average as a reduce-scatter and an all-gather, for engines on which these are faster than an all-reduce.

    On the wire: 2 (n - 1) slices of ceil(numel / n) elements for n ranks: as `mean`, plus padding.
    """
    return ReduceScatterMean()


@dataclass(frozen=True, slots=True, repr=False)
class WeightedMean(CommHook):
    made_by = "weighted_mean"
    collectives = 1
    traits = Trait.WEIGHS
    dense_only = True
    passes_nonfinite = True

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        if not (turn.weight >= 0 and math.isfinite(turn.weight)):
            raise UsageError(
                f"weighted_mean on rank {turn.rank}: weight {turn.weight} is no count. Pass a number of samples."
            )
        # bfloat16 rounds counts of samples above 256, and float16 soon overflows.
        weight = grad.new_full((1,), turn.weight, dtype=wide(grad.dtype))
        value = torch.cat([grad * weight, weight])
        yield all_reduce(value, op=ReduceOp.SUM, label=f"bucket {turn.spec.index}")
        # If no rank has a sample the result is zero: all that was summed is zero then.
        total = torch.where(value[-1:] == 0, torch.ones_like(weight), value[-1:])
        mean = value[:-1].div_(total).to(grad.dtype)
        return Reduced(mean, mean if turn.donated else (grad * (weight * turn.counted / total)).to(grad.dtype))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 2 * (world_size - 1) / world_size * (spec.numel + 1) * wide(spec.dtype).itemsize


def weighted_mean() -> CommHook:
    """The average weighted by rank, for ranks with batches of different size.

    Set the weight before backward: `model.set_weight(len(batch))`. With a loss averaged over the batch, the result is the gradient
    of the loss averaged over all samples of all ranks. On the wire: as `mean` for the bucket and one element, at least in float32.
    """
    return WeightedMean()


@dataclass(frozen=True, slots=True)
class Cast(Wrapped):
    dtype: torch.dtype

    @property
    def passes_nonfinite(self) -> bool:
        return self.inner.passes_nonfinite

    def narrowest(self, dtype: torch.dtype) -> torch.dtype:
        options = (dtype, self.inner.narrowest(self.dtype))
        return min(options, key=lambda one: torch.finfo(one).max) if dtype.is_floating_point else dtype

    def __post_init__(self) -> None:
        why = f"what the inner hook keeps for later would be kept in {self.dtype}, which loses the small errors it is meant to keep"
        advice = "Put error_feedback() to the left of the cast."
        refuse_traits(f"cast({self.dtype}) around {self.inner!r}", self.inner, {Trait.REMEMBERS: f"{why}. {advice}"})

    def inside(self, spec: BucketSpec) -> BucketSpec:
        # Complex gradients are not converted: a real dtype would silently drop their imaginary part.
        return replace(spec, dtype=self.dtype) if spec.dtype.is_floating_point else spec

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        spec = self.inside(turn.spec)
        value, sent = yield from reduce(grad.to(spec.dtype), state, replace(turn, spec=spec))
        value = value.to(grad.dtype)
        return Reduced(value, value if turn.donated else sent.to(grad.dtype))  # `sent` is not needed if donated

    def __repr__(self) -> str:
        return f"cast({self.dtype}) > {self.inner!r}"


def cast(dtype: torch.dtype) -> Stage:
    """Reduce in `dtype`, such as torch.bfloat16, and convert back. On the wire: itemsize(dtype) / itemsize(grad) of it.

    Values beyond the range of `dtype` become infinite: above 65504 for torch.float16 (also the sum over all ranks, where the engine
    adds in float16), and values below 6e-8 become zero. `scaled_cast` moves gradients into that range first. Complex gradients are
    not converted.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"cast({dtype!r}): not a floating-point dtype. Use torch.bfloat16 or torch.float16.")
    if dtype.itemsize == 1:
        raise UsageError(
            f"cast({dtype}): the range of 8 bits is too small for unscaled gradients. Use scaled_cast({dtype})."
        )
    return NamedStage(f"cast({dtype})", lambda inner: Cast(inner, dtype))


def chain(*parts: Stage | CommHook) -> CommHook:
    """Compose stages around a hook, the left one outermost: `chain(cast(torch.bfloat16), mean())`.

    A hook that averages by itself, such as `quantize`, may be followed by `mean()`, which is then redundant.

    >>> chain(cast(torch.bfloat16), mean())
    cast(torch.bfloat16) > mean()
    """
    if not parts:
        raise UsageError("chain() without arguments. End it with a hook that communicates, such as mean().")
    *stages, hook = parts
    if not isinstance(hook, CommHook):
        raise UsageTypeError(
            f"chain(...): the last part, {hook!r}, is a stage, or a function that was not called. End with a hook such as mean()."
        )
    for stage in reversed(stages):
        if isinstance(stage, CommHook):
            if Trait.AVERAGES in stage.traits and hook == Mean():
                hook = stage
                continue
            why = f": {stage.alone}" if stage.alone else ""
            raise UsageTypeError(
                f"chain(...): {stage!r} communicates by itself{why}; {hook!r} would never be reached. End the chain with it."
            )
        if not callable(stage):
            raise UsageTypeError(f"chain(...): {stage!r} is not a stage. A stage takes a hook and returns one.")
        hook = stage(hook)
        if not isinstance(hook, CommHook):
            raise UsageTypeError(f"chain(...): the stage {stage!r} returned {hook!r}, not a CommHook.")
    return hook
