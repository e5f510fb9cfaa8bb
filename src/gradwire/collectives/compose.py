"""Collectives of plain bytes made of other kinds, for engines that lack a whole kind.

`lower` reduces every movement of data to one of flat bytes. An engine with few kinds, such as a process group written in Python
that has only what torch's DDP calls (`allreduce`, `broadcast`, `allgather`), may lack the kind altogether; then it is composed
here. Bytes on the wire, for n ranks and b bytes of each rank's own data:

    broadcast               an all-gather, n b; or a sum with zeros, as an all-reduce of b
    all_gather_into_tensor  an all-gather of lists; or n broadcasts of b; or a sum with zeros, as an all-reduce of n b
    all_to_all_single       an all-to-all of lists; or an all-gather of everything, n b instead of b
    gather, scatter         an all-gather; a broadcast of what the root has
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.collectives import build
from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind
from gradwire.errors import UsageError

Program = Generator[Collective, None, None]


@dataclass(frozen=True, slots=True)
class Lowering:
    """What a rule needs to know apart from the operation. Calling it runs a collective by those that the engine takes."""

    rank: int
    size: int
    takes: Callable[[Collective], bool]
    asked: Collective
    """What the caller submitted, for errors."""
    rules: Callable[[Collective, Lowering], Program]

    def __call__(self, op: Collective) -> Program:
        return self.rules(op, self)


def compose(op: Collective, low: Lowering) -> Program:
    """Run `op`, whose tensors are flat bytes and which the engine does not take, by other kinds."""
    rule = _RULES.get(op.kind)
    if rule is None:
        raise UsageError(
            f"{low.asked}: the engine does not take it, and there is nothing simpler to make it of. Use a group that does."
        )
    yield from rule(op, low)


def sums_bytes(low: Lowering) -> bool:
    """Whether the engine adds bytes up."""
    return low.takes(build.all_reduce(torch.empty(1, dtype=torch.uint8)))


def gathers_bytes(low: Lowering) -> bool:
    """Whether the engine has an all-gather, of tensors or of lists."""
    one, whole = torch.empty(1, dtype=torch.uint8), torch.empty(low.size, dtype=torch.uint8)
    return low.takes(build.all_gather_into_tensor(whole, one)) or low.takes(build.all_gather(whole.split(1), one))


def exchanges_bytes(low: Lowering) -> bool:
    """Whether the engine has an all-to-all, of one tensor or of lists."""
    a, b = torch.empty(low.size, dtype=torch.uint8), torch.empty(low.size, dtype=torch.uint8)
    splits = [1] * low.size
    single = build.all_to_all_single(a, b, output_split_sizes=splits, input_split_sizes=splits)
    return low.takes(single) or low.takes(build.all_to_all(a.split(1), b.split(1)))


def _broadcast(op: Collective, low: Lowering) -> Program:
    (place,), root = op.outputs, op.root or 0
    if sums_bytes(low):
        if low.rank != root:
            place.zero_()
        yield build.all_reduce(place, label=op.label)
    elif gathers_bytes(low):
        whole = place.new_empty(low.size * place.numel())
        yield from low(build.all_gather_into_tensor(whole, place, label=op.label))
        place.copy_(whole.view(low.size, -1)[root] if place.numel() else place)
    else:
        _refuse(low)


def _all_gather_into_tensor(op: Collective, low: Lowering) -> Program:
    (part,), (whole,) = op.inputs, op.outputs
    parts: Sequence[Tensor] = whole.split(part.numel()) if part.numel() else [whole] * low.size
    by_list = build.all_gather(parts, part, label=op.label)
    if low.takes(by_list):
        yield by_list
    elif low.takes(build.broadcast(part, src=0)):
        if part.data_ptr() != parts[low.rank].data_ptr():
            parts[low.rank].copy_(part)
        for rank, place in enumerate(parts):
            yield build.broadcast(place, src=rank, label=op.label)
    elif sums_bytes(low):
        own = part.clone()  # it may lie inside the output
        whole.zero_()
        parts[low.rank].copy_(own)
        yield build.all_reduce(whole, label=op.label)
    else:
        _refuse(low)


def _all_to_all_single(op: Collective, low: Lowering) -> Program:
    """Both lists of split sizes are written out, see `lower`."""
    (source,), (target,) = op.inputs, op.outputs
    assert op.splits is not None
    out_splits, in_splits = op.splits
    by_list = build.all_to_all(target.split(out_splits), source.split(in_splits), label=op.label)
    if low.takes(by_list):
        yield by_list
        return
    # Only the other rank knows where this rank's parts begin in its tensor.
    table = torch.empty(low.size * low.size, dtype=torch.int64, device=source.device)
    own = torch.tensor(in_splits, dtype=torch.int64, device=source.device)
    yield from low(build.all_gather_into_tensor(table, own, label=op.label))
    lengths: list[list[int]] = table.view(low.size, low.size).tolist()
    longest = max(sum(row) for row in lengths)
    whole = source.new_empty(low.size * longest)
    padded = torch.cat([source, source.new_zeros(longest - source.numel())])
    yield from low(build.all_gather_into_tensor(whole, padded, label=op.label))
    offset = 0
    for sender, row in enumerate(lengths):
        begin, count = sender * longest + sum(row[: low.rank]), row[low.rank]
        target[offset : offset + count].copy_(whole[begin : begin + count])
        offset += count


def _gather(op: Collective, low: Lowering) -> Program:
    (mine,) = op.inputs
    whole = mine.new_empty(low.size * mine.numel())
    yield from low(build.all_gather_into_tensor(whole, mine, label=op.label))
    for place, part in zip(op.outputs, whole.view(low.size, -1) if mine.numel() else (), strict=False):
        place.copy_(part)


def _scatter(op: Collective, low: Lowering) -> Program:
    (place,) = op.outputs
    whole = torch.cat(op.inputs) if op.inputs else place.new_empty(low.size * place.numel())
    yield from low(build.broadcast(whole, src=op.root or 0, label=op.label))
    if place.numel():
        place.copy_(whole.view(low.size, -1)[low.rank])


def _refuse(low: Lowering) -> None:
    raise UsageError(
        f"{low.asked}: the engine has no all-reduce, broadcast or all-gather to make it of. Implement one of them in the group."
    )


_RULES: dict[OpKind, Callable[[Collective, Lowering], Program]] = {
    OpKind.BROADCAST: _broadcast,
    OpKind.ALL_GATHER_INTO_TENSOR: _all_gather_into_tensor,
    OpKind.ALL_TO_ALL_SINGLE: _all_to_all_single,
    OpKind.GATHER: _gather,
    OpKind.SCATTER: _scatter,
}
