"""How a collective is made of simpler ones, for engines that lack it.

`lower(op, rank=…, size=…, takes=…)` is a generator that yields only collectives for which `takes` is true, in the same order on
every rank; its driver carries each out before it takes the next, and when it ends `op`'s outputs hold the result. Rules: pack what
is scattered in memory, move any dtype as bytes, from one rank to another by way of the host if need be, and make a reduction the
engine cannot do from an all-to-all, a local sum in rank order and an all-gather: 2 (size - 1) / size of the data per rank on the
wire, as a ring's. It uses no group, engine or thread, so it is tested with simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.collectives import build
from gradwire.collectives.aliasing import apart, is_plain
from gradwire.collectives.compose import Lowering, Program as Program, compose, exchanges_bytes
from gradwire.collectives.op import Collective
from gradwire.collectives.op_kinds import OpKind, ReduceOp
from gradwire.collectives.reference import reduce_tensors, store, working_dtype, writes


def is_identity(op: Collective) -> bool:
    """Whether a group of one rank has the result before it begins. Sparse results are coalesced, as gloo's."""
    in_place = op.outputs is op.inputs and not any(t.is_sparse for t in op.inputs)
    return in_place and (op.kind is OpKind.BROADCAST or (op.kind is OpKind.ALL_REDUCE and op.factor is None))


def flat(t: Tensor) -> Tensor:
    """All elements of a plain tensor in one row, in the same memory."""
    return t.detach().view(-1)


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of a plain tensor, in the same memory."""
    # Not view(-1): of none or one element any stride is contiguous, but only a stride of 1 can be viewed as bytes.
    return t.detach().as_strided((t.numel(),), (1,)).view(torch.uint8)


def part_bytes(t: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Bytes of each rank's part of `t`, which is cut along dimension 0: by `splits`, or into equal parts where there are none."""
    rows = t.shape[0] if t.dim() else 1
    row = t.nbytes // rows if rows else 0
    return [n * row for n in splits or [rows // size] * size]


def on_copies(op: Collective, copied: Callable[[Tensor], Tensor]) -> Collective:
    """`op` on what `copied` makes of its tensors: of one that is both input and output, one."""
    copies = {id(t): copied(t) for t in op.inputs + op.outputs}
    inputs = tuple(copies[id(t)] for t in op.inputs)
    outputs = inputs if op.outputs is op.inputs else tuple(copies[id(t)] for t in op.outputs)
    return replace(op, inputs=inputs, outputs=outputs)


def _plain(t: Tensor) -> Tensor:
    if is_plain(t):
        return t
    return t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _lowered(op: Collective, low: Lowering) -> Program:
    if low.takes(op):
        yield op
    elif all(t.is_sparse or is_plain(t) for t in (op.inputs if op.outputs is op.inputs else op.inputs + op.outputs)):
        yield from _RULES[op.kind](op, low)
    else:
        yield from _staged(op, low)


def _staged(op: Collective, low: Lowering) -> Program:
    """The same collective on plain copies. How a tensor lies in memory is known to this rank only: were it to decide
    which collectives are submitted, ranks with different layouts would submit different ones."""
    copied = on_copies(op, _plain)
    yield from low(copied)
    for t, copy in zip(op.outputs, copied.outputs, strict=True):
        if copy is not t:
            store(t.detach(), copy)


def lower(op: Collective, *, rank: int, size: int, takes: Callable[[Collective], bool]) -> Program:
    """Run `op` by collectives that the engine takes.

    >>> ops = lower(build.barrier(label="start"), rank=0, size=2, takes=lambda op: op.kind is OpKind.ALL_REDUCE)
    >>> list(ops)
    [all_reduce(uint8[1], SUM, label='start')]
    """
    for step in writes(op.outputs, Lowering(rank, size, takes, op, _lowered)(apart(op, rank))):
        yield step if op.timeout is None else step.within(op.timeout)


_BOOL_AS_BYTES = dict.fromkeys((ReduceOp.SUM, ReduceOp.BOR), ReduceOp.MAX)
_BOOL_AS_BYTES |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.BAND), ReduceOp.MIN)
_LINEAR = frozenset({ReduceOp.SUM, ReduceOp.AVG})


