"""The codec in torch operations: for any device, and the reference for the compiled implementations, to the bit.

Note [The same bits in every implementation]
All implementations compute in float32 and in the same steps, each rounded once:

- `peak` is the largest absolute value of a block; a block is `live` if that is finite and at least 2 ** -100, so that nothing
  below is subnormal or overflows;
- 8, 4 and 2 bits: scale = peak * (1 / top), inverse = top / peak, y = x * inverse, code = y rounded half to even;
- stochastic: y is clamped to [-top, top], code = floor(y) + 1 if y - floor(y) > u, otherwise floor(y). So values on a level, in
  particular zero, are exact. u is a 24-bit hash of the element's index and a key, over 2 ** 24;
- 1 bit: code = x > 0, and for zeros 1 if the sum of the element's index and the key is even: a zero has no sign, and always
  the same one would accumulate over steps;
- the scale of 1 bit is the mean absolute value. A sum of floats depends on its order, so |x| * (2 ** f / peak) is
  rounded and added up in integers, and the scale is (sum * (peak * 2 ** -f)) / count of the block's elements;
- a block below the limit has scale zero, one that is not finite scale NaN. Both have the codes of zeros;
- decoding is code * scale. Sums are in rank order, and are multiplied by a factor at the end.

Operations must not be contracted: a fused multiply-add rounds once where two steps round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.hooks.compressors.quantized.layout import Key, Part
from gradwire.hooks.numerics.elementwise import float32, padded
from gradwire.hooks.numerics.rng import noise

LEAST = 2.0**-100
"""Blocks whose largest element is smaller are encoded as zeros."""


def quantize(x: Tensor, message: Tensor, part: Part, key: Key) -> None:
    rows = message.shape[0]
    values = padded(x.to(torch.float32), rows * part.row).view(rows, part.blocks, part.block)
    magnitudes = values.abs()
    peak = magnitudes.amax(-1)
    finite = peak.isfinite()
    live = finite & (peak >= LEAST)
    sure = torch.where(live, peak, 1.0)
    if part.bits == 1:
        scale = _mean_magnitude(magnitudes, live, sure, part, rows)
        sure_values = torch.where(live.unsqueeze(-1), values, 0.0)
        even = (torch.arange(part.block, device=x.device) + (key or 0)) % 2 == 0
        code = (sure_values > 0) | ((sure_values == 0) & even)
    else:
        scale = peak * float32(1 / part.top)
        inverse = torch.full_like(sure, part.top).div_(sure).unsqueeze(-1)
        y = torch.where(live.unsqueeze(-1), values * inverse, 0.0)
        code = y.round_() if key is None else _stochastic(y, part, key)
    scale = torch.where(live, scale, torch.where(finite, torch.zeros_like(peak), torch.nan))
    message.narrow(1, part.scales_at, 4 * part.blocks).copy_(scale.view(torch.uint8))
    codes = message.narrow(1, part.codes_at, part.blocks * part.block_bytes)
    codes.copy_(_pack(code.to(torch.int32), part).view(rows, -1))


def decode(message: Tensor, out: Tensor, part: Part, factor: float | None = None) -> None:
    if factor is None:
        out.copy_(_decode(message, part).view(-1)[: part.numel])
        return
    first, *others = (_decode(row, part).view(-1)[: part.numel] for row in message.split(1))
    out.copy_(first)
    for other in others:
        out.add_(other)
    out.mul_(float32(factor))


def _stochastic(y: Tensor, part: Part, key: Tensor | int) -> Tensor:
    y = y.clamp_(-part.top, part.top)
    low = y.floor()
    u = noise(torch.arange(y.numel(), device=y.device), key).view_as(y)
    return low + ((y - low) > u)


def _mean_magnitude(magnitudes: Tensor, live: Tensor, sure: Tensor, part: Part, rows: int) -> Tensor:
    """See Note [The same bits in every implementation]."""
    inverse = torch.full_like(sure, 2.0**part.fraction).div_(sure).unsqueeze(-1)
    parts = torch.where(live.unsqueeze(-1), magnitudes * inverse, 0.0).round_().to(torch.int32)
    summed = parts.sum(-1).to(torch.float32) * (sure * 2.0**-part.fraction)
    first = torch.arange(rows * part.blocks, device=sure.device).view(rows, part.blocks) * part.block
    count = (part.numel - first).clamp_(1, part.block).to(torch.float32)
    return summed / count


def _pack(code: Tensor, part: Part) -> Tensor:
    if part.bits == 8:
        return code.to(torch.uint8)
    planes = code.bitwise_and_((1 << part.bits) - 1).view(-1, part.planes, part.block_bytes)
    packed = planes[:, 0].clone()
    for plane in range(1, part.planes):
        packed |= planes[:, plane] << (plane * part.bits)
    return packed.to(torch.uint8)


def _decode(message: Tensor, part: Part) -> Tensor:
    rows = message.shape[0]
    scale = message.narrow(1, part.scales_at, 4 * part.blocks).contiguous().view(torch.float32)
    scale = scale.view(rows, part.blocks, 1)
    packed = message.narrow(1, part.codes_at, part.blocks * part.block_bytes).reshape(rows, part.blocks, -1)
    if part.bits == 8:
        return packed.contiguous().view(torch.int8).to(torch.float32) * scale
    wide = packed.to(torch.int32)
    mask = (1 << part.bits) - 1
    planes = torch.stack([(wide >> (plane * part.bits)) & mask for plane in range(part.planes)], 2)
    if part.bits == 1:
        signed = planes * 2 - 1
    else:
        half = 1 << (part.bits - 1)
        signed = (planes ^ half) - half
    return signed.view(rows, part.blocks, part.block).to(torch.float32) * scale
