"""The codec as loops over numpy arrays: one pass over memory. The arithmetic is that of `eager`, to the bit.

A block stays in the cache between its two passes, for the scale and for the codes.

Note [Vectorization]
So that the compiler can prove it safe, indices are unsigned (a negative one would count from the end), no slices are created (they
are reference counted), integers are cast back to their width after each operation, and codes are shifted by constants or products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.hooks.compressors.quantized.layout import Key, Part
from gradwire.runtime.jit import loop

# Typed constants: a Python float would make everything float64.
_ROUND = np.float32(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer, half to even
_ZERO, _LEAST = np.float32(0.0), np.float32(2.0**-100)
_NAN = np.float32(np.nan)
_UNIT = np.float32(2.0**-24)
_MAGNITUDE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_SHUFFLE, _MIX, _STIR = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_8, _13, _16 = np.uint32(8), np.uint32(13), np.uint32(16)
_PLAIN, _SUM, _MEAN = 0, 1, 2
"""What is quantized: a tensor, the sum of the residual and another, or a mean. The last two change the residual."""


def available() -> bool:
    return _quantize.compiled() is not None


def quantize(x: Tensor, message: Tensor, part: Part, key: Key) -> None:
    wide = x.to(torch.float32)
    _run(wide, wide, wide, message, part, key, _PLAIN)


def quantize_sum(x: Tensor, residual: Tensor, message: Tensor, part: Part, key: Key, own: int) -> None:
    """Note [The residual of the own row]
    A rank sends the codes of its own row and the rounding of the mean, and what it keeps is the sum minus both, which are added up
    first. So in that row the residual stays the whole sum, and `x` becomes what the codes stand for, until `quantize_mean`.
    """
    _run(residual, x, residual, message, part, key, _SUM, own)


def quantize_mean(
    received: Tensor, residual: Tensor, message: Tensor, part: Part, key: Key, divisor: int, sent: Tensor
) -> None:
    mean = torch.empty(part.numel, dtype=torch.float32)
    decode(received, mean, part, 1 / divisor)
    _run(mean, sent, residual, message, part, key, _MEAN, divisor)


def _run(
    x: Tensor, other: Tensor, residual: Tensor, message: Tensor, part: Part, key: Key, source: int, number: int = 0
) -> None:  # fmt: skip
    run: Any = _quantize.compiled()
    flat = _array(x)
    codes, scales = _message(message)
    run(
        flat, flat.view(np.int32), codes.view(np.int8), scales, part.numel, message.shape[0], part.blocks, part.block, part.stride,
        part.codes_at, part.scales_at, part.bits, part.fraction, key is not None, np.uint32(int(key or 0) & 0x7FFFFFFF),
        source, _array(other), _array(residual), number,
    )  # fmt: skip


def decode(message: Tensor, out: Tensor, part: Part, factor: float | None = None) -> None:
    run: Any = _decode.compiled()
    rows, summed = (message.shape[0], 1) if factor is None else (1, message.shape[0])
    wide = out if out.dtype == torch.float32 else torch.empty(part.numel, dtype=torch.float32)
    codes, scales = _message(message)
    run(
        codes.view(np.int8), scales, _array(wide), part.numel, rows, summed, part.blocks, part.block, part.stride,
        part.codes_at, part.scales_at, part.bits, np.float32(1.0 if factor is None else factor),
    )  # fmt: skip
    out.copy_(wide)


def _message(message: Tensor) -> tuple[Any, Any]:
    """The message's bytes, and the same memory as float32."""
    flat = _array(message).reshape(-1)
    return flat, flat.view(np.float32)


def _array(t: Tensor) -> Any:
    return t.detach().numpy()


