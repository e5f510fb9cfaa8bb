"""Dispatches to the fastest implementation for a tensor; all of them give the same bits.

On CUDA that is Triton if installed; on the CPU compiled loops if numba is installed; otherwise torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.compressors.quantized import eager, loops
from gradwire.hooks.compressors.quantized.layout import Part
from gradwire.runtime.jit import kernels


def quantize(x: Tensor, message: Tensor, part: Part, key: int | None) -> None:
    """Write codes and scales of `x`, of any floating-point dtype, to its part of `message`, which has one row per rank."""
    if part.blocks == 0:
        return
    unused = message[:, part.scales_at + 4 * part.blocks : part.scales_at + -(-part.blocks // 4) * 16]
    if unused.shape[1]:
        unused.zero_()  # uninitialized memory is never sent
    implementation = _implementation(x)
    implementation.quantize(x.to(torch.float32) if implementation is loops else x, message, part, key)


def dequantize(message: Tensor, out: Tensor, part: Part) -> None:
    """Decode the rows one after another to `out`, of any floating-point dtype."""
    if part.numel == 0:
        return
    implementation = _implementation(out)
    if implementation is loops and out.dtype != torch.float32:
        wide = torch.empty(part.numel, dtype=torch.float32, device=out.device)
        implementation.dequantize(message, wide, part)
        out.copy_(wide)
    else:
        implementation.dequantize(message, out, part)


def total(message: Tensor, out: Tensor, part: Part, factor: float) -> None:
    """Write the sum over the rows, times `factor`, to `out`, which is float32."""
    if part.numel:
        _implementation(out).total(message, out, part, factor)


def _implementation(t: Tensor) -> Any:
    if t.device.type == "cuda":
        return kernels("gradwire.hooks.compressors.quantized.kernels") or eager
    return loops if t.device.type == "cpu" and loops.available() else eager
