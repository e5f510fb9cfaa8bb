"""What MPI carries out as it is: posts our collectives as MPI's. The only module that calls MPI's collectives.

Reductions are MPI's own where MPI has the dtype and the operation; everything is moved as bytes, whatever its dtype.
Movements of lists, or of parts that differ in size, are plain messages between each pair of ranks: no packing, straight from
and into the tensors. The rest is lowered to these by `collectives/lower.py`.

Note [The same collective on every rank]
Which MPI call is made may depend only on what is equal on all ranks: the kind, the dtype, and sizes that must agree. An
all-to-all is therefore always made of messages, since a rank does not know whether another's parts are large. How a tensor lies in
memory is known to one rank only: where a result would overwrite what is still to be sent, that rank sends a copy.

Note [More than 2**31 bytes]
Counts are C ints before MPI 4. A larger movement is one element of a datatype as large; a larger reduction is several requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.aliasing import apart, is_native, span
from gradwire.collectives.lower import as_bytes, part_bytes
from gradwire.collectives.reference import store
from gradwire.groups.mpi.pending_requests import PendingRequests, Receive
from gradwire.groups.mpi.runtime import MPI, Comm

RESERVED_TAGS = 16
"""The highest tags are reserved for gradwire's own messages."""
_BLOCK = 1 << 20
_NATIVE = frozenset(OpKind) - {OpKind.REDUCE_SCATTER}

Parts = Sequence[Tensor | None]


