"""Chooses the quickest way to encode and decode that there is for a tensor; all give the same bits.

On CUDA that is Triton, where it is installed; on the CPU compiled loops, where numba is installed; elsewhere torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.compressors.quantized import eager, loops
from gradwire.hooks.compressors.quantized.layout import Part
from gradwire.jit import kernels


def quantize(x: Tensor, message: Tensor, part: Part, key: int | None) -> None:
    """Codes and scales of `x`, of any floating-point dtype, into its part of `message`, of one row per rank."""
    if part.blocks == 0:
        return
    unused = message[:, part.scales_at + 4 * part.blocks : part.scales_at + -(-part.blocks // 4) * 16]
    if unused.shape[1]:
        unused.zero_()  # what is sent is never what the memory happened to hold
    way = _way(x)
    way.quantize(x.to(torch.float32) if way is loops else x, message, part, key)


def dequantize(message: Tensor, out: Tensor, part: Part) -> None:
    """What the codes stand for, one row after another, into `out`, of any floating-point dtype."""
    if part.numel == 0:
        return
    way = _way(out)
    if way is loops and out.dtype != torch.float32:
        wide = torch.empty(part.numel, dtype=torch.float32, device=out.device)
        way.dequantize(message, wide, part)
        out.copy_(wide)
    else:
        way.dequantize(message, out, part)


def total(message: Tensor, out: Tensor, part: Part, factor: float) -> None:
    """The sum over the rows, times `factor`, into `out`, which is float32."""
    if part.numel:
        _way(out).total(message, out, part, factor)


def _way(t: Tensor) -> Any:
    if t.device.type == "cuda":
        return kernels("gradwire.hooks.compressors.quantized.kernels") or eager
    return loops if t.device.type == "cpu" and loops.available() else eager
