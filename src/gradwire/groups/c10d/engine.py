"""What each torch.distributed engine supports natively, and how it is called. The only module that calls c10d's API (method names,
option objects, reduce ops).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.aliasing import is_plain
from gradwire.collectives.lower import Program, lower
from gradwire.groups.c10d.chunked_exchange import cut

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@dataclass(frozen=True, slots=True)
class Engine:
    """One kind of c10d backend."""

    name: str
    takes: Callable[[Collective], bool]
    """Whether it supports this collective natively; others are lowered to ones it does."""
    call: Callable[[Any, Collective, float], Any]
    """Passes a collective to the process group or backend; returns c10d's Work or an object that can be waited on like it."""
    stream_ordered: bool = False
    """Whether a finished wait() only means "ordered on the current CUDA stream", as with NCCL."""
    may_block: bool = False
    """Whether a call may block until the peers have called too; it is then made on the group's lane, not by the caller."""

    def program(self, op: Collective, *, rank: int, size: int) -> Program:
        """The collective as steps that the engine supports."""
        return lower(op, rank=rank, size=size, takes=self.takes)


def is_usual(op: Collective) -> bool:
    """Whether the tensors are plain and of dtypes that every engine moves."""
    return _plain(op) and _movable(op)


def _movable(op: Collective) -> bool:
    dtype = op.tensors[0].dtype if op.tensors else torch.uint8
    return dtype in _FLOATS or dtype in _INTEGERS


