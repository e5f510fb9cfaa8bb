"""Tensors as MPI buffers: which datatype and reduction of MPI's belongs to which of ours.

Note [More than 2**31 bytes]
Counts are C ints in MPI before version 4. A larger movement is one element of a datatype that is as large; a larger reduction
is cut into pieces, each a request of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective, ReduceOp
from gradwire.groups.mpi.runtime import MPI

_BLOCK = 1 << 20


class Datatypes:
    """MPI's datatypes and reductions. A buffer is a list of memory, count and datatype, as mpi4py takes it."""

    def __init__(self, mpi: MPI, *, most: int = 2**31 - 1) -> None:
        self._mpi = mpi
        self.most = most
        """The greatest count. Tests make it smaller, so as not to need gigabytes."""
        self._huge: dict[int, Any] = {}
        widths = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
        self._integers = {getattr(torch, name): getattr(mpi, f"{name.upper()}_T") for name in widths}
        self._reals = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
        self._complex = {torch.complex64: mpi.C_FLOAT_COMPLEX, torch.complex128: mpi.C_DOUBLE_COMPLEX}
        self.ops: dict[ReduceOp | None, Any] = {
            ReduceOp.SUM: mpi.SUM,
            ReduceOp.PRODUCT: mpi.PROD,
            ReduceOp.MIN: mpi.MIN,
            ReduceOp.MAX: mpi.MAX,
            ReduceOp.BAND: mpi.BAND,
            ReduceOp.BOR: mpi.BOR,
            ReduceOp.BXOR: mpi.BXOR,
        }

    def reducible(self, dtype: torch.dtype, reduce_op: ReduceOp | None) -> Any:
        """MPI's datatype for a dtype, where MPI can reduce it by this operation; else None."""
        if reduce_op not in self.ops:
            return None
        if dtype in self._integers:
            return self._integers[dtype]
        if reduce_op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return self._reals.get(dtype) or self._complex.get(dtype)
        return self._reals.get(dtype) if reduce_op in (ReduceOp.MIN, ReduceOp.MAX) else None

    def bytes_of(self, t: Tensor) -> list[Any]:
        """A tensor's memory as a buffer of bytes."""
        n = t.nbytes
        memory = self._mpi.memory.fromaddress(t.data_ptr(), n)
        return [memory, n, self._mpi.BYTE] if n <= self.most else [memory, 1, self._huge_type(n)]

    def _huge_type(self, n: int) -> Any:
        if n not in self._huge:
            byte = self._mpi.BYTE
            block = byte.Create_contiguous(_BLOCK)
            whole, rest = divmod(n, _BLOCK)
            self._huge[n] = self._mpi.Datatype.Create_struct([whole, rest], [0, whole * _BLOCK], [block, byte]).Commit()
            block.Free()
        return self._huge[n]

    def elements_of(self, t: Tensor, datatype: Any) -> list[Any]:
        """A tensor's memory as a buffer of elements, which MPI counts itself."""
        return [self._mpi.memory.fromaddress(t.data_ptr(), t.nbytes), datatype]

    def pieces(self, op: Collective) -> Iterator[list[Any]]:
        """The memory of a reduction, cut so that no count is too large."""
        t = op.inputs[0]
        dtype, start, width, n = self.reducible(t.dtype, op.reduce_op), t.data_ptr(), t.element_size(), t.numel()
        for offset in range(0, max(n, 1), self.most):
            count = min(self.most, n - offset)
            yield [self._mpi.memory.fromaddress(start + offset * width, count * width), count, dtype]
