"""The codec as loops over numpy arrays: one pass over memory. The arithmetic is that of `eager`, to the bit.

Blocks lie in the cache while they are looked at twice, first for the scale and then for the codes. A block that the tensor does not
fill is copied beside zeros first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.hooks.quantized.layout import Part
from gradwire.jit import loop

# Numbers in loops have a type; a Python float would make everything float64.
_ROUND = np.float32(12582912.0)  # 1.5 * 2 ** 23: adding it leaves no digit behind the point, rounded half to even
_ZERO, _LEAST = np.float32(0.0), np.float32(2.0**-100)
_NAN = np.float32(np.nan)
_UNIT = np.float32(2.0**-24)
_MAGNITUDE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_MASK = np.uint64(0xFFFFFFFF)


def available() -> bool:
    """Whether numba is there."""
    return _quantise.compiled() is not None


def quantise(x: Tensor, message: Tensor, part: Part, key: int | None) -> None:
    """See `eager.quantise`."""
    run = _quantise.compiled()
    assert run is not None
    flat = _array(x)
    codes, scales = _message(message)
    run(
        flat, flat.view(np.int32), codes, scales, part.numel, message.shape[0], part.blocks, part.block, part.stride,
        part.codes_at, part.scales_at, part.bits, part.fraction, key is not None, np.uint64(key or 0),
    )  # fmt: skip


def dequantise(message: Tensor, out: Tensor, part: Part) -> None:
    """See `eager.dequantise`."""
    _run_decode(message, out, part, rows=message.shape[0], summed=1, factor=1.0)


def total(message: Tensor, out: Tensor, part: Part, factor: float) -> None:
    """See `eager.total`."""
    _run_decode(message, out, part, rows=1, summed=message.shape[0], factor=factor)


def _run_decode(message: Tensor, out: Tensor, part: Part, *, rows: int, summed: int, factor: float) -> None:
    run = _decode.compiled()
    assert run is not None
    codes, scales = _message(message)
    run(
        codes, scales, _array(out), part.numel, rows, summed, part.blocks, part.block, part.stride,
        part.codes_at, part.scales_at, part.bits, np.float32(factor),
    )  # fmt: skip


def _message(message: Tensor) -> tuple[Any, Any]:
    """The message's bytes, and the same memory as float32."""
    flat = _array(message).reshape(-1)
    return flat, flat.view(np.float32)


def _array(t: Tensor) -> Any:
    return t.detach().numpy()


