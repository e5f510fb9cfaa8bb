# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, valid-type, name-defined"
# Kernels are written in Triton's language, whose parameters and annotations are not Python's.
"""The codec as Triton kernels: one read and one write of device memory. The arithmetic is that of `eager`, to the bit.

Note [Division into programs]
A program handles `TILE` adjacent blocks of one row of the message. Only the last tile of a row has masks, which would keep a thread
from moving 16 bytes at once. A thread handles four codes and, plane by plane, their four elements: 16 bytes of floats. For that,
offsets in the message are passed in words of 4 bytes: if Triton knew that codes are aligned to 16, it would assign 16 of them to a
thread and shuffle through shared memory. A row may have more than 2 ** 31 bytes, so offsets in it are 64-bit. Products and sums are
not contracted, because the other implementations round twice there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.hooks.compressors.quantized.layout import Key, Part
from gradwire.hooks.numerics.elementwise import float32
from gradwire.hooks.numerics.triton_compat import kernel, tl

TILE_ELEMENTS = 1024
"""Elements per program, unless a single block is larger."""
WARPS = 4
PLAIN, FEEDBACK, MEAN = 0, 1, 2
"""What is quantized: a tensor, its sum with the residual, or the mean of received rows. The last two change the residual."""


def quantize(x: Tensor, message: Tensor, part: Part, key: Key) -> None:
    _launch(x, x, x, message, part, key, PLAIN)


def quantize_sum(x: Tensor, residual: Tensor, message: Tensor, part: Part, key: Key, own: int = 0) -> None:
    """Quantize `x` plus the float32 `residual`, and keep in that what the codes leave, in row `own` as in others."""
    _launch(x, residual, x, message, part, key, FEEDBACK)


def quantize_mean(
    received: Tensor, residual: Tensor, message: Tensor, part: Part, key: Key, divisor: int, sent: object = None
) -> None:
    """Quantize the sum of the rows of `received` over `divisor`. Its rounding error, times `divisor`, goes into `residual`."""
    _launch(received.view(torch.float32), residual, received, message, part, key, MEAN, received.shape[0], divisor)


def _launch(
    x: Tensor, residual: Tensor, received: Tensor, message: Tensor, part: Part, key: Key, source: int,
    summed: int = 1, divisor: int = 1,
) -> None:  # fmt: skip
    tile = max(1, TILE_ELEMENTS // part.block)
    unit = float(1 << part.fraction)
    with torch.cuda.device(x.device):
        _quantize[(-(-part.blocks // tile), message.shape[0])](
            x, residual, received, message, message.view(torch.int32), part.numel, part.blocks, *_words(part),
            0 if key is None else key, 1 / unit if part.bits == 1 else float32(1 / part.top),
            summed, float32(1 / divisor), float(divisor), TOP=unit if part.bits == 1 else float(part.top), BITS=part.bits,
            BLOCK=part.block, TILE=tile, STOCHASTIC=isinstance(key, Tensor), SOURCE=source,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def decode(message: Tensor, out: Tensor, part: Part, factor: float | None = None) -> None:
    rows, summed = (message.shape[0], 1) if factor is None else (1, message.shape[0])
    factor = 1.0 if factor is None else float32(factor)
    tile = max(1, TILE_ELEMENTS // part.block)
    with torch.cuda.device(out.device):
        _decode[(-(-part.blocks // tile), rows)](
            message, message.view(torch.float32), out, part.numel, part.blocks, *_words(part),
            summed, factor, BITS=part.bits, BLOCK=part.block, TILE=tile, SUMS=summed > 1, SCALED=factor != 1.0,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _words(part: Part) -> tuple[int, int, int]:
    return part.stride // 4, part.codes_at // 4, part.scales_at // 4


@kernel("numel", "blocks", "stride", "codes_at", "scales_at", "key", "ranks", "divisor")
def _quantize(
    x, residual, received, codes, scales, numel, blocks, stride, codes_at, scales_at, key, down, ranks, factor, divisor,
    TOP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STOCHASTIC: tl.constexpr,
    SOURCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * TILE
    first = (row * blocks + begin) * BLOCK
    at = (row * stride + codes_at) * 4 + begin * (BLOCK * BITS // 8)
    codes += at
    scales += row * stride + scales_at + begin
    if SOURCE == 2:  # of one row: codes are read where they are written in the answer
        x += scales_at + begin
        received += at
    else:
        x += first
    if SOURCE > 0:
        residual += first
    here = (blocks - begin).to(tl.int32)
    left = numel - first
    if (left >= TILE * BLOCK) & (here >= TILE):
        _quantize_tile(
            x, residual, received, codes, scales, first, left, here, stride, key, down, ranks, factor, divisor,
            TOP, BITS, BLOCK, TILE, STOCHASTIC, SOURCE, True,
        )  # fmt: skip
    else:
        _quantize_tile(
            x, residual, received, codes, scales, first, left, here, stride, key, down, ranks, factor, divisor,
            TOP, BITS, BLOCK, TILE, STOCHASTIC, SOURCE, False,
        )  # fmt: skip


@kernel()
def _quantize_tile(
    x, residual, received, codes, scales, first, left, here, stride, key, down, ranks, factor, divisor,
    TOP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STOCHASTIC: tl.constexpr,
    SOURCE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = BLOCK * BITS // 8
    PLANES: tl.constexpr = 8 // BITS
    rows = tl.arange(0, TILE)
    columns = tl.arange(0, BYTES)
    local = rows[:, None] * BLOCK + columns[None, :]
    # The bits of non-negative floats, as integers, are ordered like the floats, with NaN last.
    largest = tl.zeros((TILE, BYTES), tl.int32)
    for plane in tl.static_range(PLANES):
        v = _value(x, residual, received, left, here, stride, ranks, factor, plane, BITS, BLOCK, TILE, SOURCE, FULL)
        largest = tl.maximum(largest, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    peak_bits = tl.max(largest, axis=1)
    peak = peak_bits.to(tl.float32, bitcast=True)
    finite = peak_bits < 0x7F800000
    live = finite & (peak >= 7.888609052210118e-31)  # 2 ** -100
    sure = tl.where(live, peak, 1.0)
    inverse = tl.div_rn(tl.full((TILE,), TOP, tl.float32), sure)
    if BITS == 1:
        summed = tl.zeros((TILE, BYTES), tl.int32)
        for plane in tl.static_range(PLANES):
            v = _value(x, residual, received, left, here, stride, ranks, factor, plane, BITS, BLOCK, TILE, SOURCE, FULL)
            y = tl.where(live[:, None], tl.abs(v) * inverse[:, None], 0.0)
            summed += (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        if FULL:
            count = tl.full((TILE,), BLOCK * 1.0, tl.float32)
        else:
            count = tl.minimum(tl.maximum(left - rows * BLOCK, 1), BLOCK).to(tl.float32)
        scale = tl.div_rn(tl.sum(summed, axis=1).to(tl.float32) * (sure * down), count)
    else:
        scale = peak * down
    scale_bits = tl.where(finite, tl.where(live, scale, 0.0).to(tl.int32, bitcast=True), 0x7FC00000)
    scale = scale_bits.to(tl.float32, bitcast=True)[:, None]
    packed = tl.zeros((TILE, BYTES), tl.int32)
    for plane in tl.static_range(PLANES):
        v = _value(x, residual, received, left, here, stride, ranks, factor, plane, BITS, BLOCK, TILE, SOURCE, FULL)
        if BITS == 1:
            sure_v = tl.where(live[:, None], v, 0.0)
            even = ((local + plane * BYTES + key) & 1) == 0
            code = ((sure_v > 0.0) | ((sure_v == 0.0) & even)).to(tl.int32)
            meant = (code * 2 - 1).to(tl.float32) * scale
        else:
            y = tl.where(live[:, None], v * inverse[:, None], 0.0)
            if STOCHASTIC:
                y = tl.minimum(tl.maximum(y, -TOP), TOP)
                low = tl.floor(y)
                word = (tl.load(key) & 0x7FFFFFFF).to(tl.uint32)
                h = ((first.to(tl.uint32) + (local + plane * BYTES).to(tl.uint32)) * 0x9E3779B9) ^ word
                h ^= h >> 16
                h *= 0x85EBCA6B
                h ^= h >> 13
                h *= 0xC2B2AE35
                h ^= h >> 16
                u = (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
                code = low.to(tl.int32) + ((y - low) > u).to(tl.int32)
            else:
                # 1.5 * 2 ** 23 leaves no digit behind the point, rounded half to even: the code is in the lowest bits.
                code = (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
            meant = code.to(tl.float32) * scale
        if SOURCE > 0:
            _keep(x, residual, local + plane * BYTES, left, here, rows, v, meant, divisor, SOURCE, FULL)
        packed |= (code & ((1 << BITS) - 1)) << (plane * BITS)
    offsets = rows[:, None] * BYTES + columns[None, :]
    if FULL:
        tl.store(scales + rows, scale_bits)
        tl.store(codes + offsets, packed.to(tl.uint8))
    else:
        tl.store(scales + rows, scale_bits, mask=rows < here)
        tl.store(codes + offsets, packed.to(tl.uint8), mask=rows[:, None] < here)


@kernel()
def _value(
    x, residual, received, left, here, stride, ranks, factor, PLANE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SOURCE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What is quantized, of one plane; zeros behind the end."""
    BYTES: tl.constexpr = BLOCK * BITS // 8
    rows = tl.arange(0, TILE)
    local = rows[:, None] * BLOCK + PLANE * BYTES + tl.arange(0, BYTES)[None, :]
    if SOURCE == 0:
        return _read(x, local, left, here, rows, FULL)
    elif SOURCE == 1:
        total = _read(residual, local, left, here, rows, FULL) + _read(x, local, left, here, rows, FULL)
        return total.to(x.dtype.element_ty).to(tl.float32)
    else:
        total = _total(received, x, here, stride, ranks, PLANE, BITS, BLOCK, TILE, True, FULL) * factor
        if FULL:
            return total
        else:
            return tl.where((local < left) & (rows[:, None] < here), total, 0.0)


