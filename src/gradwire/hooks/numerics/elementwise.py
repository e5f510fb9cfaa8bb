"""A bucket's elements as lossy hooks compute with them: real, and wide enough."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.hooks.bucket import BucketSpec

GPU_KERNELS = "gradwire.hooks.numerics.gpu_kernels"
"""For `runtime.jit.kernels`."""
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for 16-bit numbers, otherwise the same."""
    return _WIDER.get(dtype, dtype)


def number_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype to compute in with what `real` returns for a bucket of `dtype`."""
    return wide(dtype.to_real())


def float32(number: float) -> float:
    """The nearest float32, so that no implementation computes with more digits of it."""
    return float(np.float32(number))


def real(flat: Tensor) -> Tensor:
    """A view of `flat` as real numbers: complex ones as alternating real and imaginary parts."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _norm(flat: Tensor) -> Tensor:
    """The Euclidean norm of real numbers in float64, in which squares of float32 do not overflow; NaN if it is not finite."""
    if flat.dtype == torch.float64 and flat.numel():
        largest = flat.abs().amax().clamp(min=torch.finfo(flat.dtype).tiny)
        norm = torch.linalg.vector_norm(flat / largest) * largest
    else:
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.where(norm.isfinite(), norm, torch.nan)


def clip_norms_(flat: Tensor, spec: BucketSpec, bound: float) -> None:
    """Scale each parameter's part of `flat`, the real numbers of a bucket, to a norm of at most `bound`, in place. By parameter,
    because the buckets change: the first step has only one. A part that is not finite becomes NaN."""
    pair = 2 if spec.dtype.is_complex else 1
    for part in flat.split([pair * numel for numel in spec.numels]):
        part.mul_((bound / _norm(part)).clamp(max=1))


def drop_nonfinite_(kept: Tensor) -> Tensor:
    """Zero non-finite values in place, so that one bad step cannot poison the state."""
    return kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def count(spec: BucketSpec) -> int:
    """How many numbers `real` returns for a bucket."""
    return spec.numel * (2 if spec.dtype.is_complex else 1)


def padded(flat: Tensor, numel: int) -> Tensor:
    """`flat`, padded with zeros to `numel` elements; `flat` itself if it has as many."""
    return flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))


def as_dtype(row: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `real`: numbers as elements of `dtype`, without a copy if they have its precision."""
    if not dtype.is_complex:
        return row.to(dtype)
    return torch.view_as_complex(row.to(dtype.to_real()).view(-1, 2))


def float32_error(hook: object, spec: BucketSpec) -> float:
    """The method `error` of a hook that sums in float32: its rounding, or that of the gradient's dtype if that is coarser."""
    return 16 * max(torch.finfo(spec.dtype).eps, torch.finfo(torch.float32).eps)
