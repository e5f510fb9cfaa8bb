"""What each torch.distributed engine supports natively, and how it is called. Only this module calls c10d's API (methods, options).

Note [Why in pieces]
Gloo moves a message over one connection, and while it writes a long one it hardly reads. When two ranks send to each other, a
full-duplex link is then often used in one direction after the other: 3.6 MB each way over 100 Mbit/s took between 0.30 and 0.60 s
where the link needs 0.29. So an exchange is split into pieces, all started at once. Small ones keep both directions busy, and cost
processor time. Steps with 4 and 8 bits, as fractions of those with pieces of 256 KiB: 0.94 with 64 KiB, 0.96 with 128 and 1.4 with
1024 at 100 Mbit/s; 1.11 with 64 and 1.03 with 128 at 1 Gbit/s. Gloo splits its all-reduce itself. Only what has the same size on
all ranks is split.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.collectives.aliasing import is_native
from gradwire.collectives.lower import as_bytes

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
PIECE = 128 * 1024
"""Bytes to each peer."""
_MOST_PIECES = 64
_MARGIN = timedelta(milliseconds=2)
_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@dataclass(frozen=True, slots=True)
class C10dEngine:
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


_JOINED = frozenset({OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER_TENSOR})
# Gloo's reduce may write into the tensors of ranks other than the root, and its reduce-scatter and all-to-all of lists are recent
# and incomplete; they are composed of others.
_NCCL = frozenset(OpKind) - {OpKind.REDUCE_SCATTER}
_GLOO = _NCCL - {OpKind.REDUCE, OpKind.REDUCE_SCATTER_TENSOR, OpKind.ALL_TO_ALL}


def takes_tensors(op: Collective, kinds: frozenset[OpKind], *, any_shape: bool = False) -> bool:
    """Whether an engine that implements `kinds` takes this: plain tensors of the usual dtypes, one at a time. Parts of one tensor
    must be flat, since parts of [2, 3] may form [4, 3] as well as [2, 2, 3], unless it takes `any_shape`."""
    if not is_native(op, kinds):
        return False
    kind, ins, outs = op.kind, op.inputs, op.outputs
    if kind in _JOINED and not (any_shape or ins[0].dim() == outs[0].dim() == 1):
        return False
    if kind is OpKind.ALL_TO_ALL_SINGLE and op.splits is not None and not all(op.splits):
        return False
    if kind is OpKind.ALL_GATHER and len({t.numel() for t in outs}) > 1:
        return False
    if kind is OpKind.REDUCE_SCATTER and len({t.numel() for t in ins}) > 1:
        return False
    return not op.tensors or op.tensors[0].dtype in _FLOATS | _INTEGERS


def _gloo_takes(op: Collective) -> bool:
    if not takes_tensors(op, _GLOO):
        return False
    if op.kind.is_p2p:
        return op.device.type == "cpu"  # it would pass a device pointer to the kernel's socket calls
    if op.kind is not OpKind.ALL_REDUCE:
        return True
    dtype = op.inputs[0].dtype
    if op.reduce_op is ReduceOp.AVG:
        return _TORCH >= (2, 13) and dtype in (torch.float32, torch.float64)
    return op.reduce_op in _ARITHMETIC or (dtype in _INTEGERS and op.reduce_op in _BITWISE)


def _nccl_takes(op: Collective) -> bool:
    if op.kind is OpKind.RECV and op.peer is None:
        return False
    return op.reduce_op not in _BITWISE and takes_tensors(op, _NCCL, any_shape=True)


_REDUCE_OPS: dict[ReduceOp, Any] = {
    op: getattr(dist.ReduceOp, op.name) for op in ReduceOp if op is not ReduceOp.PREMUL_SUM
}


def _set(options: Any, op: Collective, timeout: timedelta) -> Any:
    options.timeout = timeout
    if op.reduce_op is not None:
        options.reduceOp = _REDUCE_OPS[op.reduce_op]
    if op.root is not None:
        options.rootRank = op.root
    if op.kind is OpKind.BROADCAST:
        options.rootTensor = 0
    return options


def call(pg: Any, op: Collective, timeout: float) -> Any:
    """Pass `op` to the process group or backend `pg`; returns c10d's Work."""
    ins = [t.detach() if t.requires_grad else t for t in op.inputs]
    outs = [t.detach() if t.requires_grad else t for t in op.outputs]
    return _CALLS[op.kind](pg, op, ins, outs, timedelta(seconds=timeout))


