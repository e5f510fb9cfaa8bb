"""How pieces of all ranks become one, in place and in rank order: the reference's arithmetic, without its copies.

By compiled loops where numba is installed, else by numpy or torch, with the same bits.

Note [Once through the cache]
numpy adds in one pass and copies the sum in another. A compiled loop stores each sum where it was read from, at once, for two and
four ranks, and in blocks of 256 elements for other numbers.

Note [The same bits]
Elements are added in rank order. The mean is the sum divided by the number of ranks, or, where that is a power of two, the sum
times its inverse, which rounds to the same bits (see `divide`). bfloat16 is widened to float32, added there and rounded once,
to nearest and ties to even, as the reference does it. Only which of its many bit patterns a NaN has may differ.

Arrays are flat, of one length and one dtype, and do not overlap. That an argument is None is known when a loop is compiled.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.collectives import ReduceOp
from gradwire.collectives.reference import FOLDS, reduce_tensors
from gradwire.runtime.jit import compiled_once, loop

_SUM, _AVG = ReduceOp.SUM, ReduceOp.AVG
SUMMED: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}
"""Dtypes that numpy adds up, in a third of torch's time per call and to the same bits."""

BLOCK = 512 << 10
"""Bytes that are folded at a time where each operation is a pass of its own: few enough to stay in a core's cache."""
_SIMPLE = frozenset({
    torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.complex64, torch.complex128,
})  # fmt: skip
"""Dtypes that are reduced as they are; the others as the reference does it, in a wider one."""


Call = Callable[..., Any]


def without_warnings() -> Call:
    """`call(fn, *args)` without numpy's floating-point warnings, one thread at a time: `np.errstate` is slower than a small sum."""
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def divide(array: np.ndarray[Any, Any], count: int, call: Call) -> None:
    """In place; by a power of two as a product, which is faster and rounds to the same bits."""
    if count & (count - 1):
        call(np.divide, array, count, array)
    else:
        call(np.multiply, array, 1.0 / count, array)


Piece = Any
"""A flat tensor, or a flat numpy array: both can be sliced, and assigned to by `[:] =`."""


@dataclass(frozen=True, slots=True)
class Fold:
    """How pieces of all ranks become one: by numpy where it knows the dtype and is quicker, else by torch."""

    op: ReduceOp
    dtype: torch.dtype
    array: np.dtype[Any] | None
    """The dtype of the numpy arrays that it works on; None if it works on tensors."""
    block: int = BLOCK
    """How many bytes of each rank are best folded at a time."""

    @staticmethod
    @functools.cache
    def of(op: ReduceOp, dtype: torch.dtype) -> Fold:
        """The best there is without numba."""
        return Fold(op, dtype, SUMMED.get(dtype) if op is _SUM or op is _AVG else None)

    def __call__(self, pieces: Sequence[Piece], out: Piece) -> None:
        """Fold, in rank order, into `out`, which may be the first piece itself and must not overlap another."""
        if self.array is None:
            combine(self.op, pieces, out)
            return
        if len(pieces) == 1:
            out[:] = pieces[0]
            return
        call = without_warnings()
        call(np.add, pieces[0], pieces[1], out)
        for piece in pieces[2:]:
            call(np.add, out, piece, out)
        if self.op is _AVG:
            divide(out, len(pieces), call)

    def everywhere(self, pieces: Sequence[Piece]) -> None:
        """Fold, in rank order, into every one of the pieces, which do not overlap."""
        first = pieces[0]
        self(pieces, first)
        for other in pieces[1:]:
            other[:] = first


@loop
def add_two(x: Any, y: Any, scale: Any) -> None:
    """`x` and `y` become (x + y) * scale, or x + y where `scale` is None."""
    for i in range(x.shape[0]):
        total = x[i] + y[i]
        if scale is not None:
            total = total * scale
        x[i] = total
        y[i] = total


@loop
def add_four(x: Any, y: Any, z: Any, w: Any, scale: Any) -> None:
    """The same of four."""
    for i in range(x.shape[0]):
        total = ((x[i] + y[i]) + z[i]) + w[i]
        if scale is not None:
            total = total * scale
        x[i] = total
        y[i] = total
        z[i] = total
        w[i] = total