class Native:
    """Our operations as MPI's. A buffer is a list of memory, count and datatype, as mpi4py takes it."""

    def __init__(self, mpi: MPI, *, most: int = 2**31 - 1) -> None:
        """`most` is the greatest count. Tests make it smaller, so as not to need gigabytes."""
        self._mpi = mpi
        self._most = most
        self._huge: dict[int, Any] = {}
        self.tag_limit: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - RESERVED_TAGS
        self._pair_tag = self.tag_limit + 1
        widths = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
        self._integers = {getattr(torch, name): getattr(mpi, f"{name.upper()}_T") for name in widths}
        self._reals = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
        self._complex = {torch.complex64: mpi.C_FLOAT_COMPLEX, torch.complex128: mpi.C_DOUBLE_COMPLEX}
        alike = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
        self._ops: dict[ReduceOp | None, Any] = {op: getattr(mpi, op.name) for op in alike}
        self._ops[ReduceOp.PRODUCT] = mpi.PROD

    def takes(self, op: Collective) -> bool:
        """Whether MPI carries out this collective as it is; the rest is lowered to ones it does."""
        if not is_native(op, _NATIVE):
            return False
        if not op.kind.reduces:
            return True
        t = op.inputs[0]
        fits = op.kind is not OpKind.REDUCE_SCATTER_TENSOR or t.numel() <= self._most
        return fits and self._reducible(t.dtype, op.reduce_op) is not None

    def _reducible(self, dtype: torch.dtype, reduce_op: ReduceOp | None) -> Any:
        """MPI's datatype for a dtype, where MPI can reduce it by this operation; else None."""
        if reduce_op not in self._ops:
            return None
        if dtype in self._integers:
            return self._integers[dtype]
        if reduce_op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return self._reals.get(dtype) or self._complex.get(dtype)
        return self._reals.get(dtype) if reduce_op in (ReduceOp.MIN, ReduceOp.MAX) else None

    def bytes_of(self, t: Tensor) -> list[Any]:
        """A tensor's memory as a buffer of bytes: see Note [More than 2**31 bytes]."""
        n, byte = t.nbytes, self._mpi.BYTE
        memory = self._mpi.memory.fromaddress(t.data_ptr(), n)
        if n <= self._most:
            return [memory, n, byte]
        if n not in self._huge:
            block = byte.Create_contiguous(_BLOCK)
            whole, rest = divmod(n, _BLOCK)
            self._huge[n] = self._mpi.Datatype.Create_struct([whole, rest], [0, whole * _BLOCK], [block, byte]).Commit()
            block.Free()
        return [memory, 1, self._huge[n]]

    def _elements_of(self, t: Tensor, datatype: Any) -> list[Any]:
        return [self._mpi.memory.fromaddress(t.data_ptr(), t.nbytes), datatype]

    def _pieces(self, op: Collective) -> Iterator[list[Any]]:
        """The memory of a reduction, cut so that no count is too large."""
        t = op.inputs[0]
        dtype, start, width, n = self._reducible(t.dtype, op.reduce_op), t.data_ptr(), t.element_size(), t.numel()
        for offset in range(0, max(n, 1), self._most):
            count = min(self._most, n - offset)
            yield [self._mpi.memory.fromaddress(start + offset * width, count * width), count, dtype]

    def post(self, pending: PendingRequests, op: Collective) -> None:
        """Begin `op`, which MPI takes; `pending` gets the requests. Under the lock; returns at once."""
        comm, requests, in_place, kind = pending.matcher.comm, pending.requests, self._mpi.IN_PLACE, op.kind
        if kind is OpKind.RECV:
            self._expect(pending, op.outputs[0], self._mpi.ANY_SOURCE if op.peer is None else op.peer, op.tag)
            return
        if kind is OpKind.SEND:  # synchronous: done when it has been received, as in `build.send`
            requests.append(comm.Issend(self.bytes_of(op.inputs[0]), dest=op.peer, tag=op.tag))
            return
        alone, reduction = apart(op, comm.rank), self._ops.get(op.reduce_op)
        if alone is not op:
            pending.kept.extend(alone.inputs)
            op = alone
        if kind is OpKind.BARRIER:
            requests.append(comm.Ibarrier())
        elif kind is OpKind.BROADCAST:
            requests.append(comm.Ibcast(self.bytes_of(op.outputs[0]), op.root))
        elif kind is OpKind.ALL_REDUCE:
            requests += [comm.Iallreduce(in_place, piece, reduction) for piece in self._pieces(op)]
        elif kind is OpKind.REDUCE:
            for piece in self._pieces(op):
                source, target = (in_place, piece) if comm.rank == op.root else (piece, None)
                requests.append(comm.Ireduce(source, target, reduction, op.root))
        elif kind is OpKind.REDUCE_SCATTER_TENSOR:
            whole, part = op.inputs[0], op.outputs[0]
            if span(part)[0] in range(*span(whole)):  # in place, for which MPI has another convention
                whole = whole.detach().clone()
                pending.kept.append(whole)
            datatype = self._reducible(whole.dtype, op.reduce_op)
            send, recv = (self._elements_of(t, datatype) for t in (whole, part))
            requests.append(comm.Ireduce_scatter_block(send, recv, reduction))
        elif kind is OpKind.ALL_GATHER_INTO_TENSOR:
            part, whole, byte = op.inputs[0], op.outputs[0], self._mpi.BYTE
            places = as_bytes(whole).view(comm.size, part.nbytes).unbind()
            if whole.nbytes > self._most:
                self._messages(comm, [as_bytes(part)] * comm.size, places, pending)
            else:
                there = part.data_ptr() == places[comm.rank].data_ptr()
                source = in_place if there else self._elements_of(part, byte)
                requests.append(comm.Iallgather(source, self._elements_of(whole, byte)))
        else:
            self._messages(comm, *_pairwise(op, comm), pending)

    def _messages(self, comm: Comm, outgoing: Parts, incoming: Parts, pending: PendingRequests) -> None:
        """Send one tensor to each rank and receive one from each; None, or a list that is empty, stands for no message."""
        rank, size, tag = comm.rank, comm.size, self._pair_tag
        outgoing, incoming = (list(ts) or [None] * size for ts in (outgoing, incoming))
        mine, place = outgoing[rank], incoming[rank]
        if mine is not None and place is not None:
            store(place.detach(), mine.detach())
        for other in ((rank - i) % size for i in range(1, size)):
            if (target := incoming[other]) is not None:
                self._expect(pending, target, other, tag)
        for other in ((rank + i) % size for i in range(1, size)):
            if (source := outgoing[other]) is not None:
                pending.requests.append(comm.Isend(self.bytes_of(source), dest=other, tag=tag))

    def _expect(self, pending: PendingRequests, place: Tensor, source: int, tag: int) -> None:
        pending.add_receive(Receive(place, self.bytes_of(place), source, tag))


def _pairwise(op: Collective, comm: Comm) -> tuple[Parts, Parts]:
    """What this rank sends to each rank, and where it receives from each."""
    kind, ranks = op.kind, range(comm.size)
    if kind is OpKind.ALL_GATHER:
        return [op.inputs[0]] * comm.size, op.outputs
    if kind is OpKind.GATHER:
        return [op.inputs[0] if r == op.root else None for r in ranks], op.outputs
    if kind is OpKind.SCATTER:
        return op.inputs, [op.outputs[0] if r == op.root else None for r in ranks]
    if kind is OpKind.ALL_TO_ALL:
        return op.inputs, op.outputs
    source, target, (received, sent) = op.inputs[0], op.outputs[0], op.splits or ((), ())
    outgoing = as_bytes(source).split(part_bytes(source, sent, comm.size))
    return outgoing, as_bytes(target).split(part_bytes(target, received, comm.size))
