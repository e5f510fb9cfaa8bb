"""Checks of what collectives compute and move: reductions, broadcast, all_gather, all_to_all, gather, scatter, barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Collective, ReduceOp, build
from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Case, Problems, against_reference, holds, meet, side_group, unlike
from gradwire.testing.conformance.data import COMPLEX, FLOATS, blank, draw, dtypes, reductions_of, sizes

Parts = Sequence[tuple[tuple[int, ...], torch.dtype]]

_SEVERAL: Parts = (((3,), torch.float32), ((0,), torch.float32), ((2, 2), torch.int64), ((600,), torch.float32))
"""Shapes and dtypes of tensors that are communicated as one operation."""


def _all_reduce(*key: int, shape: Sequence[int], dtype: torch.dtype, op: ReduceOp = ReduceOp.SUM) -> Case:
    return Case(f"all_reduce {op.name}", lambda rank: build.all_reduce(draw(shape, dtype, *key, rank), op=op))


def check_all_reduce_ops(group: Group) -> Problems:
    """Every reduction on every dtype it is defined for."""
    each = [(i, d, op) for i, d in enumerate(dtypes(group.size)) for op in reductions_of(d)]
    yield from against_reference(group, [_all_reduce(1, i, shape=(7,), dtype=d, op=op) for i, d, op in each])


def check_all_reduce_sizes(group: Group) -> Problems:
    """No elements, one, fewer than ranks, primes, thousands."""
    both = (torch.float32, torch.int64)
    cases = [_all_reduce(2, shape=shape, dtype=dtype) for shape in sizes(group.size) for dtype in both]
    yield from against_reference(group, cases)


def check_all_reduce_coalesced(group: Group) -> Problems:
    """Several tensors, of several shapes and dtypes, as one operation."""
    mixed = zip(((5,), (0,), (2, 3), ()), (torch.float32, torch.float16, torch.int64, torch.float64), strict=True)

    def case(what: str, parts: Parts, op: ReduceOp) -> Case:
        return Case(
            what, lambda rank: build.all_reduce([draw(s, d, 3, i, rank) for i, (s, d) in enumerate(parts)], op=op)
        )

    alike = [((n,), torch.float32) for n in (3, 1, 17, 600)]
    cases = [case("several dtypes", list(mixed), ReduceOp.SUM), case("one dtype", alike, ReduceOp.AVG)]
    yield from against_reference(group, cases)


def check_premul_sum(group: Group) -> Problems:
    """Factors that differ between ranks, as numbers and as tensors."""

    def factor(rank: int, form: str) -> float | Tensor:
        value = (0.5, 1.5, -2.0)[rank % 3]
        return value if form == "number" else torch.tensor(value if form == "0-dim tensor" else [value])

    def case(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Case:
        def make(rank: int) -> Collective:
            value = draw(shape, dtype, 5, rank)
            return build.all_reduce(value, op=ReduceOp.PREMUL_SUM, factor=factor(rank, form))

        return Case(f"factor is a {form}", make)

    def scattered(rank: int) -> Collective:
        out, t = blank((3,), torch.float32), draw((3 * group.size,), torch.float32, 6, rank)
        return build.reduce_scatter_tensor(out, t, op=ReduceOp.PREMUL_SUM, factor=factor(rank, "number"))

    forms = ("number", "0-dim tensor", "1-element tensor")
    cases = [case(form, torch.float32, shape) for form in forms for shape in ((11,), ())]
    cases += [case("number", dtype, (5,)) for dtype in (*FLOATS, *COMPLEX)]
    yield from against_reference(group, [*cases, Case("reduce_scatter with factors", scattered)])


def check_all_reduce_same_bits(group: Group) -> Problems:
    """All ranks hold the same bits afterward: replicas that differ in the last bit drift apart."""
    for dtype in (torch.float32, torch.bfloat16):
        t = draw((1031,), dtype, 7, group.rank)
        group.all_reduce(t, ReduceOp.AVG)
        gathered = [blank(t.shape, dtype) for _ in range(group.size)]
        group.all_gather(gathered, t)
        for rank, other in enumerate(gathered):
            yield from unlike(f"all_reduce AVG of {dtype}: the result of rank {rank}, compared with mine,", other, t)


def check_all_reduce_sparse(group: Group) -> Problems:
    """Sparse COO: different numbers of non-zeros on each rank, none on one of them, repeated indices."""

    def sparse(rank: int, dtype: torch.dtype) -> Tensor:
        count = 0 if rank == 1 else rank + 2
        where = draw((1, count), torch.int64, 8, rank).abs()
        values = draw((count, 2), dtype, 9, rank)
        return torch.sparse_coo_tensor(where, values, (9, 2), check_invariants=False)

    def case(op: ReduceOp, dtype: torch.dtype, factor: float | None = None) -> Case:
        return Case("sparse", lambda rank: build.all_reduce(sparse(rank, dtype), op=op, factor=factor))

    cases = [case(ReduceOp.SUM, dtype) for dtype in (torch.float32, torch.float64, torch.int64)]
    cases += [case(ReduceOp.AVG, torch.float32), case(ReduceOp.PREMUL_SUM, torch.float32, 1.5)]
    yield from against_reference(group, cases)


def _from_each_root(
    group: Group, what: str, make: Callable[[int, Sequence[int], torch.dtype, int], Collective]
) -> list[Case]:
    """`make(root, shape, dtype, rank)` with each root in turn, without elements or dimensions, and with each dtype."""

    def case(root: int, shape: Sequence[int], dtype: torch.dtype) -> Case:
        return Case(what, lambda rank: make(root, shape, dtype, rank))

    cases = [case(root, (13,), torch.float32) for root in range(group.size)]
    cases += [case(0, shape, torch.float32) for shape in ((0,), ())]
    return cases + [case(group.size - 1, (3, 2), dtype) for dtype in dtypes(group.size)]


def check_reduce(group: Group) -> Problems:
    """To each root in turn; the other ranks' tensors keep their values."""
    last = group.size - 1

    def reduce(
        root: int, shape: Sequence[int], dtype: torch.dtype, rank: int, op: ReduceOp = ReduceOp.SUM
    ) -> Collective:
        return build.reduce(draw(shape, dtype, 10, root, rank), dst=root, op=op)

    def case(dtype: torch.dtype, op: ReduceOp) -> Case:
        return Case(f"reduce {op.name}", lambda rank: reduce(last, (2, 5), dtype, rank, op))

    cases = [case(dtype, op) for dtype in (torch.float32, torch.int32) for op in reductions_of(dtype)]
    yield from against_reference(group, [*_from_each_root(group, "reduce", reduce), *cases])


