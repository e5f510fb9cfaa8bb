"""Every collective done the obvious way, with all ranks' records in one place: what all groups are tested against.

`perform([op of rank 0, op of rank 1, …])` reads every input, computes, then writes every output. Reductions run in rank
order, so results are the same bits every time; float16, bfloat16 and float8 are accumulated in float32 and rounded once.
`ThreadGroup` runs on this; engines that lack a reduction use `reduce_tensors`.

Note [Tensors made in inference mode]
torch refuses in-place operations on a tensor made in `torch.inference_mode()` outside that mode, which belongs to a thread. A group
may write a result in another thread than the caller's, so outputs are written in their own mode.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import FLOAT8, WIDE_UNSIGNED, OpKind, ReduceOp

T = TypeVar("T")
_NARROW = frozenset({torch.float16, torch.bfloat16, *FLOAT8})
# Unsigned integers wider than a byte have storage in torch but next to no arithmetic: int64 holds all but uint64, whose
# sums and products wrap to the same bits in two's complement.
_WIDE_UNSIGNED = frozenset(WIDE_UNSIGNED)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are added and compared."""
    if dtype in _NARROW:
        return torch.float32
    if dtype is torch.complex32:
        return torch.complex64
    return torch.int64 if dtype in _WIDE_UNSIGNED else dtype


FOLDS: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""How two values become one, where the dtype has arithmetic of its own."""
_BOOL_FOLDS = {ReduceOp.SUM: torch.logical_or, ReduceOp.PRODUCT: torch.logical_and}
_SIGN_BIT = -(2**63)


@torch.no_grad()
def reduce_tensors(op: ReduceOp, tensors: Sequence[Tensor], factors: Sequence[float | Tensor | None] = ()) -> Tensor:
    """Fold one tensor per rank, in rank order, into a new tensor of the same dtype.

    >>> reduce_tensors(ReduceOp.MAX, [torch.tensor([1, 5]), torch.tensor([4, 2])])
    tensor([4, 5])
    """
    dtype = tensors[0].dtype
    fold = _BOOL_FOLDS.get(op, FOLDS[op]) if dtype is torch.bool else FOLDS[op]
    working = working_dtype(dtype)
    # uint64 is compared as int64 with the sign bit flipped, which keeps its order.
    flip = dtype is torch.uint64 and op in (ReduceOp.MIN, ReduceOp.MAX)
    total: Tensor | None = None
    for index, t in enumerate(tensors):
        value = t.view(torch.int64) if dtype is torch.uint64 else t.to(working)
        if flip:
            value = value ^ _SIGN_BIT
        if op is ReduceOp.PREMUL_SUM:
            factor = factors[index]
            assert factor is not None
            value = value * (factor.to(value.device).reshape(()) if isinstance(factor, Tensor) else factor)
        total = value if total is None else fold(total, value)
    assert total is not None
    if op is ReduceOp.AVG:
        total = total / len(tensors)
    if flip:
        total = total ^ _SIGN_BIT
    result = total.view(dtype) if dtype is torch.uint64 else total.to(dtype)
    return result.clone() if len(tensors) == 1 else result


def writing(outputs: Iterable[Tensor]) -> AbstractContextManager[object]:
    """The context in which all of `outputs` can be written: see Note [Tensors made in inference mode].

    >>> with torch.inference_mode():
    ...     t = torch.zeros(2)
    >>> with writing([t]):
    ...     t.add_(1)
    tensor([1., 1.])
    """
    return torch.inference_mode() if any(t.is_inference() for t in outputs) else nullcontext()


def writes(outputs: Sequence[Tensor], program: Generator[T, None, None]) -> Generator[T, None, None]:
    """`program`, which writes to `outputs` between its steps; the steps themselves run in the mode of the caller."""
    context = writing(outputs)
    try:
        while True:
            with context:
                try:
                    step = next(program)
                except StopIteration:
                    return
            yield step
    finally:
        program.close()


@torch.no_grad()
def store(output: Tensor, value: Tensor) -> None:
    """Write `value` into `output`, whatever its strides; shapes may differ as long as the number of elements agrees."""
    with writing((output,)):
        output.copy_(value if value.is_sparse or value.shape == output.shape else value.reshape(output.shape))


@torch.no_grad()
def perform(ops: Sequence[Collective]) -> None:
    """Run one collective, given every rank's record in rank order."""
    for output, value in _PERFORM[ops[0].kind](ops):
        store(output, value)


_Writes = list[tuple[Tensor, Tensor]]