_CALLS: dict[OpKind, Callable[[Any, Collective, list[Tensor], list[Tensor], timedelta], Any]] = {
    OpKind.ALL_REDUCE: lambda pg, op, i, o, t: pg.allreduce(i, _set(c10d.AllreduceOptions(), op, t)),
    OpKind.BROADCAST: lambda pg, op, i, o, t: pg.broadcast(i, _set(c10d.BroadcastOptions(), op, t)),
    OpKind.REDUCE: lambda pg, op, i, o, t: pg.reduce(i, _set(c10d.ReduceOptions(), op, t)),
    OpKind.ALL_GATHER: lambda pg, op, i, o, t: pg.allgather([o], i, _set(c10d.AllgatherOptions(), op, t)),
    OpKind.ALL_GATHER_INTO_TENSOR: lambda pg, op, i, o, t: pg._allgather_base(
        o[0], i[0], _set(c10d.AllgatherOptions(), op, t)
    ),
    OpKind.REDUCE_SCATTER: lambda pg, op, i, o, t: pg.reduce_scatter(o, [i], _set(c10d.ReduceScatterOptions(), op, t)),
    OpKind.REDUCE_SCATTER_TENSOR: lambda pg, op, i, o, t: pg._reduce_scatter_base(
        o[0], i[0], _set(c10d.ReduceScatterOptions(), op, t)
    ),
    OpKind.ALL_TO_ALL: lambda pg, op, i, o, t: pg.alltoall(o, i, _set(c10d.AllToAllOptions(), op, t)),
    OpKind.ALL_TO_ALL_SINGLE: lambda pg, op, i, o, t: pg.alltoall_base(
        o[0], i[0], *map(list, op.splits or ((), ())), _set(c10d.AllToAllOptions(), op, t)
    ),
    OpKind.GATHER: lambda pg, op, i, o, t: pg.gather([o] if o else [], i, _set(c10d.GatherOptions(), op, t)),
    OpKind.SCATTER: lambda pg, op, i, o, t: pg.scatter(o, [i] if i else [], _set(c10d.ScatterOptions(), op, t)),
    OpKind.SEND: lambda pg, op, i, o, t: pg.send(i, op.peer, op.tag),
    OpKind.RECV: lambda pg, op, i, o, t: (
        pg.recv_anysource(o, op.tag) if op.peer is None else pg.recv(o, op.peer, op.tag)
    ),
    OpKind.BARRIER: lambda pg, op, i, o, t: pg.barrier(_set(c10d.BarrierOptions(), op, t)),
}


def _gloo_call(pg: Any, op: Collective, timeout: float) -> Any:
    """`call`, with large exchanges in pieces: see Note [Why in pieces]."""
    return cut(pg, op, timeout) or call(pg, op, timeout)


def cut(pg: Any, op: Collective, timeout: float) -> Any:
    """`op`, started in pieces, as an object with c10d's Work interface; None if it is not split."""
    equal = op.kind is OpKind.ALL_GATHER_INTO_TENSOR or (op.kind is OpKind.ALL_TO_ALL_SINGLE and op.splits is None)
    if not equal or op.device.type != "cpu" or len(op.inputs) != 1 or pg.size() == 1:
        return None
    whole = op.outputs[0].nbytes // pg.size()
    if whole < 2 * PIECE:
        return None
    ins, outs = as_bytes(op.inputs[0]), as_bytes(op.outputs[0]).view(pg.size(), whole)
    if op.kind is OpKind.ALL_TO_ALL_SINGLE:
        ins = ins.view(outs.shape)
    length = max(PIECE, -(-whole // _MOST_PIECES // 16) * 16)

    def begin(at: int) -> tuple[Any, Callable[[], object]]:
        place = outs[:, at : at + length]
        sent = ins[..., at : at + length].contiguous()
        came = torch.empty_like(place, memory_format=torch.contiguous_format)
        native = call(pg, replace(op, inputs=(sent.view(-1),), outputs=(came.view(-1),)), timeout)
        return native, lambda: place.copy_(came)

    return Pieces([begin(at) for at in range(0, whole, length)])


class Pieces:
    """Stands in for c10d's Work: done when every piece is done and in place."""

    def __init__(self, steps: list[tuple[Any, Callable[[], object]]]) -> None:
        """`steps` has c10d's Work of each piece, and what to do when that is done."""
        self._steps = steps[::-1]
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raises what a piece raised, or, like c10d, a RuntimeError after `timeout`."""
        deadline = None if timeout is None else time.perf_counter() + timeout.total_seconds()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
            raise RuntimeError("another thread is still waiting for the pieces of this operation")
        try:
            while self._steps:
                native, put = self._steps[-1]
                if deadline is None:
                    native.wait()
                else:
                    native.wait(max(_MARGIN, timedelta(seconds=deadline - time.perf_counter())))
                put()
                self._steps.pop()
        finally:
            self._lock.release()
        return True

    def is_completed(self) -> bool:
        return all(native.is_completed() for native, _ in list(self._steps))


GLOO = C10dEngine("gloo", _gloo_takes, _gloo_call)
NCCL = C10dEngine("nccl", _nccl_takes, call, stream_ordered=True)
