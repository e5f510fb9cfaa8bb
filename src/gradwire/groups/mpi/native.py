"""What MPI carries out as it is: posts our collectives as MPI's. The only module that calls MPI's collectives.

Reductions are MPI's own where MPI has the dtype and the operation; everything is moved as bytes, whatever its dtype.
Movements of lists, or of parts that differ in size, are plain messages between each pair of ranks: no packing, straight from
and into the tensors (see p2p.py for how they are received). The rest is lowered to these by `collectives/lower.py`.

Note [The same collective on every rank]
Which MPI call is made may depend only on what is equal on all ranks: the kind, the dtype, and sizes that must agree. An
all-to-all is therefore always made of messages, since a rank does not know whether another's parts are large. How a tensor lies in
memory is known to one rank only: where a result would overwrite what is still to be sent, that rank sends a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.aliasing import apart, is_plain, span
from gradwire.collectives.lower import as_bytes
from gradwire.collectives.reference import store
from gradwire.groups.mpi.datatypes import Datatypes
from gradwire.groups.mpi.pending_requests import PendingRequests
from gradwire.groups.mpi.receive_matcher import Receive
from gradwire.groups.mpi.runtime import MPI, Comm

RESERVED_TAGS = 16
"""The highest tags are reserved for gradwire's own messages."""


class Native:
    """Our operations as MPI's."""

    def __init__(self, mpi: MPI, *, most: int = 2**31 - 1) -> None:
        self._mpi = mpi
        self.datatypes = Datatypes(mpi, most=most)
        self.tag_limit: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - RESERVED_TAGS
        self._pair_tag = self.tag_limit + 1

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
            return self._reduces(op) and all(t.numel() <= self.datatypes.most for t in op.inputs)
        return kind is not OpKind.REDUCE_SCATTER

    def _reduces(self, op: Collective) -> bool:
        return all(self.datatypes.reducible(t.dtype, op.reduce_op) is not None for t in op.inputs)

    # -- posting -------------------------------------------------------------------------------------------------------

    def post(self, pending: PendingRequests, op: Collective) -> None:
        """Begin `op`, which MPI takes; `pending` gets the requests. Under the lock; returns at once."""
        comm = pending.matcher.comm
        if op.kind is OpKind.RECV:
            source = self._mpi.ANY_SOURCE if op.peer is None else op.peer
            self._expect(pending, op.outputs[0], source, op.tag)
        elif op.kind is OpKind.SEND:  # synchronous: done when it has been received, as in `build.send`
            pending.requests.append(comm.Issend(self.datatypes.bytes_of(op.inputs[0]), dest=op.peer, tag=op.tag))
        else:
            alone = apart(op, comm.rank)
            if alone is not op:
                pending.kept.extend(alone.inputs)
            _POSTS[op.kind](self, comm, alone, pending)

    def _expect(self, pending: PendingRequests, place: Tensor, source: int, tag: int) -> None:
        pending.add_receive(Receive(place, self.datatypes.bytes_of(place), source, tag))

    def _all_reduce(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        for piece in self.datatypes.pieces(op):
            pending.requests.append(comm.Iallreduce(self._mpi.IN_PLACE, piece, self.datatypes.ops[op.reduce_op]))

    def _reduce(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        for piece in self.datatypes.pieces(op):
            source, target = (self._mpi.IN_PLACE, piece) if comm.rank == op.root else (piece, None)
            pending.requests.append(comm.Ireduce(source, target, self.datatypes.ops[op.reduce_op], op.root))

    def _broadcast(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        pending.requests.append(comm.Ibcast(self.datatypes.bytes_of(op.outputs[0]), op.root))

    def _all_gather_into_tensor(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        for part, whole in zip(op.inputs, op.outputs, strict=True):
            places = as_bytes(whole).view(comm.size, part.nbytes).unbind()
            if whole.nbytes > self.datatypes.most:
                self._spread(comm, as_bytes(part), places, pending)
                continue
            target = self.datatypes.elements_of(whole, self._mpi.BYTE)
            if part.data_ptr() == places[comm.rank].data_ptr():
                pending.requests.append(comm.Iallgather(self._mpi.IN_PLACE, target))
            else:
                pending.requests.append(comm.Iallgather(self.datatypes.bytes_of(part)[::2], target))

    def _reduce_scatter_tensor(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        for whole, part in zip(op.inputs, op.outputs, strict=True):
            datatype, source = self.datatypes.reducible(whole.dtype, op.reduce_op), whole
            if span(part)[0] in range(*span(whole)):  # in place, for which MPI has another convention
                source = whole.detach().clone()
                pending.kept.append(source)
            send, recv = (self.datatypes.elements_of(t, datatype) for t in (source, part))
            pending.requests.append(comm.Ireduce_scatter_block(send, recv, self.datatypes.ops[op.reduce_op]))

    def _all_gather(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        self._spread(comm, op.inputs[0], op.outputs, pending)

    def _spread(self, comm: Comm, own: Tensor, places: Sequence[Tensor], pending: PendingRequests) -> None:
        self._messages(comm, [own] * comm.size, places, pending)

    def _all_to_all(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        self._messages(comm, op.inputs, op.outputs, pending)

    def _all_to_all_single(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        parts = []
        for t, given in zip((op.inputs[0], op.outputs[0]), reversed(op.splits or ((), ())), strict=True):
            rows = t.shape[0] if t.dim() else 1
            width = t.nbytes // rows if rows else 0
            sizes = [n * width for n in given or [rows // comm.size] * comm.size]
            parts.append(as_bytes(t).split(sizes))
        self._messages(comm, parts[0], parts[1], pending)

    def _gather(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        own = op.inputs[0]
        self._messages(comm, [own if r == op.root else None for r in range(comm.size)], op.outputs, pending)

    def _scatter(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        places = [op.outputs[0] if r == op.root else None for r in range(comm.size)]
        self._messages(comm, op.inputs, places, pending)

    def _messages(
        self, comm: Comm, outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None], pending: PendingRequests
    ) -> None:
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
                pending.requests.append(comm.Isend(self.datatypes.bytes_of(source), dest=other, tag=tag))

    def _barrier(self, comm: Comm, op: Collective, pending: PendingRequests) -> None:
        pending.requests.append(comm.Ibarrier())


_POSTS: dict[OpKind, Callable[[Native, Comm, Collective, PendingRequests], None]] = {
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