def _reduced(ops: Sequence[Collective], pick: Callable[[Collective], Tensor]) -> Tensor:
    assert ops[0].reduce_op is not None
    return reduce_tensors(ops[0].reduce_op, [pick(op) for op in ops], [op.factor for op in ops])


def _all_reduce(ops: Sequence[Collective]) -> _Writes:
    totals = [_reduced(ops, lambda op, i=i: op.inputs[i]) for i in range(len(ops[0].inputs))]  # type: ignore[misc]
    return [(output, total) for op in ops for output, total in zip(op.outputs, totals, strict=True)]


def _broadcast(ops: Sequence[Collective]) -> _Writes:
    root = ops[ops[0].root or 0]
    values = root.inputs if root.outputs is root.inputs else [t.clone() for t in root.inputs]
    return [(o, v) for op in ops for o, v in zip(op.outputs, values, strict=True) if o is not v]


def _reduce(ops: Sequence[Collective]) -> _Writes:
    return [(ops[ops[0].root or 0].outputs[0], _reduced(ops, lambda op: op.inputs[0]))]


def _all_gather(ops: Sequence[Collective]) -> _Writes:
    values = [op.inputs[0].clone() for op in ops]
    return [(o, v) for op in ops for o, v in zip(op.outputs, values, strict=True)]


def _all_gather_into_tensor(ops: Sequence[Collective]) -> _Writes:
    wholes = [torch.cat([op.inputs[i].reshape(-1) for op in ops]) for i in range(len(ops[0].inputs))]
    return [(o, whole) for op in ops for o, whole in zip(op.outputs, wholes, strict=True)]


def _reduce_scatter(ops: Sequence[Collective]) -> _Writes:
    return [(op.outputs[0], _reduced(ops, lambda o, r=r: o.inputs[r])) for r, op in enumerate(ops)]  # type: ignore[misc]


def _reduce_scatter_tensor(ops: Sequence[Collective]) -> _Writes:
    writes = []
    for i in range(len(ops[0].inputs)):
        total = _reduced(ops, lambda op, i=i: op.inputs[i].reshape(-1))  # type: ignore[misc]
        writes += [(op.outputs[i], part) for op, part in zip(ops, total.chunk(len(ops)), strict=False)]
    return [(output, part) for output, part in writes if output.numel()]


def _all_to_all(ops: Sequence[Collective]) -> _Writes:
    values = [[t.clone() for t in op.inputs] for op in ops]
    return [(o, values[src][dst]) for dst, op in enumerate(ops) for src, o in enumerate(op.outputs)]


def cut(t: Tensor, splits: Sequence[int], size: int) -> tuple[Tensor, ...]:
    """Dimension 0 of `t` in one part per rank: by `splits`, or equal parts where there are none."""
    t = t.reshape(1) if t.dim() == 0 else t
    return tuple(torch.split(t, list(splits) if splits else [t.shape[0] // size] * size))


def _all_to_all_single(ops: Sequence[Collective]) -> _Writes:
    size = len(ops)
    parts = [[p.clone() for p in cut(op.inputs[0], op.splits[1] if op.splits else (), size)] for op in ops]
    writes = []
    for dst, op in enumerate(ops):
        places = cut(op.outputs[0], op.splits[0] if op.splits else (), size)
        writes += [(place, parts[src][dst]) for src, place in enumerate(places)]
    return writes


def _gather(ops: Sequence[Collective]) -> _Writes:
    values = [op.inputs[0].clone() for op in ops]
    return list(zip(ops[ops[0].root or 0].outputs, values, strict=True))


def _scatter(ops: Sequence[Collective]) -> _Writes:
    values = [t.clone() for t in ops[ops[0].root or 0].inputs]
    return [(op.outputs[0], v) for op, v in zip(ops, values, strict=True)]


_PERFORM: dict[OpKind, Callable[[Sequence[Collective]], _Writes]] = {
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.BROADCAST: _broadcast,
    OpKind.REDUCE: _reduce,
    OpKind.ALL_GATHER: _all_gather,
    OpKind.ALL_GATHER_INTO_TENSOR: _all_gather_into_tensor,
    OpKind.REDUCE_SCATTER: _reduce_scatter,
    OpKind.REDUCE_SCATTER_TENSOR: _reduce_scatter_tensor,
    OpKind.ALL_TO_ALL: _all_to_all,
    OpKind.ALL_TO_ALL_SINGLE: _all_to_all_single,
    OpKind.GATHER: _gather,
    OpKind.SCATTER: _scatter,
    OpKind.BARRIER: lambda ops: [],
}
