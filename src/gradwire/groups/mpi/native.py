"""What MPI carries out as it is, and how it is asked. The only module that speaks MPI's dialect of collectives.

Reductions are MPI's own where MPI has the dtype and the operation; everything is moved as bytes, whatever its dtype.
Movements of lists, or of parts that differ in size, are plain messages between each pair of ranks: no packing, straight from
and into the tensors (see inbox.py for how they are received). The rest is lowered to these by `collectives/lower.py`.

Note [More than 2**31 bytes]
Counts are C ints in MPI before version 4. A larger movement is one element of a datatype that is as large; a larger reduction
is cut into pieces, each a request of its own.

Note [The same collective on every rank]
Which MPI call is made may depend only on what all ranks know: the kind, the dtype, and sizes that must agree. An all-to-all is
therefore always made of messages, since a rank does not know whether another's parts are large. How a tensor lies in memory
is one rank's affair: where a result would overwrite what is still to be sent, that rank sends a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.aliasing import apart, span
from gradwire.collectives.lower import as_bytes, is_plain
from gradwire.collectives.reference import store
from gradwire.groups.mpi.flight import Flight
from gradwire.groups.mpi.inbox import Receive
from gradwire.groups.mpi.runtime import MPI, Comm

_BLOCK = 1 << 20
RESERVED_TAGS = 16
"""The highest tags are not for users: gradwire's own messages have them."""


