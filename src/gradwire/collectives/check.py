"""The rules of a well-formed collective.

`check_alone` needs only the record and runs when it is made; `check_in_world` needs to know which rank of how many submits
it, and runs in every group before anything moves. Both raise UsageError with what to change. What only a comparison
between ranks can show (different shapes on different ranks) is checked by the `Verified` wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gradwire.collectives.aliasing import overlapping
from gradwire.collectives.op_kinds import COALESCED, MOVES, REDUCES, REDUCES_SPARSE, OpFields, OpKind, ReduceOp, Scope
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import UsageError, UsageTypeError

_SUM, _AVG, _BARRIER, _ALL_REDUCE = ReduceOp.SUM, ReduceOp.AVG, OpKind.BARRIER, OpKind.ALL_REDUCE
_ROOTED = frozenset({OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER})
_NUMBERED = _ROOTED | {OpKind.SEND, OpKind.RECV}
_ONE_INPUT = frozenset({OpKind.REDUCE, OpKind.ALL_GATHER, OpKind.ALL_TO_ALL_SINGLE, OpKind.GATHER, OpKind.SEND})
_ONE_OUTPUT = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL_SINGLE, OpKind.SCATTER, OpKind.RECV})
_FREE_IN_WORLD = frozenset({OpKind.BARRIER, OpKind.ALL_REDUCE})
"""Kinds that any rank of any world can submit."""


def _refuse(op: OpFields, problem: str) -> NoReturn:
    label = f" labeled {op.label!r}" if op.label else ""
    raise UsageError(f"{op.kind.value}{label}: {problem}")


def _describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"


def check_alone(op: OpFields) -> None:
    """Raise unless the record is well-formed by itself."""
    if _is_plain(op):
        return
    tensors = op.inputs if op.inputs is op.outputs else op.inputs + op.outputs
    for t in tensors:
        if not isinstance(t, Tensor):
            raise UsageTypeError(
                f"{op.kind.value}: expected tensors, got {type(t).__name__} ({t!r}). Wrap it in torch.tensor(...) first."
            )
    if not tensors and op.kind is not _BARRIER:
        _refuse(op, "no tensors were given. Pass at least one; skip the call when there is nothing to communicate.")
    if op.kind.is_p2p and op.scope is not Scope.WORLD:
        _refuse(op, f"a message with the scope {op.scope.value}. Messages name ranks of the whole group: leave it out.")
    _check_numbers(op)
    _check_alike(op, tensors)
    for t in tensors:
        if t.dtype not in MOVES or t.is_meta or t.is_nested:
            _refuse_tensor(op, t)
    if op.kind.reduces:
        _check_reduction(op)
    elif op.reduce_op is not None or op.factor is not None:
        _refuse(op, "it does not reduce, yet reduce_op or factor is set. Leave both out.")
    for name, kinds, given in (("inputs", _ONE_INPUT, op.inputs), ("outputs", _ONE_OUTPUT, op.outputs)):
        if op.kind in kinds and len(given) != 1:
            _refuse(op, f"{len(given)} {name} were given. Pass exactly one.")
    if (rule := _SHAPE_RULES.get(op.kind)) is not None:
        rule(op)
    if op.outputs:
        _check_outputs(op)


def _is_plain(op: OpFields) -> bool:
    """The most frequent of all, in which nothing can be wrong: one contiguous tensor summed or averaged in place."""
    if op.kind is not _ALL_REDUCE or op.outputs is not op.inputs or len(op.inputs) != 1:
        return False
    if op.reduce_op is not _SUM and op.reduce_op is not _AVG:
        return False
    if op.root is not None or op.peer is not None or op.tag or op.timeout is not None or op.factor is not None:
        return False
    t = op.inputs[0]
    if not isinstance(t, Tensor) or op.splits is not None or t.layout is not torch.strided:
        return False
    return op.reduce_op in REDUCES.get(t.dtype, ()) and not t.is_meta and not t.is_nested and t.is_contiguous()


def _refuse_tensor(op: OpFields, t: Tensor) -> NoReturn:
    if t.is_meta:
        _refuse(op, f"{_describe(t)} has no data. Materialize it first, with to_empty(device=...) for example.")
    if t.is_nested:
        _refuse(op, "a nested tensor is not supported. Pass its values(), or t.to_padded_tensor(...).")
    advice = "t.int_repr(), and the scale and zero point by themselves" if t.is_quantized else "t.view(torch.uint8)"
    _refuse(op, f"{_describe(t)}: tensors of this dtype cannot be communicated. Pass {advice}.")


def _check_outputs(op: OpFields) -> None:
    plain = len(op.outputs) == 1 and op.outputs[0].is_contiguous()
    if plain or (pair := overlapping(op.outputs)) is None:
        return
    a, b = pair
    if a is b and sum(t is a for t in op.outputs) == 1:
        output = f"an output, {_describe(a)} with strides {a.stride()}, has several elements at one address"
        _refuse(op, f"{output}, as expand() makes them. Pass t.contiguous() instead.")
    outputs = f"two outputs, {_describe(a)} and {_describe(b)}, share memory"
    _refuse(op, f"{outputs}. Pass each output once, and none that overlap.")


def _check_numbers(op: OpFields) -> None:
    if op.root is None and op.peer is None and op.tag == 0 and op.timeout is None and op.kind not in _NUMBERED:
        return
    if op.kind in _ROOTED and op.root is None:
        _refuse(op, "it has no root. Pass src= or dst=.")
    for name, value in (("root", op.root), ("peer", op.peer), ("tag", op.tag)):
        if value is None:
            continue
        if not isinstance(value, int):
            raise UsageTypeError(f"{op.kind.value}: {name} is {value!r}, not an int. Pass a rank of this group.")
        if value < 0:
            _refuse(op, f"{name} is {value}, which is negative. Ranks and tags count from 0.")
    if op.timeout is not None:
        timeout_seconds(op.kind.value, op.timeout)
    if op.kind is OpKind.SEND and op.peer is None:
        _refuse(op, "no destination was given. Pass dst=.")


def _check_alike(op: OpFields, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        return
    first = tensors[0]
    device, layout = first.device, first.layout
    for t in tensors[1:]:
        if t.device != device:
            _refuse(op, f"tensors are on different devices: {_describe(first)}, {_describe(t)}. Move them to one.")
        if t.layout != layout:
            _refuse(op, f"tensors have different layouts: {layout} and {t.layout}. Convert them to one.")
        if op.kind not in COALESCED and t.dtype != first.dtype:
            _refuse(op, f"tensors have different dtypes: {_describe(first)}, {_describe(t)}. Convert them to one.")
    if layout is not torch.strided and (layout is not torch.sparse_coo or op.kind is not OpKind.ALL_REDUCE):
        _refuse(op, f"layout {layout} is not supported. Only all_reduce takes sparse COO tensors; use t.to_dense().")


def _check_reduction(op: OpFields) -> None:
    reduce_op = op.reduce_op
    if not isinstance(reduce_op, ReduceOp):
        raise UsageTypeError(f"{op.kind.value}: op is {reduce_op!r}. Pass a gradwire.ReduceOp, such as ReduceOp.SUM.")
    for t in op.inputs:
        if reduce_op not in REDUCES.get(t.dtype, ()):
            able = "AVG and PREMUL_SUM take floating-point and complex numbers, MIN and MAX real ones"
            able += ", bitwise operations integers and bool"
            _refuse(op, f"{reduce_op.name} of {_describe(t)} is not defined. Convert it first: {able}.")
        if t.is_sparse and reduce_op not in REDUCES_SPARSE.get(t.dtype, ()):
            able = "Sparse tensors of wide floating-point, complex and integer dtypes can be summed or averaged"
            able += "; use t.to_dense()"
            _refuse(op, f"{reduce_op.name} of a sparse tensor, {_describe(t)}, is not supported. {able}.")
    factor = op.factor
    if (reduce_op is ReduceOp.PREMUL_SUM) != (factor is not None):
        _refuse(op, f"op is {reduce_op.name} and factor is {factor!r}. PREMUL_SUM needs factor=, no other takes one.")
    if isinstance(factor, complex) or (isinstance(factor, Tensor) and factor.is_complex()):
        for t in op.inputs:
            if not t.dtype.is_complex:
                _refuse(op, f"factor is complex, {_describe(t)} is not. Pass a real factor, or a complex tensor.")
    if isinstance(factor, Tensor) and factor.numel() != 1:
        _refuse(op, f"factor has shape {list(factor.shape)}. Pass a number or a tensor with one element.")


def _in_place(op: OpFields) -> None:
    if len(op.inputs) != len(op.outputs) or any(
        i is not o and (i.shape != o.shape or i.dtype != o.dtype) for i, o in zip(op.inputs, op.outputs, strict=True)
    ):
        _refuse(op, "inputs and outputs do not pair up. They must be the same tensors, or of equal shapes and dtypes.")


def _pairs(op: OpFields) -> None:
    if len(op.inputs) != len(op.outputs):
        counts = f"{len(op.inputs)} inputs but {len(op.outputs)} outputs"
        _refuse(op, f"{counts} were given. Pass one output for each input.")
    for i, o in zip(op.inputs, op.outputs, strict=True):
        if i.dtype != o.dtype:
            _refuse(op, f"an input and its output differ in dtype: {_describe(i)}, {_describe(o)}. Convert one.")
        whole, part = (o, i) if op.kind is OpKind.ALL_GATHER_INTO_TENSOR else (i, o)
        if whole.numel() and (part.numel() == 0 or whole.numel() % part.numel()):
            _refuse(op, f"{_describe(whole)} is not made of parts like {_describe(part)}. It must have one per rank.")


def _single(op: OpFields) -> None:
    if op.splits is None:
        _same_size(op, op.inputs[0], op.outputs[0], "the input", "the output, in equal parts,")
        return
    for name, splits, t in (("output", op.splits[0], op.outputs[0]), ("input", op.splits[1], op.inputs[0])):
        if any(not isinstance(n, int) or n < 0 for n in splits):
            _refuse(op, f"{name}_split_sizes are {list(splits)}. Split sizes are whole numbers from 0 up.")
        length = t.shape[0] if t.dim() else 1
        if splits and sum(splits) != length:
            sizes = f"{name}_split_sizes {list(splits)} add up to {sum(splits)}"
            _refuse(op, f"{sizes}, but dimension 0 of the {name} has {length}. They must cover it exactly.")
    i, o = op.inputs[0], op.outputs[0]
    if i.shape[1:] != o.shape[1:]:
        rows = f"rows differ: input {_describe(i)}, output {_describe(o)}"
        _refuse(op, f"{rows}. All dimensions but the first must agree.")


_SHAPE_RULES: dict[OpKind, Callable[[OpFields], None]] = {
    OpKind.ALL_REDUCE: _in_place,
    OpKind.BROADCAST: _in_place,
    OpKind.REDUCE: _in_place,
    OpKind.ALL_GATHER_INTO_TENSOR: _pairs,
    OpKind.REDUCE_SCATTER_TENSOR: _pairs,
    OpKind.ALL_TO_ALL_SINGLE: _single,
}


def check_in_world(op: OpFields, rank: int, size: int) -> None:
    """Raise unless `rank` of `size` ranks can submit it."""
    kind = op.kind
    if kind in _FREE_IN_WORLD:
        return
    for name, value in (("root", op.root), ("peer", op.peer)):
        if value is not None and value >= size:
            ranks = f"{name} is {value}, but the group has ranks 0 to {size - 1}"
            _refuse(op, f"{ranks}. Ranks are those of this group, not of the whole job.")
    if kind.is_p2p and op.peer == rank:
        does = "sends to" if kind is OpKind.SEND else "receives from"
        _refuse(op, f"rank {rank} {does} itself. Copy the tensor instead.")
    if kind is OpKind.ALL_GATHER:
        _count(op, "outputs", op.outputs, size)
        _same_size(op, op.outputs[rank], op.inputs[0], f"outputs[{rank}], this rank's place,", "the input")
    elif kind is OpKind.REDUCE_SCATTER:
        _count(op, "inputs", op.inputs, size)
        _same_size(op, op.inputs[rank], op.outputs[0], f"inputs[{rank}], this rank's part,", "the output")
    elif kind is OpKind.ALL_TO_ALL:
        _count(op, "inputs", op.inputs, size)
        _count(op, "outputs", op.outputs, size)
        _same_size(op, op.outputs[rank], op.inputs[rank], f"outputs[{rank}]", f"inputs[{rank}], which stays here,")
    elif kind is OpKind.ALL_TO_ALL_SINGLE:
        _check_parts(op, size)
    elif kind in (OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER_TENSOR):
        for i, o in zip(op.inputs, op.outputs, strict=True):
            whole, part = (o, i) if kind is OpKind.ALL_GATHER_INTO_TENSOR else (i, o)
            if whole.numel() != part.numel() * size:
                sizes = f"{_describe(whole)} is not {size} times {_describe(part)}"
                _refuse(op, f"{sizes}. There are {size} ranks, so it must be {part.numel() * size} elements.")
    elif kind is OpKind.GATHER:
        _check_rooted_list(op, "outputs", op.outputs, op.inputs[0], rank, size)
    elif kind is OpKind.SCATTER:
        _check_rooted_list(op, "inputs", op.inputs, op.outputs[0], rank, size)


def _count(op: OpFields, name: str, given: Sequence[object], size: int) -> None:
    if len(given) != size:
        _refuse(op, f"{len(given)} {name} were given to a group of {size}. Pass {size}, one per rank.")


def _same_size(op: OpFields, a: Tensor, b: Tensor, a_name: str, b_name: str) -> None:
    if a.numel() != b.numel():
        _refuse(op, f"{a_name} is {_describe(a)}, but {b_name} is {_describe(b)}. They must have as many elements.")


def _check_parts(op: OpFields, size: int) -> None:
    for index, (name, t) in enumerate((("output", op.outputs[0]), ("input", op.inputs[0]))):
        splits = op.splits[index] if op.splits else ()
        if splits:
            _count(op, f"{name}_split_sizes", splits, size)
        length = t.shape[0] if t.dim() else 1
        if not splits and length % size:
            uneven = f"dimension 0 of the {name} is {length}, not a multiple of {size} ranks"
            _refuse(op, f"{uneven}. Pad it, or pass {name}_split_sizes.")


def _check_rooted_list(op: OpFields, name: str, tensors: Sequence[Tensor], own: Tensor, rank: int, size: int) -> None:
    if rank == op.root:
        _count(op, name, tensors, size)
        for t in tensors:
            _same_size(op, t, own, f"one of the root's {name}", "the tensor")
    elif tensors:
        _refuse(op, f"rank {rank} is not the root ({op.root}), yet it passes {name}. Only the root passes {name}.")