def check_reduce_scatter(group: Group) -> Problems:
    """From a list with one input per rank, whose sizes may differ from rank to rank."""

    def case(lengths: Sequence[int], dtype: torch.dtype, op: ReduceOp) -> Case:
        def make(rank: int) -> Collective:
            inputs = [draw((n,), dtype, 11, i, rank) for i, n in enumerate(lengths)]
            return build.reduce_scatter(blank((lengths[rank],), dtype), inputs, op=op)

        return Case(f"reduce_scatter of parts of {list(lengths)}", make)

    size = group.size
    cases = [case([n] * size, torch.float32, ReduceOp.SUM) for n in (0, 1, 13, 600)]
    cases += [case([3] * size, dtype, op) for dtype in (torch.float64, torch.int16) for op in reductions_of(dtype)]
    cases += [case(range(size), torch.float32, ReduceOp.SUM), case(range(1, size + 1), torch.int64, ReduceOp.MAX)]
    yield from against_reference(group, cases)


def _whole(size: int, shape: tuple[int, ...], *, stacked: bool) -> tuple[int, ...]:
    return (size, *shape) if stacked else (size * shape[0], *shape[1:])


def check_reduce_scatter_tensor(group: Group) -> Problems:
    """From one tensor per rank, flat or stacked, and several pairs as one operation."""
    size = group.size

    def case(*parts: tuple[tuple[int, ...], torch.dtype], op: ReduceOp = ReduceOp.SUM, stacked: bool = False) -> Case:
        def make(rank: int) -> Collective:
            wholes = [draw(_whole(size, s, stacked=stacked), d, 12, i, rank) for i, (s, d) in enumerate(parts)]
            return build.reduce_scatter_tensor([blank(s, d) for s, d in parts], wholes, op=op)

        return Case("stacked" if stacked else "concatenated", make)

    cases = [case(((n,), torch.float32)) for n in (0, 1, 13, 600)]
    cases += [case(((2,), dtype), op=op) for dtype in (torch.bfloat16, torch.uint8) for op in reductions_of(dtype)]
    cases += [case(((2, 3), torch.float32), op=ReduceOp.AVG), case(((2, 3), torch.float32), stacked=True)]
    cases += [case(((4,), dtype)) for dtype in dtypes(group.size)]
    yield from against_reference(group, [*cases, case(*_SEVERAL)])


