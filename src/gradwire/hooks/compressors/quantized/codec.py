"""Dispatches to the fastest implementation for a tensor; all of them give the same bits.

On CUDA that is Triton if installed; on the CPU compiled loops if numba is installed; otherwise torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.compressors.quantized import eager, loops
from gradwire.hooks.compressors.quantized.layout import Key, Part
from gradwire.runtime.jit import kernels


def quantize(x: Tensor, message: Tensor, part: Part, key: Key) -> None:
    """Write codes and scales of `x`, of any floating-point dtype, to its part of `message`, one row per rank after another."""
    if part.blocks:
        _clear_padding(message, part)
        _implementation(x).quantize(x, message, part, key)


def _clear_padding(message: Tensor, part: Part) -> None:
    codes, scales = part.codes_at + part.blocks * part.block_bytes, part.scales_at + 4 * part.blocks
    for begin, end in ((codes, part.scales_at), (scales, part.scales_at + -(-part.blocks // 4) * 16)):
        if begin < end:
            message[:, begin:end].zero_()  # uninitialized memory is never sent


def decode(message: Tensor, out: Tensor, part: Part, factor: float | None = None) -> None:
    """Decode the rows one after another to `out`; with a factor, write their sum times it to `out`, which is float32 then."""
    if part.numel:
        _implementation(out).decode(message, out, part, factor)


def has_feedback(x: Tensor, residual: Tensor) -> bool:
    """Whether `quantize_sum` and `quantize_mean` are available."""
    fits = x.is_floating_point() and x.itemsize <= 4 if x.is_cuda else x.dtype == torch.float32
    return fits and residual.dtype == torch.float32 and _implementation(x) is not eager


def quantize_sum(x: Tensor, residual: Tensor, message: Tensor, part: Part, key: Key, own: int) -> None:
    """As `quantize`, of `x` plus the residual, which becomes what the codes leave of that, or zero if it is not finite. That of row
    `own` is final only after `quantize_mean`, which may need what `x` is by then there."""
    if part.blocks:
        _clear_padding(message, part)
        _implementation(x).quantize_sum(x, residual, message, part, key, own)


def quantize_mean(
    received: Tensor, mine: tuple[Tensor, Tensor], message: Tensor, part: Part, key: Key, divisor: int
) -> None:
    """As `quantize`, of the sum of the rows of `received` over `divisor`. Its rounding is sent by this rank: the residual pays for
    it. `mine` is the residual of this part, and what `quantize_sum` has left of `x` there."""
    if part.blocks:
        _clear_padding(message, part)
        _implementation(received).quantize_mean(received, mine[0], message, part, key, divisor, mine[1])


def _implementation(t: Tensor) -> Any:
    if t.device.type == "cuda":
        return kernels("gradwire.hooks.compressors.quantized.kernels") or eager
    return loops if t.device.type == "cpu" and loops.available() else eager
