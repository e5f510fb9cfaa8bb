# mypy: disable-error-code="no-untyped-def, untyped-decorator, valid-type, name-defined"
# Kernels are written in Triton's language, whose parameters and annotations are not Python's.
"""Triton kernels that look for elements that are not finite: one finds out whether there are any, one where they are.

Both go over many tensors in one launch: see `nonfinite_scan.Places`. The first kernel reads each element once, at the speed of
memory, and writes only if one is not finite. It has a program for each tile, so that other programs read while one waits for the
address of its tile; a loop over tiles leaves memory idle for a tenth of the time. The second needs so many registers that it reads
at a fraction of that speed. It does nothing unless the first has found something, so it has few programs, each for every n-th tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.hooks.numerics.triton_compat import inlined, kernel, tl

if TYPE_CHECKING:
    from gradwire.reducer.checks.nonfinite_scan import Places

TILE = 4096
_PROGRAMS = 1056
"""Of the second kernel."""
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def detect(places: Places, addresses: Tensor, flag: Tensor, *, aligned: bool, limit: float) -> None:
    """Store 1 in `flag` if an element of the tensors at `addresses` is NaN, infinite, or not less than `limit`.

    `aligned`: all addresses are 16-byte aligned. A tensor whose address is null is skipped.
    """
    with torch.cuda.device(flag.device):
        _detect[(places.tiles,)](
            addresses, places.tensors, places.tensor_of_tile, flag, limit,
            DTYPE=getattr(tl, _DTYPES[places.dtype]), TILE=TILE, ALIGNED=aligned, num_warps=4,
        )  # fmt: skip


def find(places: Places, addresses: Tensor, flag: Tensor, found: Tensor, *, limit: float) -> None:
    """Unless `flag` is 0: of each parameter that has one, store the first NaN, the first infinity and the first finite element
    of at least `limit` in `found`, if they are before those that are there."""
    with torch.cuda.device(flag.device):
        _find[(min(places.tiles, _PROGRAMS),)](
            addresses, places.tensors, places.tensor_of_tile, places.members, flag, found, places.tiles, limit,
            DTYPE=getattr(tl, _DTYPES[places.dtype]), TILE=TILE, num_warps=16,
        )  # fmt: skip


@inlined
def _load(address, start, numel, DTYPE: tl.constexpr, TILE: tl.constexpr):
    x = address.to(tl.pointer_type(DTYPE)) + start
    local = tl.arange(0, TILE)
    if start + TILE <= numel:  # noqa: SIM108
        v = tl.load(x + local)
    else:
        v = tl.load(x + local, mask=local < numel - start, other=0.0)
    if DTYPE != tl.float64:  # noqa: SIM300
        v = v.to(tl.float32)
    return v


@kernel("limit")
def _detect(
    addresses, tensors, tensor_of_tile, flag, limit, DTYPE: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_tile + tile)
    address = tl.load(addresses + tensor)
    if address != 0:
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        start = (tile - tl.load(tensors + tensor * 4 + 1)).to(tl.int64) * TILE
        v = _load(address, start, tl.load(tensors + tensor * 4), DTYPE, TILE)
        if tl.max((~(tl.abs(v) < limit)).to(tl.int32), 0) != 0:  # NaN is not less than anything
            tl.store(flag, 1.0)


@kernel("tiles", "limit")
def _find(
    addresses, tensors, tensor_of_tile, members, flag, found, tiles, limit, DTYPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    if tl.load(flag) != 0.0:
        none = tl.full((TILE,), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            tensor = tl.load(tensor_of_tile + tile)
            address = tl.load(addresses + tensor)
            if address != 0:
                row = tensors + tensor * 4
                start = (tile - tl.load(row + 1)).to(tl.int64) * TILE
                v = _load(address, start, tl.load(row), DTYPE, TILE)
                a = tl.abs(v)
                wrong = ~(a < limit)
                if tl.max(wrong.to(tl.int32), 0) != 0:
                    infinite = a == float("inf")
                    nan = v != v
                    beyond = wrong & ~(nan | infinite)
                    first = tl.load(row + 2)
                    for member in range(first, first + tl.load(row + 3)):
                        begin = tl.load(members + member * 3)
                        end = tl.load(members + member * 3 + 1)
                        if (begin < start + TILE) & (end > start):
                            place = start + tl.arange(0, TILE) - begin
                            inside = (place >= 0) & (place < end - begin)
                            out = found + tl.load(members + member * 3 + 2) * 3
                            tl.atomic_min(out, tl.min(tl.where(inside & nan, place, none), 0))
                            tl.atomic_min(out + 1, tl.min(tl.where(inside & infinite, place, none), 0))
                            tl.atomic_min(out + 2, tl.min(tl.where(inside & beyond, place, none), 0))
