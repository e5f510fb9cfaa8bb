"""`scaled_cast`: gradients in float16 or float8, scaled so that they neither overflow nor underflow.

Scales are powers of two, so scaling back is exact. float16 is summed by the engine: all ranks agree on one scale, so that the
largest magnitude times the number of ranks stays below 2^15, and so below 65504 in any order of additions. float8 is summed here,
since engines would round after each addition: each rank receives one slice of every rank's bucket, with its sender's scale, sums it
in float32, rounds the mean once and sends it to all. That rounding is part of the `sent` of the slice's owner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_gather_into_tensor, all_reduce, all_to_all_single
from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.dense import Mean
from gradwire.hooks.numerics.elementwise import as_dtype, count, float32_error, number_dtype, padded, real

EXPONENTS = {torch.float16: 15, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The largest scaled magnitude as a power of two: representable in each dtype, with some headroom."""

_FIELDS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
"""IEEE formats: an integer dtype of the same size, the bits of the fraction, and the exponent bias."""


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2 ** exponent from exponent bits, since pow() need not be exact; clamped so that power and inverse are normal numbers."""
    integer, fraction, bias = _FIELDS[dtype]
    return ((exponent.clamp(1 - bias, bias - 1) + bias).to(integer) << fraction).view(dtype)


def largest_magnitude(rows: Tensor) -> Tensor:
    """The largest magnitude in each row; infinite if it contains NaN or infinity."""
    if rows.shape[-1] == 0:
        return rows.new_zeros(rows.shape[:-1])
    low, high = torch.aminmax(rows, dim=-1)
    # NaN as infinity, since engines differ in what the maximum of a NaN and a number is.
    return torch.nan_to_num(torch.maximum(-low, high), nan=torch.inf, posinf=torch.inf)


def scale_for(magnitude: Tensor, exponent: int) -> Tensor:
    """The factor that brings `magnitude` to at most 2 ** exponent; 1 if it is not finite, so that this stays visible."""
    finite = magnitude.isfinite()
    needed = exponent - torch.frexp(torch.where(finite, magnitude, 0)).exponent
    return power_of_two(torch.where(finite, needed, 0), magnitude.dtype)


@dataclass(frozen=True, slots=True)
class ScaledCast(Wrapped):
    dtype: torch.dtype

    dense_only = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Mean):
            raise UsageError(
                f"scaled_cast({self.dtype}) around {self.inner!r}: the scale is chosen for a plain sum over all ranks, and may "
                "overflow otherwise. Put mean() or reduce_scatter_mean() inside."
            )

    @property
    def collectives(self) -> int | None:
        return None if self.inner.collectives is None else self.inner.collectives + 1

    def inside(self, spec: BucketSpec) -> BucketSpec:
        if not spec.dtype.is_complex:
            return replace(spec, dtype=self.dtype)
        row = (count(spec),)
        return replace(spec, dtype=self.dtype, names=("parts",), shapes=(row,), strides=((1,),))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        flat = real(grad).to(number_dtype(turn.spec.dtype))
        magnitude = largest_magnitude(flat.view(1, -1))
        yield all_reduce(magnitude, op=ReduceOp.MAX, label=f"bucket {turn.spec.index}, scale")
        ranks = (turn.world_size - 1).bit_length()  # 2 ** ranks is at least their number
        scale = scale_for(magnitude, EXPONENTS[self.dtype] - ranks)
        inside = replace(turn, spec=self.inside(turn.spec))
        value, sent = yield from self.inner.reduce((flat * scale).to(self.dtype), state, inside)
        value = as_dtype(value.to(flat.dtype) / scale, turn.spec.dtype)
        return Reduced(value, value if turn.donated else as_dtype(sent.to(flat.dtype) / scale, turn.spec.dtype))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        inner = self.inner.wire_bytes(self.inside(spec), world_size, step)
        return None if inner is None else inner + 2 * (world_size - 1) / world_size * number_dtype(spec.dtype).itemsize

    def __repr__(self) -> str:
        return f"scaled_cast({self.dtype}) > {self.inner!r}"


@dataclass(frozen=True, slots=True)
class Float8Mean(CommHook):
    """The hook of `scaled_cast` in float8, which replaces `mean()`."""

    dtype: torch.dtype

    collectives = 2
    dense_only = True
    error = float32_error

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        def row(slices: Tensor) -> Tensor:
            return as_dtype(slices.reshape(-1)[: count(turn.spec)], turn.spec.dtype)

        label, size = f"bucket {turn.spec.index}", turn.world_size
        slices = padded(real(grad).float(), -(-count(turn.spec) // size) * size).view(size, -1)
        outgoing = self._encode(slices)
        incoming = torch.empty_like(outgoing)
        yield all_to_all_single(incoming, outgoing, label=label)
        mean = self._decode(incoming).sum(0, keepdim=True).div_(turn.counted)
        rounded = self._encode(mean)
        gathered = torch.empty_like(outgoing)
        yield all_gather_into_tensor(gathered, rounded, label=label)
        value = row(self._decode(gathered))
        if turn.donated:
            return Reduced(value, value)
        sent = self._decode(outgoing)
        sent[turn.rank] += (self._decode(rounded) - mean).view(-1) * turn.counted
        return Reduced(value, row(sent))

    def _encode(self, rows: Tensor) -> Tensor:
        magnitude = largest_magnitude(rows).unsqueeze(-1)
        # Conversion to float8 may turn infinity into the largest finite number. A scale of NaN makes the whole row NaN instead.
        scale = torch.where(magnitude.isfinite(), scale_for(magnitude, EXPONENTS[self.dtype]), torch.nan)
        return torch.cat([scale.view(torch.uint8), (rows * scale).to(self.dtype).view(torch.uint8)], dim=-1)

    def _decode(self, rows: Tensor) -> Tensor:
        scale = as_bytes(rows[:, :4].contiguous()).view(torch.float32).unsqueeze(-1)
        return rows[:, 4:].view(self.dtype).to(torch.float32) / scale

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 2 * (world_size - 1) * (-(-count(spec) // world_size) + 4)

    def __repr__(self) -> str:
        return f"scaled_cast({self.dtype}) > mean()"


def scaled_cast(dtype: torch.dtype) -> Stage:
    """Reduce in float16 or float8, scaled by a power of two so that nothing overflows and small gradients do not underflow.

    torch.float16: one scale for all ranks, found by a maximum, around `mean()` or `reduce_scatter_mean()`. On the wire: as the
    inner hook at 2 bytes per element, and 2 (n - 1) / n of one number for n ranks.

    torch.float8_e4m3fn (3 bits of fraction) or torch.float8_e5m2 (2 bits, more range), in place of `mean()`: slices are exchanged
    in float8, summed in float32, and the mean is rounded and gathered in float8. On the wire: 2 (n - 1) (ceil(numel / n) + 4)
    bytes. Lossy enough to need `error_feedback()`. (arXiv 2209.05433 on the dtypes.)

    A float16 bucket that contains an infinite or NaN element is not scaled in that step; in float8 the whole slice becomes NaN.

    >>> from gradwire.hooks import chain, mean
    >>> from gradwire.testing import simulate
    >>> done = simulate(
    ...     chain(scaled_cast(torch.float16), mean()), [torch.tensor([2.0**20, 1.0]), torch.tensor([2.0**21, 2.0])]
    ... )
    >>> done.reduced[0].value
    tensor([1.5729e+06, 1.5000e+00])
    """
    if dtype not in EXPONENTS:
        raise UsageError(
            f"scaled_cast({dtype}): scaling is for dtypes of small range: {', '.join(map(str, EXPONENTS))}. "
            "torch.bfloat16 has float32's range; use cast(torch.bfloat16)."
        )

    def stage(inner: CommHook) -> CommHook:
        if dtype is torch.float16:
            return ScaledCast(inner, dtype)
        if inner != Mean():
            raise UsageError(
                f"scaled_cast({dtype}) around {inner!r}: float8 gradients are not summed by an engine, so another hook cannot "
                "reduce them. Put mean() inside, and error_feedback() to the left."
            )
        return Float8Mean(dtype)

    return NamedStage(f"scaled_cast({dtype})", stage)
