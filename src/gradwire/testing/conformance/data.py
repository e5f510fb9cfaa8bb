"""Values for the checks, seeded by a key, so that every rank can reproduce every other rank's values; and memory layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp
from gradwire.collectives.op_kinds import REDUCES

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
_SORTS = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int8, torch.uint16, torch.bool)

LARGEST = 2
"""The largest floating-point value drawn; tolerances are computed from it."""


def dtypes(world: int) -> tuple[torch.dtype, ...]:
    """Every dtype; in a large world, where the cost of a case is quadratic in its size, one of each sort."""
    return DTYPES if world <= 4 else _SORTS


def reductions_of(dtype: torch.dtype) -> list[ReduceOp]:
    """The reductions that are defined for `dtype`, except PREMUL_SUM, in the same order on all ranks."""
    return sorted(REDUCES[dtype] - {ReduceOp.PREMUL_SUM}, key=lambda op: op.name)


def sizes(world: int) -> tuple[tuple[int, ...], ...]:
    """Shapes worth trying: empty, one element, fewer than ranks, primes, no multiple of the world size, a few thousand."""
    return ((0,), (1,), (world - 1,), (13,), (world + 1, 3), (2, 0, 3), (4099,))


_POOL = 16_411


@functools.cache
def _pool(dtype: torch.dtype, device: torch.device, copies: int) -> Tensor:
    """Random values of one dtype, repeated. float8 holds -1, 0 and 1 only, whose sums of up to 8 are exact."""
    generator = torch.Generator().manual_seed(20)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (_POOL,), generator=generator, device="cpu")

    def reals() -> Tensor:
        return torch.rand(_POOL, generator=generator, dtype=torch.float64, device="cpu") * 2 * LARGEST - LARGEST

    if dtype is torch.bool:
        values = integers(0, 2)
    elif dtype in FLOAT8:
        values = integers(-1, 2)
    elif dtype.is_complex:
        values = torch.complex(reals(), reals()) / LARGEST
    elif dtype.is_floating_point:
        values = reals()
    else:
        values = integers(-8 if dtype.is_signed else 0, 9)
    return values.to(dtype).to(device).repeat(copies)


def draw(shape: Sequence[int], dtype: torch.dtype, *key: int) -> Tensor:
    """The tensor of `key`, on the default device: a slice, at an offset given by the key, of values drawn once."""
    place, count = 7, math.prod(shape)
    for number in key:
        place = (place * 1_000_003 + number + 1) % (2**31 - 1)
    pool = _pool(dtype, torch.get_default_device(), 1 if count < _POOL else count // _POOL + 2)
    first = place % (len(pool) - count)
    return pool[first : first + count].clone().view(tuple(shape))


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An output with other contents, so that a result that was never written is detected."""
    return torch.ones(tuple(shape), dtype=dtype)


LAYOUTS = ("transposed", "strided", "offset")


def arrange(t: Tensor, layout: str) -> Tensor:
    """The same values in memory that is not contiguous, or not at the start of its storage."""
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "strided":
        home = blank((*t.shape[:-1], 2 * t.shape[-1]), t.dtype)[..., ::2]
    else:
        home = blank((t.numel() + 3,), t.dtype)[3:].view(t.shape)
    home.copy_(t)
    return home
