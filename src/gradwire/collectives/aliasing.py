"""Tensors of one collective that share memory.

A collective reads every input before it writes any output: `reference.py` does so, and every group must have the same results.
An engine reads and writes piece by piece, so an input that overlaps an output has to be copied first. `apart` makes those
copies, and is the only place that decides which; engines call it just before they read. Outputs that overlap each other have no
well-defined result: `check.py` refuses them.

Note [In place]
Where an input is exactly the place that the rank's own part of the result has in the outputs (as in torch's in-place
`all_gather_into_tensor(whole, whole[rank])`), no engine writes it before it is read, and nothing is copied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind
from gradwire.collectives.overlap import span


def apart(op: Collective, rank: int) -> Collective:
    """`op` with copies of the inputs that writing its outputs would overwrite; `op` itself when there are none.

    >>> import torch
    >>> from gradwire.collectives import all_to_all_single
    >>> t = torch.arange(4.0)
    >>> apart(all_to_all_single(t, t), rank=0).inputs[0] is t
    False
    """
    inputs, outputs = op.inputs, op.outputs
    if outputs is inputs or not outputs or not inputs:
        return op
    spans = sorted(span(t) for t in outputs)
    starts = [start for start, _ in spans]
    reaches = list(accumulate((end for _, end in spans), max))
    copied: list[Tensor] | None = None
    for i, t in enumerate(inputs):
        start, end = span(t)
        before = bisect_left(starts, end)  # outputs that begin before the input ends
        if not before or reaches[before - 1] <= start:
            continue
        if all(_in_place(op, i, j, rank) for j in _meeting(outputs, start, end)):
            continue
        copied = copied or list(inputs)
        copied[i] = t.detach().clone()
    return op if copied is None else replace(op, inputs=tuple(copied))


def _meeting(outputs: Sequence[Tensor], start: int, end: int) -> list[int]:
    return [j for j, (low, high) in enumerate(map(span, outputs)) if low < end and start < high]


def _in_place(op: Collective, i: int, j: int, rank: int) -> bool:
    """Whether input `i` and output `j` overlap in this rank's own part only: see Note [In place]."""
    kind, source, target = op.kind, op.inputs[i], op.outputs[j]
    if kind is OpKind.ALL_GATHER_INTO_TENSOR:
        return i == j and _is_part(source, target, rank)
    if kind is OpKind.REDUCE_SCATTER_TENSOR:
        return i == j and _is_part(target, source, rank)
    own = {
        OpKind.ALL_GATHER: (0, rank), OpKind.GATHER: (0, rank), OpKind.ALL_TO_ALL: (rank, rank),
        OpKind.REDUCE_SCATTER: (rank, 0), OpKind.SCATTER: (rank, 0),
        OpKind.ALL_REDUCE: (i, i), OpKind.BROADCAST: (i, i), OpKind.REDUCE: (i, i),
    }.get(kind)  # fmt: skip
    same = source.data_ptr() == target.data_ptr() and source.shape == target.shape
    return own == (i, j) and same and source.stride() == target.stride()


def _is_part(part: Tensor, whole: Tensor, rank: int) -> bool:
    plain = part.is_contiguous() and whole.is_contiguous()
    return plain and part.data_ptr() == whole.data_ptr() + rank * part.nbytes
