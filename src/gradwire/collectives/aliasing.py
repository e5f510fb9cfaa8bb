"""Where the tensors of one collective lie in memory, and which of them share some of it.

A collective reads every input before it writes any output, as in `reference.py`. An engine reads and writes piece by piece, so an
input that overlaps an output has to be copied first: engines call `apart` just before they read. Outputs that overlap each other
have no well-defined result: `check.py` refuses them.

Note [In place]
Where an input is exactly the place that the rank's own part of the result has in the outputs (as in torch's in-place
`all_gather_into_tensor(whole, whole[rank])`), no engine writes it before it is read, and nothing is copied.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.collectives.op_kinds import COALESCED, OpFields, OpKind, ReduceOp

Op = TypeVar("Op", bound=OpFields)
_IN_PLACE = frozenset({OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.REDUCE})


def is_plain(t: Tensor) -> bool:
    """Dense, contiguous, and neither conjugated nor negated lazily: an engine can read and write its memory directly."""
    return t.layout is torch.strided and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def is_native(op: OpFields, kinds: frozenset[OpKind]) -> bool:
    """Whether `op` is one of `kinds`, on one plain tensor where it could have several, and in place where it could be elsewhere."""
    if op.kind not in kinds or op.reduce_op is ReduceOp.PREMUL_SUM:
        return False
    if op.kind in COALESCED and len(op.inputs) != 1:
        return False
    if op.kind in _IN_PLACE and op.inputs[0] is not op.outputs[0]:
        return False
    tensors = op.inputs if op.outputs is op.inputs else op.inputs + op.outputs
    return all(map(is_plain, tensors))


def apart(op: Op, rank: int) -> Op:
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
    spans = sorted((*span(t), j) for j, t in enumerate(outputs))
    reaches = list(accumulate((high for _, high, _ in spans), max))  # how far an output reaches, or one before it
    copied: list[Tensor] | None = None
    for i, t in enumerate(inputs):
        start, end = span(t)
        near = spans[bisect_right(reaches, start) : bisect_left(spans, (end,))]
        if not all(_in_place(op, i, j, rank) for _, high, j in near if start < high):
            copied = copied or list(inputs)
            copied[i] = t.detach().clone()
    return op if copied is None else replace(op, inputs=tuple(copied))


def _in_place(op: OpFields, i: int, j: int, rank: int) -> bool:
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


def span(t: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies, from and to; (0, 0) for an empty or sparse one."""
    if t.layout is not torch.strided or not t.numel():
        return 0, 0
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def overlapping(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two of the tensors, each of which may be written, that share memory; a tensor that overlaps itself is returned twice."""
    for t in tensors:
        if not t.is_sparse and not t.is_contiguous() and _overlaps_itself(t):
            return t, t
    open_: list[tuple[int, Tensor]] = []  # those that reach beyond the start of the current one
    for start, end, t in sorted(((*span(t), t) for t in tensors), key=lambda entry: entry[0]):
        if start == end:
            continue
        open_ = [(reach, other) for reach, other in open_ if reach > start]
        for _, other in open_:
            if _share(other, t):
                return other, t
        open_.append((end, t))
    return None


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two elements of `t` are in one place."""
    dims = sorted((stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1)
    reach = 1
    for stride, n in dims:
        if stride < reach:
            break
        reach = (n - 1) * stride + reach
    else:
        return False
    return bool(t.numel()) and (dims[0][0] == 0 or int(_footprint(t, *span(t), t.element_size()).sum()) < t.numel())


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    (low, high), (start, end) = span(a), span(b)
    low, high = min(low, start), max(high, end)
    unit = math.gcd(a.element_size(), b.element_size(), abs(a.data_ptr() - b.data_ptr()))
    return bool((_footprint(a, low, high, unit) & _footprint(b, low, high, unit)).any())


def _footprint(t: Tensor, low: int, high: int, unit: int) -> Tensor:
    """Which units of memory, of those from `low` to `high`, belong to elements of `t`."""
    places = torch.zeros((high - low) // unit, dtype=torch.bool, device="cpu")
    per = t.element_size() // unit
    strides = [stride * per for stride in t.stride()]
    places.as_strided((*t.shape, per), (*strides, 1), (t.data_ptr() - low) // unit).fill_(True)
    return places


def keep_for(stream: torch.cuda.Stream, t: Tensor) -> None:
    """Keep the memory of a tensor from being allocated again before `stream` is done with it."""
    for part in (t._indices(), t._values()) if t.is_sparse else (t,):
        part.record_stream(stream)
