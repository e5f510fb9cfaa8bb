"""How pieces of all ranks become one, in place and in rank order: the reference's arithmetic, without its copies."""

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
from gradwire.groups.shared_memory import loops
from gradwire.runtime.jit import Loop

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
    """`call(fn, *args)` that suppresses numpy's floating-point warnings: infinities are the caller's business, as with torch.

    Not for two threads at a time. It is a context in which numpy's state was set once: `np.errstate` takes longer than a small sum.
    """
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


@dataclass(frozen=True, slots=True)
class CompiledFold(Fold):
    """A sum or mean of several ranks, into all of them, by compiled loops: one pass over memory. See `loops.py`."""

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
        if size < 2 or not known or not takes or loops.add_all.compiled() is None:
            return None
        number = SUMMED.get(dtype, np.dtype(np.float32)).type
        exact = not size & (size - 1)  # see `divide`
        array = SUMMED.get(dtype, np.dtype(np.uint16))
        scale = number(1.0 / size) if op is _AVG and exact else None
        fold = cls(op, dtype, array, scale=scale, divisor=number(size) if op is _AVG and not exact else None)
        fold.everywhere([np.zeros(1, array) for _ in range(size)])  # compiles
        return fold

    def everywhere(self, pieces: Sequence[Piece]) -> None:
        """Fold, in rank order, into every one of the pieces, which do not overlap."""
        if self.dtype is torch.bfloat16:
            _run(loops.add_all_bfloat16, tuple(pieces), self.scale, self.divisor)
        elif len(pieces) == 2:
            _run(loops.add_two, *pieces, self.scale)
        elif len(pieces) == 4:
            _run(loops.add_four, *pieces, self.scale)
        else:
            _run(loops.add_all, tuple(pieces), self.scale, self.divisor)


def _run(loop: Loop, *args: Any) -> None:
    compiled = loop.compiled()
    assert compiled is not None  # CompiledFold.find has seen to it
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
