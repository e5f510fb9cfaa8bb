"""What an engine that reads and writes memory directly can run as it is; `lower.py` makes the rest of these."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind, ReduceOp

_ONE_INPUT = frozenset({
    OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER_TENSOR
})  # fmt: skip


def is_plain(t: Tensor) -> bool:
    """Dense, contiguous, and neither conjugated nor negated lazily: an engine can read and write its memory directly."""
    return t.layout is torch.strided and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def is_native(op: Collective, kinds: frozenset[OpKind]) -> bool:
    """Whether `op` is one of `kinds`, on one plain tensor where it could have several, and in place where it could be elsewhere."""
    if op.kind not in kinds or op.reduce_op is ReduceOp.PREMUL_SUM:
        return False
    if op.kind in _ONE_INPUT and len(op.inputs) != 1:
        return False
    if op.kind in (OpKind.ALL_REDUCE, OpKind.BROADCAST) and op.inputs[0] is not op.outputs[0]:
        return False
    tensors = op.inputs if op.outputs is op.inputs else op.inputs + op.outputs
    return all(map(is_plain, tensors))