def one_size(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all have the same number of elements."""
    return len({t.numel() for t in tensors}) <= 1


def _plain(op: Collective) -> bool:
    return all(is_plain(t) for t in op.inputs) and (op.outputs is op.inputs or all(is_plain(t) for t in op.outputs))


def _gloo_takes(op: Collective) -> bool:
    kind = op.kind
    if kind is OpKind.BARRIER:
        return True
    if len(op.inputs) > 1 and kind is OpKind.ALL_REDUCE:
        return False  # before each of many tensors is looked at
    if not _plain(op) or not (_movable(op) or kind.is_p2p):
        return False
    if kind.is_p2p and op.device.type != "cpu":
        return False  # it would pass a device pointer to the kernel's socket calls
    if kind in (OpKind.ALL_REDUCE, OpKind.BROADCAST):
        return len(op.inputs) == 1 and op.inputs[0] is op.outputs[0] and (kind is OpKind.BROADCAST or _gloo_reduces(op))
    if kind is OpKind.ALL_GATHER:
        return one_size(op.outputs)
    if kind is OpKind.ALL_GATHER_INTO_TENSOR:
        # Gloo compares shapes, but parts of shape [2, 3] may form [4, 3] as well as [2, 2, 3]: only flat ones are unambiguous.
        return len(op.inputs) == 1 and op.inputs[0].dim() == op.outputs[0].dim() == 1
    if kind is OpKind.ALL_TO_ALL_SINGLE:
        return op.splits is None or all(op.splits)
    # Gloo's reduce may write into the tensors of ranks other than the root, and its reduce-scatter and all-to-all of lists are
    # recent and incomplete; they are composed of others.
    return kind in (OpKind.GATHER, OpKind.SCATTER, OpKind.SEND, OpKind.RECV)


def _gloo_reduces(op: Collective) -> bool:
    dtype, reduce_op = op.inputs[0].dtype, op.reduce_op
    if reduce_op is ReduceOp.AVG:
        return _TORCH >= (2, 13) and dtype in (torch.float32, torch.float64)
    return reduce_op in _ARITHMETIC or (dtype in _INTEGERS and reduce_op in _BITWISE)


def _nccl_takes(op: Collective) -> bool:
    kind = op.kind
    if kind is OpKind.BARRIER:
        return True
    if not _plain(op) or not _movable(op):
        return False
    if kind.reduces:
        if op.reduce_op in _BITWISE or op.reduce_op is ReduceOp.PREMUL_SUM:
            return False
        in_place = kind not in (OpKind.ALL_REDUCE, OpKind.REDUCE) or op.inputs[0] is op.outputs[0]
        return len(op.inputs) == 1 and in_place
    if kind is OpKind.BROADCAST:
        return len(op.inputs) == 1 and op.inputs[0] is op.outputs[0]
    if kind is OpKind.ALL_GATHER:
        return one_size(op.outputs)
    if kind is OpKind.ALL_GATHER_INTO_TENSOR:
        return len(op.inputs) == 1
    if kind is OpKind.ALL_TO_ALL_SINGLE:
        return op.splits is None or all(op.splits)
    return kind in (OpKind.ALL_TO_ALL, OpKind.GATHER, OpKind.SCATTER, OpKind.SEND) or (
        kind is OpKind.RECV and op.peer is not None
    )


# -- calls ---------------------------------------------------------------------------------------------------------------

_REDUCE_OPS = {op: getattr(dist.ReduceOp, op.name) for op in ReduceOp if op is not ReduceOp.PREMUL_SUM}


def _reduce_op(op: Collective) -> Any:
    assert op.reduce_op is not None
    if op.reduce_op is not ReduceOp.PREMUL_SUM:
        return _REDUCE_OPS[op.reduce_op]
    return c10d._make_nccl_premul_sum(op.factor)  # type: ignore[arg-type]


def _set(options: Any, op: Collective, timeout: timedelta) -> Any:
    options.timeout = timeout
    if op.kind.reduces:
        options.reduceOp = _reduce_op(op)
    if op.root is not None:
        options.rootRank = op.root
    if op.kind is OpKind.BROADCAST:
        options.rootTensor = 0
    return options


def call(pg: Any, op: Collective, timeout: float) -> Any:
    """Pass `op` to the process group or backend `pg`; returns c10d's Work."""
    # A sparse tensor is written by replacing its indices and values, which a write to a detached alias would not do.
    ins = [t if t.is_sparse or not t.requires_grad else t.detach() for t in op.inputs]
    outs = [t if t.is_sparse or not t.requires_grad else t.detach() for t in op.outputs]
    return _CALLS[op.kind](pg, op, ins, outs, timedelta(seconds=timeout))


def _all_reduce(pg: Any, op: Collective, ins: list[Tensor], outs: list[Tensor], timeout: timedelta) -> Any:
    if len(ins) == 1:
        return pg.allreduce(ins, _set(c10d.AllreduceOptions(), op, timeout))
    return pg.allreduce_coalesced(ins, _set(c10d.AllreduceCoalescedOptions(), op, timeout))


def _all_gather_into_tensor(pg: Any, op: Collective, ins: list[Tensor], outs: list[Tensor], timeout: timedelta) -> Any:
    options = _set(c10d.AllgatherOptions(), op, timeout)
    if len(ins) == 1:
        return pg._allgather_base(outs[0], ins[0], options)
    return pg.allgather_into_tensor_coalesced(outs, ins, options)


def _reduce_scatter_tensor(pg: Any, op: Collective, ins: list[Tensor], outs: list[Tensor], timeout: timedelta) -> Any:
    options = _set(c10d.ReduceScatterOptions(), op, timeout)
    if len(ins) == 1:
        return pg._reduce_scatter_base(outs[0], ins[0], options)
    return pg.reduce_scatter_tensor_coalesced(outs, ins, options)


def _all_to_all_single(pg: Any, op: Collective, ins: list[Tensor], outs: list[Tensor], timeout: timedelta) -> Any:
    out_splits, in_splits = op.splits or ((), ())
    options = _set(c10d.AllToAllOptions(), op, timeout)
    return pg.alltoall_base(outs[0], ins[0], list(out_splits), list(in_splits), options)


def _recv(pg: Any, op: Collective, ins: list[Tensor], outs: list[Tensor], timeout: timedelta) -> Any:
    return pg.recv_anysource(outs, op.tag) if op.peer is None else pg.recv(outs, op.peer, op.tag)


_CALLS: dict[OpKind, Callable[[Any, Collective, list[Tensor], list[Tensor], timedelta], Any]] = {
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.BROADCAST: lambda pg, op, i, o, t: pg.broadcast(i, _set(c10d.BroadcastOptions(), op, t)),
    OpKind.REDUCE: lambda pg, op, i, o, t: pg.reduce(i, _set(c10d.ReduceOptions(), op, t)),
    OpKind.ALL_GATHER: lambda pg, op, i, o, t: pg.allgather([o], i, _set(c10d.AllgatherOptions(), op, t)),
    OpKind.ALL_GATHER_INTO_TENSOR: _all_gather_into_tensor,
    OpKind.REDUCE_SCATTER: lambda pg, op, i, o, t: pg.reduce_scatter(o, [i], _set(c10d.ReduceScatterOptions(), op, t)),
    OpKind.REDUCE_SCATTER_TENSOR: _reduce_scatter_tensor,
    OpKind.ALL_TO_ALL: lambda pg, op, i, o, t: pg.alltoall(o, i, _set(c10d.AllToAllOptions(), op, t)),
    OpKind.ALL_TO_ALL_SINGLE: _all_to_all_single,
    OpKind.GATHER: lambda pg, op, i, o, t: pg.gather([o] if o else [], i, _set(c10d.GatherOptions(), op, t)),
    OpKind.SCATTER: lambda pg, op, i, o, t: pg.scatter(o, [i] if i else [], _set(c10d.ScatterOptions(), op, t)),
    OpKind.SEND: lambda pg, op, i, o, t: pg.send(i, op.peer, op.tag),
    OpKind.RECV: _recv,
    OpKind.BARRIER: lambda pg, op, i, o, t: pg.barrier(_set(c10d.BarrierOptions(), op, t)),
}


def _gloo_call(pg: Any, op: Collective, timeout: float) -> Any:
    """`call`, with large operations in pieces: see `pieces`."""
    return cut(pg, op, timeout, call) or call(pg, op, timeout)


GLOO = Engine("gloo", _gloo_takes, _gloo_call)
NCCL = Engine("nccl", _nccl_takes, call, stream_ordered=True)
KNOWN: Mapping[str, Engine] = MappingProxyType({"gloo": GLOO, "nccl": NCCL})
"""C++ engines by backend name."""