@loop
def _quantize(
    x: Any, x_bits: Any, codes: Any, scales: Any, numel: int, rows: int, blocks: int, block: int, stride: int,
    codes_at: int, scales_at: int, bits: int, fraction: int, stochastic: bool, key: Any,
    source: int, other: Any, residual: Any, number: int,
) -> None:  # fmt: skip
    """Scale, round and pack; see Note [The same bits in every implementation].

    Of a sum, `x` is the residual, to which `other` is added, and `number` the own row: see Note [The residual of the own row].
    Of a mean, `other` is what was sent and `number` the divisor.
    """
    small, byte = np.zeros(block, np.int8), np.zeros(block, np.int8)
    peak_word = np.zeros(1, np.int32)
    peak_value = peak_word.view(np.float32)
    nbytes = np.uint64(block * bits // 8)
    top = np.float32((1 << (bits - 1)) - 1) if bits > 1 else np.float32(1 << fraction)
    down = np.float32(1.0 / top)
    divisor = np.float32(number)
    nothing = np.zeros(block, np.int8)  # codes of zeros
    if bits == 1:
        for j in range(block):
            nothing[j] = np.int8((np.uint32(j) + key + np.uint32(1)) & np.uint32(1))
    for row in range(rows):
        for b in range(blocks):
            first = np.uint64((row * blocks + b) * block)
            count = np.uint64(min(max(numel - (row * blocks + b) * block, 0), block))
            at = np.uint64(row * stride + codes_at + b * (block * bits // 8))
            scale_at = np.uint64((row * stride + scales_at) // 4 + b)
            whole = count
            if source == _SUM:
                for j in range(count):
                    x[first + j] += other[first + j]

            peak_bits = np.int32(0)  # the bits of non-negative floats are ordered like the floats, NaN last
            for j in range(count):
                peak_bits = max(peak_bits, np.int32(x_bits[first + j] & _MAGNITUDE))
            peak_word[0] = peak_bits
            peak = peak_value[0]
            inverse = top / peak
            if peak_bits >= _INFINITE or peak < _LEAST:
                scales[scale_at] = _ZERO if peak_bits < _INFINITE else _NAN
                count = np.uint64(0)  # codes of zeros
            elif bits == 1:
                summed = np.int32(0)
                for j in range(count):
                    summed = np.int32(summed + np.int32((abs(x[first + j]) * inverse + _ROUND) - _ROUND))
                scales[scale_at] = (np.float32(summed) * (peak * down)) / np.float32(count)
                for j in range(count):
                    small[j] = np.int8(np.int8(x[first + j] > _ZERO) | (np.int8(x[first + j] == _ZERO) & nothing[j]))
            elif stochastic:
                scales[scale_at] = peak * down
                for j in range(count):
                    h = np.uint32(np.uint32(np.uint32(first + j) * _SHUFFLE) ^ key)
                    h = np.uint32(np.uint32(h ^ np.uint32(h >> _16)) * _MIX)
                    h = np.uint32(np.uint32(h ^ np.uint32(h >> _13)) * _STIR)
                    h = np.uint32(h ^ np.uint32(h >> _16))
                    u = np.float32(np.int32(h >> _8)) * _UNIT
                    y = min(max(x[first + j] * inverse, -top), top)
                    low = (y + _ROUND) - _ROUND  # floor: rounded half to even, minus one if that was up
                    low = low - np.float32(1.0) if low > y else low
                    small[j] = np.int8(np.int32(low) + np.int32((y - low) > u))
            else:
                scales[scale_at] = peak * down
                for j in range(count):
                    small[j] = np.int8(np.int32((x[first + j] * inverse + _ROUND) - _ROUND))
            for j in range(count, np.uint64(block)):
                small[j] = nothing[j]

            if bits == 8:
                for j in range(nbytes):
                    codes[at + j] = small[j]
            elif bits == 4:
                for j in range(nbytes):
                    codes[at + j] = np.int8((small[j] & 15) | (small[j + nbytes] << 4))
            elif bits == 2:
                for j in range(nbytes):
                    low_half = np.int8((small[j] & 3) | ((small[j + nbytes] & 3) << 2))
                    high_half = np.int8((small[j + 2 * nbytes] & 3) | ((small[j + 3 * nbytes] & 3) << 2))
                    codes[at + j] = np.int8(low_half | (high_half << 4))
            else:
                for j in range(nbytes):
                    byte[j] = small[7 * nbytes + j]
                for plane in range(7):
                    base = np.uint64(6 - plane) * nbytes
                    for j in range(nbytes):
                        byte[j] = np.int8(np.int8(byte[j] << 1) | small[base + j])
                for j in range(nbytes):
                    codes[at + j] = byte[j]
                for j in range(whole):
                    small[j] = np.int8(2 * small[j] - 1)

            scale = scales[scale_at]
            if source == _MEAN:
                for j in range(whole):
                    rounding = (np.float32(small[j]) * scale - x[first + j]) * divisor
                    rest = residual[first + j] - (other[first + j] + rounding)
                    residual[first + j] = rest if rest - rest == 0 else _ZERO
            elif source == _SUM and row == number:
                for j in range(whole):
                    other[first + j] = np.float32(small[j]) * scale
            elif source == _SUM:
                for j in range(whole):
                    rest = x[first + j] - np.float32(small[j]) * scale
                    x[first + j] = rest if rest - rest == 0 else _ZERO


@loop
def _decode(
    codes: Any, scales: Any, out: Any, numel: int, rows: int, summed: int, blocks: int, block: int, stride: int,
    codes_at: int, scales_at: int, bits: int, factor: Any,
) -> None:  # fmt: skip
    """Decode; if `summed` is more than one, the sum over as many rows, times `factor`."""
    small, byte = np.zeros(block, np.int8), np.zeros(block, np.int8)
    nbytes = np.uint64(block * bits // 8)
    planes = 8 // bits
    for row in range(rows):
        for b in range(blocks):
            first = np.uint64((row * blocks + b) * block)
            count = np.uint64(min(max(numel - (row * blocks + b) * block, 0), block))
            for r in range(summed):
                at = np.uint64((row + r) * stride + codes_at + b * (block * bits // 8))
                scale = scales[np.uint64(((row + r) * stride + scales_at) // 4 + b)]
                if bits == 8:
                    if r == 0:
                        for j in range(count):
                            out[first + j] = np.float32(codes[at + j]) * scale
                    else:
                        for j in range(count):
                            out[first + j] += np.float32(codes[at + j]) * scale
                    continue
                for j in range(nbytes):
                    byte[j] = codes[at + j]
                # The last plane is in the high bits. Shifting it down extends its sign; with one bit that gives -1 or 0.
                for plane in range(planes):
                    base = np.uint64(planes - 1 - plane) * nbytes
                    if bits == 4:
                        for j in range(nbytes):
                            small[base + j] = byte[j] >> 4
                        for j in range(nbytes):
                            byte[j] = np.int8(byte[j] << 4)
                    elif bits == 2:
                        for j in range(nbytes):
                            small[base + j] = byte[j] >> 6
                        for j in range(nbytes):
                            byte[j] = np.int8(byte[j] << 2)
                    else:
                        for j in range(nbytes):
                            small[base + j] = np.int8(-2 * (byte[j] >> 7) - 1)
                        for j in range(nbytes):
                            byte[j] = np.int8(byte[j] << 1)
                if r == 0:
                    for j in range(count):
                        out[first + j] = np.float32(small[j]) * scale
                else:
                    for j in range(count):
                        out[first + j] += np.float32(small[j]) * scale
            if summed > 1 or factor != np.float32(1.0):
                for j in range(count):
                    out[first + j] *= factor