def _all_reduce(op: Collective, low: Lowering) -> Program:
    reduce_op = op.reduce_op
    assert reduce_op is not None
    if len(op.inputs) > 1:
        yield from _all_reduce_packed(op, low)
        return
    source, target = op.inputs[0], op.outputs[0]
    if source.is_sparse:
        yield from _all_reduce_sparse(op, low)
    elif reduce_op is ReduceOp.PREMUL_SUM or source is not target:
        copy = _scaled(op, source).detach().clone()
        sum_op = ReduceOp.SUM if reduce_op is ReduceOp.PREMUL_SUM else reduce_op
        yield from low(build.all_reduce(copy, op=sum_op, label=op.label))
        store(target, copy)
    elif source.dtype is torch.bool:
        yield from low(build.all_reduce(as_bytes(source), op=_BOOL_AS_BYTES.get(reduce_op, reduce_op), label=op.label))
    elif source.dtype.is_complex and reduce_op in _LINEAR:
        yield from low(build.all_reduce(torch.view_as_real(source.detach()), op=reduce_op, label=op.label))
    elif reduce_op is ReduceOp.AVG and source.dtype in (torch.float32, torch.float64):
        yield from low(build.all_reduce(source, op=ReduceOp.SUM, label=op.label))
        source.detach().div_(low.size)
    elif exchanges_bytes(low):
        yield from _all_reduce_by_exchange(op, low)
    elif reduce_op in _LINEAR and source.dtype.is_floating_point and working_dtype(source.dtype) is not source.dtype:
        wide = source.detach().to(working_dtype(source.dtype))
        yield from low(build.all_reduce(wide, op=reduce_op, label=op.label))
        store(source.detach(), wide)
    else:
        yield from _all_reduce_by_gather(op, low)


def _scaled(op: Collective, t: Tensor) -> Tensor:
    if op.reduce_op is not ReduceOp.PREMUL_SUM:
        return t
    assert op.factor is not None
    # Narrow dtypes are scaled, sent and summed in float32, so that they are rounded once, as in the reference.
    return t.detach().to(working_dtype(t.dtype)) * op.factor


def _all_reduce_packed(op: Collective, low: Lowering) -> Program:
    """Several tensors as one flat buffer per dtype; sparse ones by themselves."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(op.inputs):
        if t.is_sparse:
            single = build.all_reduce(t, op=op.reduce_op or ReduceOp.SUM, factor=op.factor, label=op.label)
            yield from low(single)
            if op.outputs[i] is not t:
                store(op.outputs[i], t)
        else:
            by_dtype.setdefault(t.dtype, []).append(i)
    for indices in by_dtype.values():
        buffer = _pack([op.inputs[i] for i in indices])
        yield from low(build.all_reduce(buffer, op=op.reduce_op or ReduceOp.SUM, factor=op.factor, label=op.label))
        _unpack(buffer, [op.outputs[i] for i in indices])


@torch.no_grad()
def _pack(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:  # of which torch's function makes no copy
        return flat(tensors[0]).clone()
    packed: Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return packed


@torch.no_grad()
def _unpack(buffer: Tensor, tensors: list[Tensor]) -> None:
    pieces = torch._C._nn.unflatten_dense_tensors(buffer, tensors)
    if buffer.dtype.itemsize > 1 and (buffer.is_floating_point() or buffer.is_complex()):
        torch._foreach_copy_(tensors, pieces)
        return
    for tensor, piece in zip(tensors, pieces, strict=True):  # torch.foreach_copy_ lacks some integers on CUDA
        tensor.copy_(piece)


def _all_reduce_by_exchange(op: Collective, low: Lowering) -> Program:
    t, n, size = op.inputs[0], op.inputs[0].numel(), low.size
    share = -(-n // size)
    padded = torch.zeros(share * size, dtype=t.dtype, device=t.device)
    padded[:n].copy_(flat(t))
    received = torch.empty_like(padded)
    yield from low(build.all_to_all_single(received, padded, label=op.label))
    mine = reduce_tensors(op.reduce_op or ReduceOp.SUM, received.view(size, share).unbind())
    yield from low(build.all_gather_into_tensor(padded, mine, label=op.label))
    store(t.detach(), padded[:n])


def _all_reduce_by_gather(op: Collective, low: Lowering) -> Program:
    """n times the data on the wire, for engines without an all-to-all."""
    t = op.inputs[0]
    whole = torch.empty(low.size * t.numel(), dtype=t.dtype, device=t.device)
    yield from low(build.all_gather_into_tensor(whole, flat(t), label=op.label))
    store(t.detach(), reduce_tensors(op.reduce_op or ReduceOp.SUM, whole.view(low.size, t.numel()).unbind()))


def _all_reduce_sparse(op: Collective, low: Lowering) -> Program:
    """Gather every rank's indices and values, then add up: coordinates may differ from rank to rank."""
    own = op.inputs[0].detach().coalesce()
    indices, values = own.indices(), own.values()
    counts = torch.empty(low.size, dtype=torch.int64, device=own.device)
    yield from low(build.all_gather_into_tensor(counts, counts.new_tensor([values.shape[0]]), label=op.label))
    lengths = counts.tolist()
    all_indices = [indices.new_empty(indices.shape[0] * n) for n in lengths]
    yield from low(build.all_gather(all_indices, flat(indices), label=op.label))
    row = values.shape[1:].numel()
    scaled = flat(_scaled(op, values))
    all_values = [scaled.new_empty(n * row) for n in lengths]
    yield from low(build.all_gather(all_values, scaled, label=op.label))
    parts = []
    for i, v, n in zip(all_indices, all_values, lengths, strict=True):
        places, rows = i.view(indices.shape[0], n), v.view(n, *values.shape[1:])
        parts.append(torch.sparse_coo_tensor(places, rows, own.shape, check_invariants=False))
    sum_op = ReduceOp.SUM if op.reduce_op is ReduceOp.PREMUL_SUM else op.reduce_op or ReduceOp.SUM
    # Not into outputs[0].detach(): a sparse tensor is written by giving it new indices and values, which a detached twin
    # would keep for itself.
    store(op.outputs[0], reduce_tensors(sum_op, parts).to(own.dtype).coalesce())