@loop
def add_all(parts: Any, scale: Any, divisor: Any) -> None:
    """Each of `parts`, three arrays or more, becomes the sum of all, times `scale` and over `divisor` where they are not None."""
    length = parts[0].shape[0]
    block = np.empty(256, parts[0].dtype)
    for low in range(0, length, 256):
        count = min(256, length - low)
        first, last = parts[0][low : low + count], parts[1][low : low + count]
        for i in range(count):
            block[i] = first[i] + last[i]
        for rank in range(2, len(parts) - 1):
            last = parts[rank][low : low + count]
            for i in range(count):
                block[i] = block[i] + last[i]
        last = parts[len(parts) - 1][low : low + count]
        for i in range(count):
            total = block[i] + last[i]
            if scale is not None:
                total = total * scale
            if divisor is not None:
                total = total / divisor
            block[i] = total
        for rank in range(len(parts)):
            out = parts[rank][low : low + count]
            for i in range(count):
                out[i] = block[i]


@loop
def add_all_bfloat16(parts: Any, scale: Any, divisor: Any) -> None:
    """`add_all` of the bits of bfloat16 numbers, as uint16."""
    length = parts[0].shape[0]
    block = np.empty(256, np.float32)
    bits16 = np.empty(256, np.uint16)
    for low in range(0, length, 256):
        count = min(256, length - low)
        for i in range(count):
            block[i] = np.float32(-0.0)  # adding to it changes no bit of what is added; +0.0 would make -0.0 a +0.0
        for rank in range(len(parts)):
            part = parts[rank][low : low + count]
            for i in range(count):
                block[i] = block[i] + np.uint32(np.uint32(part[i]) << np.uint32(16)).view(np.float32)
        for i in range(count):
            total = block[i]
            if scale is not None:
                total = total * scale
            if divisor is not None:
                total = total / divisor
            bits = np.float32(total).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            bits16[i] = np.uint16(rounded if total == total else np.uint32(0x7FC0))
        for rank in range(len(parts)):
            out = parts[rank][low : low + count]
            for i in range(count):
                out[i] = bits16[i]


@dataclass(frozen=True, slots=True)
class CompiledFold(Fold):
    """A sum or mean of several ranks, into all of them, by compiled loops: one pass over memory."""

    block: int = 32 << 20
    """Any number does; an interrupt is seen between blocks."""
    scale: Any = None
    """What the sum is multiplied by, in the type it is added up in."""
    divisor: Any = None

    @classmethod
    def find(cls, op: ReduceOp, dtype: torch.dtype, size: int) -> CompiledFold | None:
        """The one for `size` ranks, ready to run; None where there is no numba, or no loop. Loads numba and compiles, which takes
        a second or two the first time: call it where no rank waits."""
        known = dtype in SUMMED or dtype is torch.bfloat16
        takes = op is _SUM or (op is _AVG and dtype.is_floating_point)
        if size < 2 or not known or not takes or add_all.compiled() is None:
            return None
        number = SUMMED.get(dtype, np.dtype(np.float32)).type
        exact = not size & (size - 1)  # see `divide`
        array = SUMMED.get(dtype, np.dtype(np.uint16))
        scale = number(1.0 / size) if op is _AVG and exact else None
        fold = cls(op, dtype, array, scale=scale, divisor=number(size) if op is _AVG and not exact else None)
        with compiled_once():
            fold.everywhere([np.zeros(1, array) for _ in range(size)])
        return fold

    def everywhere(self, pieces: Sequence[Piece]) -> None:
        """Fold, in rank order, into every one of the pieces, which do not overlap."""
        few = {2: add_two, 4: add_four}.get(len(pieces))
        if few is not None and self.dtype is not torch.bfloat16:
            compiled, args = few.compiled(), (*pieces, self.scale)
        else:
            every = add_all_bfloat16 if self.dtype is torch.bfloat16 else add_all
            compiled, args = every.compiled(), (tuple(pieces), self.scale, self.divisor)
        assert compiled is not None  # `find` has seen to it
        compiled(*args)


def combine(op: ReduceOp, parts: Sequence[Tensor], out: Tensor) -> None:
    """Reduce `parts`, in rank order, into `out`, which may be the first part itself and must not overlap another."""
    if out.dtype not in _SIMPLE:
        out.copy_(reduce_tensors(op, parts))
        return
    if len(parts) == 1:
        if out is not parts[0]:
            out.copy_(parts[0])
        return
    fold = FOLDS[op]
    fold(parts[0], parts[1], out=out)
    for part in parts[2:]:
        fold(out, part, out=out)
    if op is ReduceOp.AVG:
        out.div_(len(parts))
