# mypy: disable-error-code="no-untyped-def, untyped-decorator, valid-type, name-defined"
"""Passes over a bucket as Triton kernels, where torch needs several. The arithmetic is that of the torch operations, to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.hooks.numerics.triton_compat import kernel, tl

_PER_PROGRAM = 4096


def keep_unsent(wanted: Tensor, sent: Tensor) -> None:
    """`wanted -= sent`, then zero what is not finite. `wanted` is float32, both are contiguous."""
    if wanted.numel():
        with torch.cuda.device(wanted.device):
            _keep_unsent[(-(-wanted.numel() // _PER_PROGRAM),)](wanted, sent, wanted.numel(), SIZE=_PER_PROGRAM)


@kernel("numel")
def _keep_unsent(wanted, sent, numel, SIZE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * SIZE
    offsets = tl.arange(0, SIZE)
    there = offsets < numel - first
    owed = tl.load(wanted + first + offsets, mask=there) - tl.load(sent + first + offsets, mask=there).to(tl.float32)
    tl.store(wanted + first + offsets, tl.where(tl.abs(owed) <= 3.4028234663852886e38, owed, 0.0), mask=there)