@loop
def _quantise(
    x: Any, x_bits: Any, codes: Any, scales: Any, numel: int, rows: int, blocks: int, block: int, stride: int,
    codes_at: int, scales_at: int, bits: int, fraction: int, stochastic: bool, key: Any,
) -> None:  # fmt: skip
    """Scale, round and pack; see Note [The same bits in every way]."""
    edge = np.zeros(block, np.float32)
    edge_bits = edge.view(np.int32)
    small = np.zeros(block, np.int8)
    nbytes = block * bits // 8
    top = np.float32((1 << (bits - 1)) - 1) if bits > 1 else np.float32(1.0)
    down = np.float32(1.0 / top)
    for row in range(rows):
        for b in range(blocks):
            first = (row * blocks + b) * block
            count = min(max(numel - first, 0), block)
            if count == block:
                values = x[first : first + block]
                words = x_bits[first : first + block]
            else:
                edge[:] = _ZERO
                for j in range(count):
                    edge[j] = x[first + j]
                values = edge
                words = edge_bits
            peak_bits = np.int32(0)  # as integers, floats without sign are ordered as they are as numbers, NaN last
            for j in range(block):
                peak_bits = max(peak_bits, words[j] & _MAGNITUDE)
            at = row * stride + codes_at + b * nbytes
            packed = codes[at : at + nbytes]
            scale_at = (row * stride + scales_at) // 4 + b
            peak = _ZERO
            if peak_bits < _INFINITE:
                for j in range(block):
                    if words[j] & _MAGNITUDE == peak_bits:
                        peak = abs(values[j])
                        break
            if not peak >= _LEAST:
                scales[scale_at] = _ZERO if peak_bits < _INFINITE else _NAN
                packed[:] = 255 if bits == 1 else 0
                continue
            if bits == 1:
                unit = np.float32(1 << fraction)
                inverse = unit / peak
                summed = np.int32(0)
                for j in range(block):
                    summed += np.int32((abs(values[j]) * inverse + _ROUND) - _ROUND)
                scales[scale_at] = (np.float32(summed) * (peak * (np.float32(1.0) / unit))) / np.float32(max(count, 1))
                for j in range(block):
                    small[j] = values[j] >= _ZERO
            else:
                scales[scale_at] = peak * down
                inverse = top / peak
                if stochastic:
                    for j in range(block):
                        h = (np.uint64(first + j) * np.uint64(0x9E3779B9) ^ key) & _MASK
                        h ^= h >> np.uint64(16)
                        h = (h * np.uint64(0x85EBCA6B)) & _MASK
                        h ^= h >> np.uint64(13)
                        h = (h * np.uint64(0xC2B2AE35)) & _MASK
                        h ^= h >> np.uint64(16)
                        u = np.float32(np.int32(h >> np.uint64(8))) * _UNIT
                        y = min(max(values[j] * inverse, -top), top)
                        low = np.floor(y)
                        small[j] = np.int32(low) + ((y - low) > u)
                elif bits == 8:
                    for j in range(block):
                        packed[j] = np.uint8(np.int32((values[j] * inverse + _ROUND) - _ROUND))
                    continue
                else:
                    for j in range(block):
                        small[j] = np.int32((values[j] * inverse + _ROUND) - _ROUND)
            if bits == 8:
                for j in range(nbytes):
                    packed[j] = np.uint8(small[j])
            elif bits == 4:
                for j in range(nbytes):
                    packed[j] = (np.uint8(small[j]) & 15) | (np.uint8(small[j + nbytes]) << 4)
            elif bits == 2:
                for j in range(nbytes):
                    low_half = (np.uint8(small[j]) & 3) | ((np.uint8(small[j + nbytes]) & 3) << 2)
                    high_half = (np.uint8(small[j + 2 * nbytes]) & 3) | ((np.uint8(small[j + 3 * nbytes]) & 3) << 2)
                    packed[j] = low_half | (high_half << 4)
            else:
                for j in range(nbytes):
                    packed[j] = np.uint8(small[j])
                for plane in range(1, 8):
                    shifted = small[plane * nbytes : (plane + 1) * nbytes]
                    for j in range(nbytes):
                        packed[j] |= np.uint8(shifted[j] << plane)


@loop
def _decode(
    codes: Any, scales: Any, out: Any, numel: int, rows: int, summed: int, blocks: int, block: int, stride: int,
    codes_at: int, scales_at: int, bits: int, factor: Any,
) -> None:  # fmt: skip
    """What the codes stand for; with `summed` rows more than one, their sum, times `factor`."""
    edge = np.zeros(block, np.float32)
    more = np.zeros(block, np.float32)
    nbytes = block * bits // 8
    one = np.float32(1.0)
    for row in range(rows):
        for b in range(blocks):
            first = (row * blocks + b) * block
            count = min(max(numel - first, 0), block)
            if count == 0:
                return
            whole = out[first : first + block] if count == block else edge
            for r in range(summed):
                target = whole if r == 0 else more
                at = (row + r) * stride + codes_at + b * nbytes
                packed = codes[at : at + nbytes]
                scale = scales[((row + r) * stride + scales_at) // 4 + b]
                if bits == 8:
                    for j in range(nbytes):
                        target[j] = np.float32(np.int8(packed[j])) * scale
                elif bits == 4:
                    high = target[nbytes:]
                    for j in range(nbytes):
                        c = np.int32(packed[j])
                        target[j] = np.float32(((c & 15) ^ 8) - 8) * scale
                        high[j] = np.float32((c >> 4 ^ 8) - 8) * scale
                elif bits == 2:
                    for plane in range(4):
                        stretch = target[plane * nbytes : (plane + 1) * nbytes]
                        for j in range(nbytes):
                            stretch[j] = np.float32((((np.int32(packed[j]) >> (2 * plane)) & 3) ^ 2) - 2) * scale
                else:
                    for plane in range(8):
                        stretch = target[plane * nbytes : (plane + 1) * nbytes]
                        for j in range(nbytes):
                            stretch[j] = np.float32(((np.int32(packed[j]) >> plane) & 1) * 2 - 1) * scale
                if r > 0:
                    for j in range(block):
                        whole[j] += more[j]
            if factor != one:
                for j in range(block):
                    whole[j] *= factor
            if count < block:
                for j in range(count):
                    out[first + j] = edge[j]