class Native:
    """MPI's words for our operations."""

    def __init__(self, mpi: MPI, *, most: int = 2**31 - 1) -> None:
        self._mpi = mpi
        self._most = most
        """The greatest count. Tests make it smaller, so as not to need gigabytes."""
        self.tag_limit: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - RESERVED_TAGS
        self._pair_tag = self.tag_limit + 1
        self._huge: dict[int, Any] = {}
        widths = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
        self._integers = {getattr(torch, name): getattr(mpi, f"{name.upper()}_T") for name in widths}
        self._reals = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
        self._complex = {torch.complex64: mpi.C_FLOAT_COMPLEX, torch.complex128: mpi.C_DOUBLE_COMPLEX}
        self._ops = {
            ReduceOp.SUM: mpi.SUM,
            ReduceOp.PRODUCT: mpi.PROD,
            ReduceOp.MIN: mpi.MIN,
            ReduceOp.MAX: mpi.MAX,
            ReduceOp.BAND: mpi.BAND,
            ReduceOp.BOR: mpi.BOR,
            ReduceOp.BXOR: mpi.BXOR,
        }

    # -- what it takes -------------------------------------------------------------------------------------------------

    def takes(self, op: Collective) -> bool:
        """Whether MPI carries out this collective as it is; the rest is lowered to ones it does."""
        kind, same = op.kind, op.outputs is op.inputs
        if not all(is_plain(t) for t in op.inputs) or not (same or all(is_plain(t) for t in op.outputs)):
            return False
        if kind is OpKind.BROADCAST:
            return len(op.inputs) == 1 and (same or op.inputs[0] is op.outputs[0])
        if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE):
            return len(op.inputs) == 1 and (same or op.inputs[0] is op.outputs[0]) and self._reduces(op)
        if kind is OpKind.REDUCE_SCATTER_TENSOR:
            return self._reduces(op) and all(t.numel() <= self._most for t in op.inputs)
        return kind is not OpKind.REDUCE_SCATTER

    def _reduces(self, op: Collective) -> bool:
        return all(self._dtype(t.dtype, op.reduce_op) is not None for t in op.inputs)

    def _dtype(self, dtype: torch.dtype, reduce_op: ReduceOp | None) -> Any:
        """MPI's name of a dtype, where MPI can reduce it by this operation."""
        if reduce_op not in self._ops:
            return None
        if dtype in self._integers:
            return self._integers[dtype]
        if reduce_op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return self._reals.get(dtype) or self._complex.get(dtype)
        return self._reals.get(dtype) if reduce_op in (ReduceOp.MIN, ReduceOp.MAX) else None

    # -- asking --------------------------------------------------------------------------------------------------------

    def post(self, flight: Flight, op: Collective) -> None:
        """Ask MPI to begin `op`, which it takes; `flight` gets the requests. Under the lock; returns at once."""
        comm = flight.inbox.comm
        if op.kind is OpKind.RECV:
            source = self._mpi.ANY_SOURCE if op.peer is None else op.peer
            self._expect(flight, op.outputs[0], source, op.tag)
        elif op.kind is OpKind.SEND:  # synchronous: done when it has been received, as `build.send` says
            flight.requests.append(comm.Issend(self._bytes(op.inputs[0]), dest=op.peer, tag=op.tag))
        else:
            alone = apart(op, comm.rank)
            if alone is not op:
                flight.kept.extend(alone.inputs)
            _POSTS[op.kind](self, comm, alone, flight)

    def _expect(self, flight: Flight, place: Tensor, source: int, tag: int) -> None:
        flight.expect(Receive(place, self._bytes(place), source, tag))

    def _bytes(self, t: Any) -> list[Any]:
        """A tensor's memory as MPI wants it told."""
        n = t.nbytes
        memory = self._mpi.memory.fromaddress(t.data_ptr(), n)
        return [memory, n, self._mpi.BYTE] if n <= self._most else [memory, 1, self._huge_type(n)]

    def _huge_type(self, n: int) -> Any:
        if n not in self._huge:
            byte = self._mpi.BYTE
            block = byte.Create_contiguous(_BLOCK)
            whole, rest = divmod(n, _BLOCK)
            self._huge[n] = self._mpi.Datatype.Create_struct([whole, rest], [0, whole * _BLOCK], [block, byte]).Commit()
            block.Free()
        return self._huge[n]

    def _pieces(self, op: Collective) -> Iterator[list[Any]]:
        """The memory of a reduction, cut so that no count is too large."""
        t = op.inputs[0]
        dtype, start, width, n = self._dtype(t.dtype, op.reduce_op), t.data_ptr(), t.element_size(), t.numel()
        for offset in range(0, max(n, 1), self._most):
            count = min(self._most, n - offset)
            yield [self._mpi.memory.fromaddress(start + offset * width, count * width), count, dtype]

    def _all_reduce(self, comm: Comm, op: Collective, flight: Flight) -> None:
        for piece in self._pieces(op):
            flight.requests.append(comm.Iallreduce(self._mpi.IN_PLACE, piece, self._op(op)))

    def _reduce(self, comm: Comm, op: Collective, flight: Flight) -> None:
        for piece in self._pieces(op):
            source, target = (self._mpi.IN_PLACE, piece) if comm.rank == op.root else (piece, None)
            flight.requests.append(comm.Ireduce(source, target, self._op(op), op.root))

    def _op(self, op: Collective) -> Any:
        assert op.reduce_op is not None
        return self._ops[op.reduce_op]

    def _broadcast(self, comm: Comm, op: Collective, flight: Flight) -> None:
        flight.requests.append(comm.Ibcast(self._bytes(op.outputs[0]), op.root))

    def _all_gather_into_tensor(self, comm: Comm, op: Collective, flight: Flight) -> None:
        for part, whole in zip(op.inputs, op.outputs, strict=True):
            places = as_bytes(whole).view(comm.size, part.nbytes).unbind()
            if whole.nbytes > self._most:
                self._spread(comm, as_bytes(part), places, flight)
                continue
            target = [self._mpi.memory.fromaddress(whole.data_ptr(), whole.nbytes), self._mpi.BYTE]
            if part.data_ptr() == places[comm.rank].data_ptr():
                flight.requests.append(comm.Iallgather(self._mpi.IN_PLACE, target))
            else:
                flight.requests.append(comm.Iallgather(self._bytes(part)[::2], target))

    def _reduce_scatter_tensor(self, comm: Comm, op: Collective, flight: Flight) -> None:
        for whole, part in zip(op.inputs, op.outputs, strict=True):
            dtype, source = self._dtype(whole.dtype, op.reduce_op), whole
            if span(part)[0] in range(*span(whole)):  # in place, for which MPI has another convention
                source = whole.detach().clone()
                flight.kept.append(source)
            send, recv = ([self._mpi.memory.fromaddress(t.data_ptr(), t.nbytes), dtype] for t in (source, part))
            flight.requests.append(comm.Ireduce_scatter_block(send, recv, self._op(op)))

    def _all_gather(self, comm: Comm, op: Collective, flight: Flight) -> None:
        self._spread(comm, op.inputs[0], op.outputs, flight)

    def _spread(self, comm: Comm, own: Tensor, places: Sequence[Tensor], flight: Flight) -> None:
        self._messages(comm, [own] * comm.size, places, flight)

    def _all_to_all(self, comm: Comm, op: Collective, flight: Flight) -> None:
        self._messages(comm, op.inputs, op.outputs, flight)

    def _all_to_all_single(self, comm: Comm, op: Collective, flight: Flight) -> None:
        parts = []
        for t, given in zip((op.inputs[0], op.outputs[0]), reversed(op.splits or ((), ())), strict=True):
            rows = t.shape[0] if t.dim() else 1
            width = t.nbytes // rows if rows else 0
            sizes = [n * width for n in given or [rows // comm.size] * comm.size]
            parts.append(as_bytes(t).split(sizes))
        self._messages(comm, parts[0], parts[1], flight)

    def _gather(self, comm: Comm, op: Collective, flight: Flight) -> None:
        own = op.inputs[0]
        self._messages(comm, [own if r == op.root else None for r in range(comm.size)], op.outputs, flight)

    def _scatter(self, comm: Comm, op: Collective, flight: Flight) -> None:
        places = [op.outputs[0] if r == op.root else None for r in range(comm.size)]
        self._messages(comm, op.inputs, places, flight)

    def _messages(
        self, comm: Comm, outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None], flight: Flight
    ) -> None:
        """Send one tensor to each rank and receive one from each; None, or a list that is empty, stands for no message."""
        rank, size, tag = comm.rank, comm.size, self._pair_tag
        outgoing, incoming = (list(ts) or [None] * size for ts in (outgoing, incoming))
        mine, place = outgoing[rank], incoming[rank]
        if mine is not None and place is not None:
            store(place.detach(), mine.detach())
        for other in ((rank - i) % size for i in range(1, size)):
            if (target := incoming[other]) is not None:
                self._expect(flight, target, other, tag)
        for other in ((rank + i) % size for i in range(1, size)):
            if (source := outgoing[other]) is not None:
                flight.requests.append(comm.Isend(self._bytes(source), dest=other, tag=tag))

    def _barrier(self, comm: Comm, op: Collective, flight: Flight) -> None:
        flight.requests.append(comm.Ibarrier())


_POSTS: dict[OpKind, Callable[[Native, Comm, Collective, Flight], None]] = {
    OpKind.ALL_REDUCE: Native._all_reduce,
    OpKind.BROADCAST: Native._broadcast,
    OpKind.REDUCE: Native._reduce,
    OpKind.ALL_GATHER: Native._all_gather,
    OpKind.ALL_GATHER_INTO_TENSOR: Native._all_gather_into_tensor,
    OpKind.REDUCE_SCATTER_TENSOR: Native._reduce_scatter_tensor,
    OpKind.ALL_TO_ALL: Native._all_to_all,
    OpKind.ALL_TO_ALL_SINGLE: Native._all_to_all_single,
    OpKind.GATHER: Native._gather,
    OpKind.SCATTER: Native._scatter,
    OpKind.BARRIER: Native._barrier,
}
