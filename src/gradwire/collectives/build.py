"""Constructors of collectives, named as in torch.distributed. Each returns a checked `Collective` and moves no byte."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind, ReduceOp

Tensors = Tensor | Sequence[Tensor]
Factor = float | Tensor | None
SUM = ReduceOp.SUM
_ALL_REDUCE = OpKind.ALL_REDUCE


def _tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def all_reduce(tensors: Tensors, *, op: ReduceOp = SUM, factor: Factor = None, label: str = "") -> Collective:
    """Reduce over all ranks, in place. Several tensors are one operation (torch's all_reduce_coalesced)."""
    ts = _tuple(tensors)
    return Collective(_ALL_REDUCE, ts, ts, op, factor=factor, label=label)


def broadcast(tensors: Tensors, *, src: int, label: str = "") -> Collective:
    """Make every rank's tensors equal to those of `src`, in place."""
    ts = _tuple(tensors)
    return Collective(OpKind.BROADCAST, ts, ts, root=src, label=label)


def reduce(tensor: Tensor, *, dst: int, op: ReduceOp = SUM, factor: Factor = None, label: str = "") -> Collective:
    """Reduce over all ranks into the tensor of `dst`; the other ranks' tensors keep their values."""
    return Collective(OpKind.REDUCE, (tensor,), (tensor,), reduce_op=op, root=dst, factor=factor, label=label)


def all_gather(outputs: Sequence[Tensor], tensor: Tensor, *, label: str = "") -> Collective:
    """Fill `outputs[i]` with rank i's `tensor`; sizes may differ between ranks."""
    return Collective(OpKind.ALL_GATHER, (tensor,), tuple(outputs), label=label)


def all_gather_into_tensor(outputs: Tensors, inputs: Tensors, *, label: str = "") -> Collective:
    """Concatenate all ranks' inputs into each output. Several pairs are one operation (torch's …_coalesced)."""
    return Collective(OpKind.ALL_GATHER_INTO_TENSOR, _tuple(inputs), _tuple(outputs), label=label)


def reduce_scatter(
    output: Tensor, inputs: Sequence[Tensor], *, op: ReduceOp = SUM, factor: Factor = None, label: str = ""
) -> Collective:
    """Reduce `inputs[i]` over all ranks into rank i's `output`."""
    return Collective(OpKind.REDUCE_SCATTER, tuple(inputs), (output,), reduce_op=op, factor=factor, label=label)


def reduce_scatter_tensor(
    outputs: Tensors, inputs: Tensors, *, op: ReduceOp = SUM, factor: Factor = None, label: str = ""
) -> Collective:
    """Cut each input into one part per rank and reduce part i into rank i's output. Several pairs are one operation."""
    kind = OpKind.REDUCE_SCATTER_TENSOR
    return Collective(kind, _tuple(inputs), _tuple(outputs), reduce_op=op, factor=factor, label=label)


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, label: str = "") -> Collective:
    """Send `inputs[j]` to rank j and receive `outputs[i]` from rank i."""
    return Collective(OpKind.ALL_TO_ALL, tuple(inputs), tuple(outputs), label=label)


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    label: str = "",
) -> Collective:
    """The all-to-all of one tensor cut along dimension 0, into equal parts or by split sizes."""
    splits = None
    if output_split_sizes or input_split_sizes:
        splits = (tuple(output_split_sizes or ()), tuple(input_split_sizes or ()))
    return Collective(OpKind.ALL_TO_ALL_SINGLE, (tensor,), (output,), splits=splits, label=label)


def gather(tensor: Tensor, outputs: Sequence[Tensor] | None = None, *, dst: int, label: str = "") -> Collective:
    """Bring every rank's tensor to `dst`, which alone passes `outputs`, one per rank."""
    return Collective(OpKind.GATHER, (tensor,), tuple(outputs or ()), root=dst, label=label)


def scatter(output: Tensor, inputs: Sequence[Tensor] | None = None, *, src: int, label: str = "") -> Collective:
    """Hand `inputs[i]` of `src`, which alone passes them, to rank i."""
    return Collective(OpKind.SCATTER, tuple(inputs or ()), (output,), root=src, label=label)


def send(tensor: Tensor, *, dst: int, tag: int = 0, label: str = "") -> Collective:
    """Send to `dst`; done when it has been received."""
    return Collective(OpKind.SEND, (tensor,), peer=dst, tag=tag, label=label)


def recv(tensor: Tensor, *, src: int | None = None, tag: int = 0, label: str = "") -> Collective:
    """Receive from `src`, or from the first rank that sends; the Work's `source_rank` is the sender."""
    return Collective(OpKind.RECV, outputs=(tensor,), peer=src, tag=tag, label=label)


def barrier(*, label: str = "") -> Collective:
    """Done when every rank has arrived."""
    return Collective(OpKind.BARRIER, label=label)