@kernel()
def _keep(x, residual, local, left, here, rows, v, meant, divisor, SOURCE: tl.constexpr, FULL: tl.constexpr):
    """The residual: what is left of the sum, or what the rounding of a mean adds to it; zero if it is not finite."""
    rest = _read(residual, local, left, here, rows, FULL)
    if SOURCE == 1:  # noqa: SIM108
        rest = (rest + _read(x, local, left, here, rows, FULL)) - meant
    else:
        rest = rest - (meant - v) * divisor
    rest = tl.where(tl.abs(rest) <= 3.4028234663852886e38, rest, 0.0)
    if FULL:
        tl.store(residual + local, rest)
    else:
        tl.store(residual + local, rest, mask=(local < left) & (rows[:, None] < here))


@kernel()
def _read(x, local, left, here, rows, FULL: tl.constexpr):
    if FULL:
        return tl.load(x + local).to(tl.float32)
    else:
        return tl.load(x + local, mask=(local < left) & (rows[:, None] < here), other=0.0).to(tl.float32)


@kernel("numel", "blocks", "stride", "codes_at", "scales_at", "summed")
def _decode(
    codes, scales, out, numel, blocks, stride, codes_at, scales_at, summed, factor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * TILE
    first = (row * blocks + begin) * BLOCK
    at = (row * stride + codes_at) * 4 + begin * (BLOCK * BITS // 8)
    scales += row * stride + scales_at + begin
    here = (blocks - begin).to(tl.int32)
    left = numel - first
    out += first
    if (left >= TILE * BLOCK) & (here >= TILE):
        for plane in tl.static_range(8 // BITS):
            _decode_plane(
                codes, scales, out, at, left, here, stride, summed, factor, plane, BITS, BLOCK, TILE, SUMS, SCALED, True
            )
    else:
        for plane in tl.static_range(8 // BITS):
            _decode_plane(
                codes, scales, out, at, left, here, stride, summed, factor, plane, BITS, BLOCK, TILE, SUMS, SCALED, False,
            )  # fmt: skip


@kernel()
def _decode_plane(
    codes, scales, out, at, left, here, stride, summed, factor, PLANE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    total = _total(codes + at, scales, here, stride, summed, PLANE, BITS, BLOCK, TILE, SUMS, FULL)
    if SCALED:
        total *= factor
    BYTES: tl.constexpr = BLOCK * BITS // 8
    rows = tl.arange(0, TILE)
    local = rows[:, None] * BLOCK + PLANE * BYTES + tl.arange(0, BYTES)[None, :]
    if FULL:
        tl.store(out + local, total.to(out.dtype.element_ty))
    else:
        tl.store(out + local, total.to(out.dtype.element_ty), mask=(local < left) & (rows[:, None] < here))


@kernel()
def _total(
    codes, scales, here, stride, summed, PLANE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SUMS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The sum of rows, in rank order."""
    total = _meant(codes, scales, here, PLANE, BITS, BLOCK, TILE, FULL)
    if SUMS:
        at = stride.to(tl.int64) * 0
        for _ in range(1, summed):
            at += stride
            total += _meant(codes + at * 4, scales + at, here, PLANE, BITS, BLOCK, TILE, FULL)
    return total


@kernel()
def _meant(
    codes, scales, here, PLANE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    BYTES: tl.constexpr = BLOCK * BITS // 8
    rows = tl.arange(0, TILE)
    offsets = rows[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    if FULL:
        scale = tl.load(scales + rows)
        packed = tl.load(codes + offsets)
    else:
        scale = tl.load(scales + rows, mask=rows < here, other=0.0)
        packed = tl.load(codes + offsets, mask=rows[:, None] < here, other=0)
    if BITS == 8:
        signed = packed.to(tl.int8, bitcast=True)
    else:
        code = (packed.to(tl.int32) >> (PLANE * BITS)) & ((1 << BITS) - 1)
        if BITS == 1:  # noqa: SIM108
            signed = code * 2 - 1
        else:
            signed = (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    return signed.to(tl.float32) * scale[:, None]
