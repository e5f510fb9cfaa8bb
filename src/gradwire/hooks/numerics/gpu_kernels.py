# mypy: disable-error-code="no-untyped-def, untyped-decorator, valid-type, name-defined"
# Kernels are written in Triton's language, whose parameters and annotations are not Python's.
"""Triton kernels in place of many small operations, or of several passes over a bucket.

Low-rank kernels compute in float64, at a negligible cost for this size; the one for residuals does what torch does, to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.hooks.numerics.triton_compat import kernel, tl

_SEGMENT = 1024
_PER_PROGRAM = 4096


def inverse_factors(gram: Tensor) -> Tensor:
    count, rank, _ = gram.shape
    out = torch.empty_like(gram)
    with torch.cuda.device(gram.device):
        _invert[(count,)](gram, out, rank, RANK=1 << (rank - 1).bit_length(), num_warps=1 if rank <= 8 else 4)
    return out


def keep_directions(new: Tensor, old: Tensor, begins: Tensor) -> None:
    """See `orthogonal.keep_directions`. Columns are stored one after another; the first is from begins[0] to begins[1]."""
    with torch.cuda.device(new.device):
        _unit[(begins.numel() - 1,)](new, old, begins, SEGMENT=_SEGMENT, num_warps=4)


def keep_unsent(wanted: Tensor, sent: Tensor) -> None:
    """`wanted -= sent`, then zero what is not finite. `wanted` is float32, both are contiguous."""
    if wanted.numel():
        with torch.cuda.device(wanted.device):
            _keep_unsent[(-(-wanted.numel() // _PER_PROGRAM),)](wanted, sent, wanted.numel(), SIZE=_PER_PROGRAM)


@kernel("rank")
def _invert(gram, out, rank, RANK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * rank * rank
    line = tl.arange(0, RANK)
    i, j = line[:, None], line[None, :]
    inside = (i < rank) & (j < rank)
    a = tl.load(gram + at + i * rank + j, mask=inside, other=0.0)
    poison = tl.sum(tl.sum(a, 1), 0) * 0.0
    trace = tl.sum(tl.sum(tl.where(i == j, a, 0.0), 1), 0)
    least = trace * 1e-15 + 2.2250738585072014e-308
    a += tl.where(i == j, least, 0.0)
    factor = tl.zeros((RANK, RANK), tl.float64)
    for k in range(rank):
        column = tl.sum(tl.where(j == k, a, 0.0), 1)
        pivot = tl.maximum(tl.sum(tl.where(line == k, column, 0.0), 0), least)
        column = tl.where(line >= k, column / tl.sqrt(pivot), 0.0)
        a -= column[:, None] * column[None, :]
        factor = tl.where(j == k, column[:, None], factor)
    inverse = tl.zeros((RANK, RANK), tl.float64)
    for k in range(rank):
        row = tl.sum(tl.where(i == k, factor, 0.0), 0)
        pivot = tl.sum(tl.where(line == k, row, 0.0), 0)
        known = tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(i == k, ((tl.where(line == k, 1.0, 0.0) - known) / pivot)[None, :], inverse)
    tl.store(out + at + j * rank + i, inverse + poison, mask=inside)


@kernel()
def _unit(new, old, begins, SEGMENT: tl.constexpr):
    begin = tl.load(begins + tl.program_id(0))
    end = tl.load(begins + tl.program_id(0) + 1)
    offsets = tl.arange(0, SEGMENT)
    squares = tl.zeros((SEGMENT,), tl.float64)
    for at in range(begin, end, SEGMENT):
        v = tl.load(new + at + offsets, mask=at + offsets < end, other=0.0).to(tl.float64)
        squares += v * v
    length = tl.sqrt(tl.sum(squares, 0))
    if (length > 0.0) & (length < float("inf")):
        for at in range(begin, end, SEGMENT):
            v = tl.load(new + at + offsets, mask=at + offsets < end, other=0.0).to(tl.float64)
            tl.store(old + at + offsets, (v / length).to(old.dtype.element_ty), mask=at + offsets < end)


@kernel("numel")
def _keep_unsent(wanted, sent, numel, SIZE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * SIZE
    offsets = tl.arange(0, SIZE)
    there = offsets < numel - first
    owed = tl.load(wanted + first + offsets, mask=there) - tl.load(sent + first + offsets, mask=there).to(tl.float32)
    tl.store(wanted + first + offsets, tl.where(tl.abs(owed) <= 3.4028234663852886e38, owed, 0.0), mask=there)
