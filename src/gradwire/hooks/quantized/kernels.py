# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, valid-type, name-defined"
# Kernels are written in Triton's language, whose parameters and annotations are not Python's.
"""The codec as Triton kernels: one read and one write of device memory. The arithmetic is that of `eager`, to the bit.

Note [How a kernel is cut]
A program takes `TILE` neighbouring blocks of one row of the message, so that all addresses begin at multiples of a block. A tile
that lies wholly inside goes without masks, which would keep a thread from moving 16 bytes at once; only the last of a row has them.
The kernels are launched without contraction of products and sums, because the other ways round twice there.

The module can be imported without Triton; its functions cannot be called then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.hooks.quantized.layout import Part

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

ENCODE_ELEMENTS = 4096
DECODE_ELEMENTS = 4096
"""What one program takes, unless a single block is larger."""
WARPS = 4


def quantise(x: Tensor, message: Tensor, part: Part, key: int | None) -> None:
    """See `eager.quantise`."""
    tile = max(1, ENCODE_ELEMENTS // part.block)
    unit = float(1 << part.fraction)
    with torch.cuda.device(x.device):
        _quantise[(-(-part.blocks // tile), message.shape[0])](
            x, message, message.view(torch.int32), part.numel, part.blocks, part.stride, part.codes_at, part.scales_at,
            key or 0, 1 / unit if part.bits == 1 else _float32(1 / part.top),
            TOP=unit if part.bits == 1 else float(part.top), BITS=part.bits, BLOCK=part.block, TILE=tile,
            STOCHASTIC=key is not None, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def dequantise(message: Tensor, out: Tensor, part: Part) -> None:
    """See `eager.dequantise`."""
    _run_decode(message, out, part, rows=message.shape[0], summed=1, factor=1.0)


def total(message: Tensor, out: Tensor, part: Part, factor: float) -> None:
    """See `eager.total`."""
    _run_decode(message, out, part, rows=1, summed=message.shape[0], factor=_float32(factor))


def _run_decode(message: Tensor, out: Tensor, part: Part, *, rows: int, summed: int, factor: float) -> None:
    tile = max(1, DECODE_ELEMENTS // part.block)
    with torch.cuda.device(out.device):
        _decode[(-(-part.blocks // tile), rows)](
            message, message.view(torch.float32), out, part.numel, part.blocks, part.stride, part.codes_at, part.scales_at,
            summed, factor, BITS=part.bits, BLOCK=part.block, TILE=tile, SUMS=summed > 1, SCALED=factor != 1.0,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def _kernel(function):
    """Compiled by Triton where it is installed; not anew for every length of a bucket."""
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=["numel", "blocks", "key", "summed"])


def _inlined(function):
    return function if triton is None else triton.jit(function)


@_kernel
def _quantise(
    x, codes, scales, numel, blocks, stride, codes_at, scales_at, key, down,
    TOP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * TILE
    first = (row * blocks + begin) * BLOCK
    codes += row * stride + codes_at + begin * (BLOCK * BITS // 8)
    scales += (row * stride + scales_at) // 4 + begin
    here = blocks - begin
    left = numel - first
    if (left >= TILE * BLOCK) & (here >= TILE):
        _quantise_tile(x, codes, scales, first, left, here, key, down, TOP, BITS, BLOCK, TILE, STOCHASTIC, True)
    else:
        _quantise_tile(x, codes, scales, first, left, here, key, down, TOP, BITS, BLOCK, TILE, STOCHASTIC, False)


@_inlined
def _quantise_tile(
    x, codes, scales, first, left, here, key, down,
    TOP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, TILE)
    local = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if FULL:
        v = tl.load(x + first + local).to(tl.float32)
    else:
        v = tl.load(x + first + local, mask=(local < left) & (rows[:, None] < here), other=0.0).to(tl.float32)
    # As integers, floats without sign are ordered as they are as numbers, and NaN comes last.
    peak_bits = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    peak = peak_bits.to(tl.float32, bitcast=True)
    finite = peak_bits < 0x7F800000
    live = finite & (peak >= 7.888609052210118e-31)  # 2 ** -100
    sure = tl.where(live, peak, 1.0)
    inverse = tl.div_rn(tl.full((TILE,), TOP, tl.float32), sure)
    if BITS == 1:
        y = tl.where(live[:, None], tl.abs(v) * inverse[:, None], 0.0)
        summed = tl.sum((y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000, axis=1).to(tl.float32)
        if FULL:
            count = tl.full((TILE,), BLOCK * 1.0, tl.float32)
        else:
            count = tl.minimum(tl.maximum(left - rows * BLOCK, 1), BLOCK).to(tl.float32)
        scale = tl.div_rn(summed * (sure * down), count)
        code = (tl.where(live[:, None], v, 0.0) >= 0.0).to(tl.int32)
    else:
        scale = peak * down
        y = tl.where(live[:, None], v * inverse[:, None], 0.0)
        if STOCHASTIC:
            y = tl.minimum(tl.maximum(y, -TOP), TOP)
            low = tl.floor(y)
            h = ((first.to(tl.uint32) + local.to(tl.uint32)) * 0x9E3779B9) ^ key.to(tl.uint32)
            h ^= h >> 16
            h *= 0x85EBCA6B
            h ^= h >> 13
            h *= 0xC2B2AE35
            h ^= h >> 16
            u = (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
            code = low.to(tl.int32) + ((y - low) > u).to(tl.int32)
        else:
            # 1.5 * 2 ** 23 leaves no digit behind the point, rounded half to even: the code is in the lowest bits.
            code = (y + 12582912.0).to(tl.int32, bitcast=True)
    scale_bits = tl.where(finite, tl.where(live, scale, 0.0).to(tl.int32, bitcast=True), 0x7FC00000)
    BYTES: tl.constexpr = BLOCK * BITS // 8
    PLANES: tl.constexpr = 8 // BITS
    if BITS == 8:
        packed = code.to(tl.uint8)
    else:
        planes = tl.reshape(code & ((1 << BITS) - 1), (TILE, PLANES, BYTES))
        shifts = tl.arange(0, PLANES) * BITS
        packed = tl.sum(planes << shifts[None, :, None], axis=1).to(tl.uint8)
    places = rows[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    if FULL:
        tl.store(scales + rows, scale_bits)
        tl.store(codes + places, packed)
    else:
        tl.store(scales + rows, scale_bits, mask=rows < here)
        tl.store(codes + places, packed, mask=rows[:, None] < here)


@_kernel
def _decode(
    codes, scales, out, numel, blocks, stride, codes_at, scales_at, summed, factor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * TILE
    first = (row * blocks + begin) * BLOCK
    codes += row * stride + codes_at + begin * (BLOCK * BITS // 8)
    scales += (row * stride + scales_at) // 4 + begin
    here = blocks - begin
    left = numel - first
    if (left >= TILE * BLOCK) & (here >= TILE):
        _decode_tile(
            codes, scales, out, first, left, here, stride, summed, factor, BITS, BLOCK, TILE, SUMS, SCALED, True
        )
    else:
        _decode_tile(
            codes, scales, out, first, left, here, stride, summed, factor, BITS, BLOCK, TILE, SUMS, SCALED, False
        )


@_inlined
def _decode_tile(
    codes, scales, out, first, left, here, stride, summed, factor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, TILE)
    total = _meant(codes, scales, here, BITS, BLOCK, TILE, FULL)
    if SUMS:
        for _ in range(1, summed):
            codes += stride
            scales += stride // 4
            total += _meant(codes, scales, here, BITS, BLOCK, TILE, FULL)
    if SCALED:
        total *= factor
    if BITS == 8:
        local = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = rows[:, None] < here
    else:
        BYTES: tl.constexpr = BLOCK * BITS // 8
        PLANES: tl.constexpr = 8 // BITS
        local = (
            rows[:, None, None] * BLOCK
            + tl.arange(0, PLANES)[None, :, None] * BYTES
            + tl.arange(0, BYTES)[None, None, :]
        )
        inside = rows[:, None, None] < here
    if FULL:
        tl.store(out + first + local, total.to(out.dtype.element_ty))
    else:
        tl.store(out + first + local, total.to(out.dtype.element_ty), mask=(local < left) & inside)


@_inlined
def _meant(
    codes, scales, here, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    rows = tl.arange(0, TILE)
    BYTES: tl.constexpr = BLOCK * BITS // 8
    PLANES: tl.constexpr = 8 // BITS
    places = rows[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    if FULL:
        scale = tl.load(scales + rows)
        packed = tl.load(codes + places)
    else:
        scale = tl.load(scales + rows, mask=rows < here, other=0.0)
        packed = tl.load(codes + places, mask=rows[:, None] < here, other=0)
    if BITS == 8:
        return packed.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
    else:
        shifts = tl.arange(0, PLANES) * BITS
        code = (packed.to(tl.int32)[:, None, :] >> shifts[None, :, None]) & ((1 << BITS) - 1)
        if BITS == 1:  # noqa: SIM108
            signed = code * 2 - 1
        else:
            signed = (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
        return signed.to(tl.float32) * scale[:, None, None]
