"""What a collective costs on the wire: the bytes a rank has to send, whatever engine carries it out.

These are the volumes of the bandwidth-optimal algorithms (a ring, or a direct exchange); an engine may send more.
"""

from __future__ import annotations

from torch import Tensor

from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind


def sent_bytes(op: Collective, rank: int, size: int) -> float:
    """The bytes that `rank` of `size` sends in `op`; averaged over the ranks where the algorithm may choose the sender.

    >>> import torch
    >>> from gradwire.collectives import all_reduce
    >>> sent_bytes(all_reduce(torch.zeros(100)), rank=0, size=4)
    600.0
    """
    others = (size - 1) / size
    given = float(sum(map(_nbytes, op.inputs)))
    match op.kind:
        case OpKind.ALL_REDUCE:
            return 2 * others * given
        case OpKind.ALL_GATHER | OpKind.ALL_GATHER_INTO_TENSOR:
            return (size - 1) * given
        case OpKind.BROADCAST | OpKind.REDUCE | OpKind.REDUCE_SCATTER | OpKind.REDUCE_SCATTER_TENSOR:
            return others * given
        case OpKind.ALL_TO_ALL:
            return given - _nbytes(op.inputs[rank])
        case OpKind.ALL_TO_ALL_SINGLE if op.splits is not None and op.splits[1]:
            rows = sum(op.splits[1])
            return given * (rows - op.splits[1][rank]) / rows if rows else 0.0
        case OpKind.ALL_TO_ALL_SINGLE:
            return others * given
        case OpKind.GATHER:
            return 0.0 if rank == op.root else given
        case OpKind.SCATTER:
            return given - _nbytes(op.inputs[rank]) if rank == op.root else 0.0
        case OpKind.SEND:
            return given
        case OpKind.RECV | OpKind.BARRIER:
            return 0.0


def _nbytes(t: Tensor) -> int:
    return t._values().nbytes + t._indices().nbytes if t.is_sparse else t.nbytes