def _reduce(op: Collective, low: Lowering) -> Program:
    # An all-reduce of a copy: twice the bytes of a reduction to the root, but the others' tensors stay untouched.
    copy = flat(op.inputs[0]).clone()
    yield from low(build.all_reduce(copy, op=op.reduce_op or ReduceOp.SUM, factor=op.factor, label=op.label))
    if low.rank == op.root:
        store(op.outputs[0].detach(), copy)


def _reduce_scatter(op: Collective, low: Lowering) -> Program:
    output = op.outputs[0]
    sum_op = ReduceOp.SUM if op.reduce_op is ReduceOp.PREMUL_SUM else op.reduce_op or ReduceOp.SUM
    parts = [flat(_scaled(op, t)) for t in op.inputs]
    if not exchanges_bytes(low):
        whole = torch.cat(parts)
        yield from low(build.all_reduce(whole, op=sum_op, label=op.label))
        store(output.detach(), whole.split([part.numel() for part in parts])[low.rank])
        return
    received = [torch.empty(output.numel(), dtype=parts[0].dtype, device=output.device) for _ in range(low.size)]
    yield from low(build.all_to_all(received, parts, label=op.label))
    store(output.detach(), reduce_tensors(sum_op, received))


def _reduce_scatter_tensor(op: Collective, low: Lowering) -> Program:
    for whole, part in zip(op.inputs, op.outputs, strict=True):
        parts = flat(whole).split(part.numel()) if part.numel() else [flat(whole)] * low.size
        reduce_op = op.reduce_op or ReduceOp.SUM
        yield from low(build.reduce_scatter(part, parts, op=reduce_op, factor=op.factor, label=op.label))


def _broadcast(op: Collective, low: Lowering) -> Program:
    first = op.outputs[0]
    if len(op.outputs) == 1 and first is op.inputs[0]:
        yield from _taken(build.broadcast(as_bytes(first), src=op.root or 0, label=op.label), low)
        return
    buffer = torch.cat([as_bytes(t) for t in op.inputs])
    yield from _taken(build.broadcast(buffer, src=op.root or 0, label=op.label), low)
    offset = 0
    for t in op.outputs:
        # A byte slice may start anywhere, a dtype's view only at multiples of its size: hence the copy.
        store(t.detach(), buffer[offset : offset + t.nbytes].clone().view(t.dtype))
        offset += t.nbytes