def check_broadcast(group: Group) -> Problems:
    """From each root in turn, one tensor and several."""

    def broadcast(root: int, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Collective:
        return build.broadcast(draw(shape, dtype, 21, root, rank), src=root)

    def several(root: int) -> Case:
        kinds = (((3,), torch.float32), ((), torch.int64), ((0, 2), torch.float32), ((5, 1), torch.bool))
        return Case(
            "broadcast of several tensors",
            lambda rank: build.broadcast([draw(s, d, 22, i, rank) for i, (s, d) in enumerate(kinds)], src=root),
        )

    def sized(shape: Sequence[int]) -> Case:
        return Case("broadcast", lambda rank: broadcast(0, shape, torch.int64, rank))

    cases = _from_each_root(group, "broadcast", broadcast) + [sized(shape) for shape in sizes(group.size)]
    yield from against_reference(group, [*cases, several(0), several(group.size - 1)])


def check_all_gather(group: Group) -> Problems:
    """Into a list; sizes may differ between ranks, down to zero."""

    def case(lengths: Sequence[int], dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            return build.all_gather([blank((n,), dtype) for n in lengths], draw((lengths[rank],), dtype, 23, rank))

        return Case(f"all_gather of {list(lengths)} elements", make)

    size = group.size
    cases = [case([n] * size, torch.float32) for n in (0, 1, 13, 4099)]
    cases += [case([3] * size, dtype) for dtype in dtypes(size)]
    uneven = (range(size), range(size, 0, -1), [5 * (rank == size - 1) for rank in range(size)])
    cases += [case(lengths, dtype) for lengths in uneven for dtype in (torch.float32, torch.uint8)]
    yield from against_reference(group, cases)


def check_all_gather_into_tensor(group: Group) -> Problems:
    """Into one tensor, concatenated or stacked, and several pairs as one operation."""
    size = group.size

    def case(*parts: tuple[tuple[int, ...], torch.dtype], stacked: bool = False) -> Case:
        def make(rank: int) -> Collective:
            wholes = [blank(_whole(size, shape, stacked=stacked), dtype) for shape, dtype in parts]
            return build.all_gather_into_tensor(wholes, [draw(s, d, 24, i, rank) for i, (s, d) in enumerate(parts)])

        return Case("stacked" if stacked else "concatenated", make)

    cases = [case(((n,), torch.float32)) for n in (0, 1, 13, 4099)]
    cases += [case(((2, 3), dtype)) for dtype in dtypes(size)]
    cases += [case((shape, torch.float32), stacked=True) for shape in ((2, 3), ())]
    yield from against_reference(group, [*cases, case(*_SEVERAL)])


def check_all_to_all(group: Group) -> Problems:
    """Lists, of equal and of different sizes, with empty parts among them."""
    size = group.size

    def case(dtype: torch.dtype, even: int | None) -> Case:
        def length(src: int, dst: int) -> int:
            return (src + 2 * dst) % 4 if even is None else even

        def make(rank: int) -> Collective:
            inputs = [draw((length(rank, dst),), dtype, 25, rank, dst) for dst in range(size)]
            return build.all_to_all([blank((length(src, rank),), dtype) for src in range(size)], inputs)

        return Case("all_to_all", make)

    cases = [case(torch.float32, even) for even in (None, 0, 1, 13, 600)]
    yield from against_reference(group, cases + [case(dtype, None) for dtype in dtypes(size)])


def check_all_to_all_single(group: Group) -> Problems:
    """One tensor: equal parts, uneven parts, and split sizes given for one side only."""
    size = group.size

    def even(rows: int, dtype: torch.dtype) -> Case:
        shape = (rows * size, 2)
        return Case(
            "equal parts", lambda rank: build.all_to_all_single(blank(shape, dtype), draw(shape, dtype, 26, rank))
        )

    def split(what: str, length: Callable[[int, int], int], *sides: str) -> Case:
        """`length(src, dst)` rows from each rank to each, with split sizes for the sides that need them."""

        def make(rank: int) -> Collective:
            sent, received = [length(rank, dst) for dst in range(size)], [length(src, rank) for src in range(size)]
            return build.all_to_all_single(
                blank((sum(received), 3), torch.float32),
                draw((sum(sent), 3), torch.float32, 27, rank),
                output_split_sizes=received if "output" in sides else None,
                input_split_sizes=sent if "input" in sides else None,
            )

        return Case(what, make)

    cases = [even(rows, torch.float32) for rows in (0, 1, 13, 300)] + [even(2, dtype) for dtype in dtypes(size)]
    cases.append(split("uneven parts", lambda src, dst: (src + 3 * dst) % 5, "input", "output"))
    cases.append(split("only input_split_sizes", lambda src, dst: dst + 1, "input"))
    cases.append(split("only output_split_sizes", lambda src, dst: src + 1, "output"))
    yield from against_reference(group, cases)


def check_gather(group: Group) -> Problems:
    """To each root in turn."""

    def gather(root: int, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Collective:
        outputs = [blank(shape, dtype) for _ in range(group.size)] if rank == root else None
        return build.gather(draw(shape, dtype, 29, root, rank), outputs, dst=root)

    yield from against_reference(group, _from_each_root(group, "gather", gather))


def check_scatter(group: Group) -> Problems:
    """From each root in turn."""

    def scatter(root: int, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Collective:
        inputs = [draw(shape, dtype, 30, root, dst) for dst in range(group.size)] if rank == root else None
        return build.scatter(blank(shape, dtype), inputs, src=root)

    yield from against_reference(group, _from_each_root(group, "scatter", scatter))


def check_barrier(group: Group) -> Problems:
    """No rank passes before all have joined, and submit does not block; a monitored barrier of all ranks passes."""
    side = side_group(group)
    if group.rank == group.size - 1:
        meet(side)
        group.barrier()
    else:
        work = group.barrier(async_op=True)
        yield from holds(not work.is_completed(), "barrier: it is completed, though the last rank has not joined")
        meet(side)
        work.wait()
    group.monitored_barrier(timeout=10.0)
    side.close()