def _all_gather(op: Collective, low: Lowering) -> Program:
    """The outputs have the size of each rank's input, so all ranks agree on the padding without communication."""
    own = op.inputs[0]
    longest = max(t.numel() for t in op.outputs)
    mine = flat(own)
    if mine.numel() < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
    whole = torch.empty(longest * low.size, dtype=own.dtype, device=own.device)
    yield from low(build.all_gather_into_tensor(whole, mine, label=op.label))
    for i, t in enumerate(op.outputs):
        store(t.detach(), whole[i * longest : i * longest + t.numel()])


def _all_gather_into_tensor(op: Collective, low: Lowering) -> Program:
    for part, whole in zip(op.inputs, op.outputs, strict=True):
        pair = build.all_gather_into_tensor(flat(whole), flat(part), label=op.label)
        if not low.takes(pair):
            pair = build.all_gather_into_tensor(as_bytes(whole), as_bytes(part), label=op.label)
        yield from _taken(pair, low)


def _all_to_all(op: Collective, low: Lowering) -> Program:
    out_sizes, in_sizes = [t.numel() for t in op.outputs], [t.numel() for t in op.inputs]
    output = torch.empty(sum(out_sizes), dtype=op.outputs[0].dtype, device=op.device)
    splits = {"output_split_sizes": out_sizes, "input_split_sizes": in_sizes}
    source = torch.cat([flat(t) for t in op.inputs])
    yield from low(build.all_to_all_single(output, source, **splits, label=op.label))
    for t, part in zip(op.outputs, output.split(out_sizes), strict=True):
        store(t.detach(), part)


def _all_to_all_single(op: Collective, low: Lowering) -> Program:
    """The same on flat bytes, with both lists of split sizes written out."""
    source, target, (received, sent) = op.inputs[0], op.outputs[0], op.splits or ((), ())
    out, given = part_bytes(target, received, low.size), part_bytes(source, sent, low.size)
    splits = {"output_split_sizes": out, "input_split_sizes": given}
    yield from _taken(build.all_to_all_single(as_bytes(target), as_bytes(source), **splits, label=op.label), low)


def _rooted_as_bytes(op: Collective, low: Lowering) -> Program:
    inputs = tuple(as_bytes(t) for t in op.inputs)
    outputs = tuple(torch.empty(t.nbytes, dtype=torch.uint8, device=t.device) for t in op.outputs)
    yield from _taken(replace(op, inputs=inputs, outputs=outputs), low)
    for t, place in zip(op.outputs, outputs, strict=True):
        store(t.detach(), place.view(t.dtype))


def _send(op: Collective, low: Lowering) -> Program:
    message = replace(op, inputs=(as_bytes(op.inputs[0]),))
    yield from _taken(message if low.takes(message) else replace(message, inputs=(message.inputs[0].cpu(),)), low)


def _recv(op: Collective, low: Lowering) -> Program:
    target = op.outputs[0]
    place = torch.empty(target.nbytes, dtype=torch.uint8, device=target.device)
    if not low.takes(replace(op, outputs=(place,))):
        place = torch.empty(target.nbytes, dtype=torch.uint8, device="cpu")
    yield from _taken(replace(op, outputs=(place,)), low)
    store(target.detach(), place.view(target.dtype).to(target.device))


def _barrier(op: Collective, low: Lowering) -> Program:
    yield from low(build.all_reduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), label=op.label))


def _taken(op: Collective, low: Lowering) -> Program:
    """Plain bytes. An engine that does not take even these lacks the kind."""
    if low.takes(op):
        yield op
    else:
        yield from compose(op, low)


_RULES: dict[OpKind, Callable[[Collective, Lowering], Program]] = {
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.BROADCAST: _broadcast,
    OpKind.REDUCE: _reduce,
    OpKind.ALL_GATHER: _all_gather,
    OpKind.ALL_GATHER_INTO_TENSOR: _all_gather_into_tensor,
    OpKind.REDUCE_SCATTER: _reduce_scatter,
    OpKind.REDUCE_SCATTER_TENSOR: _reduce_scatter_tensor,
    OpKind.ALL_TO_ALL: _all_to_all,
    OpKind.ALL_TO_ALL_SINGLE: _all_to_all_single,
    OpKind.GATHER: _rooted_as_bytes,
    OpKind.SCATTER: _rooted_as_bytes,
    OpKind.SEND: _send,
    OpKind.RECV: _recv,
    OpKind.BARRIER: _barrier,
}
