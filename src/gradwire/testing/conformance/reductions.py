"""Checks of reductions: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives import Collective, ReduceOp, build
from gradwire.groups.base import Group
from gradwire.testing.conformance.cases import Case
from gradwire.testing.conformance.compare import Problems, against_reference, unlike
from gradwire.testing.conformance.data import COMPLEX, FLOATS, blank, draw, dtypes, reductions_of, sizes


def _all_reduce(*key: int, shape: Sequence[int], dtype: torch.dtype, op: ReduceOp = ReduceOp.SUM) -> Case:
    return Case(f"all_reduce {op.name}", lambda rank: build.all_reduce(draw(shape, dtype, *key, rank), op=op))


def check_all_reduce_ops(group: Group) -> Problems:
    """Every reduction on every dtype it is defined for."""
    cases = [
        _all_reduce(1, i, shape=(7,), dtype=d, op=op)
        for i, d in enumerate(dtypes(group.size))
        for op in reductions_of(d)
    ]
    yield from against_reference(group, cases)


def check_all_reduce_sizes(group: Group) -> Problems:
    """No elements, one, fewer than ranks, primes, thousands."""
    both = (torch.float32, torch.int64)
    cases = [_all_reduce(2, shape=shape, dtype=dtype) for shape in sizes(group.size) for dtype in both]
    yield from against_reference(group, cases)


def check_all_reduce_coalesced(group: Group) -> Problems:
    """Several tensors, of several shapes and dtypes, as one operation."""
    shapes, kinds = ((5,), (0,), (2, 3), ()), (torch.float32, torch.float16, torch.int64, torch.float64)

    def mixed(rank: int) -> Collective:
        return build.all_reduce([draw(s, d, 3, i, rank) for i, (s, d) in enumerate(zip(shapes, kinds, strict=True))])

    def alike(rank: int) -> Collective:
        return build.all_reduce([draw((n,), torch.float32, 4, n, rank) for n in (3, 1, 17, 600)], op=ReduceOp.AVG)

    yield from against_reference(group, [Case("several dtypes", mixed), Case("one dtype", alike)])


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

    forms = ("number", "0-dim tensor", "1-element tensor")
    cases = [case(form, torch.float32, shape) for form in forms for shape in ((11,), ())]
    cases += [case("number", dtype, (5,)) for dtype in (*FLOATS, *COMPLEX)]
    cases.append(
        Case(
            "reduce_scatter with factors",
            lambda rank: build.reduce_scatter_tensor(
                blank((3,), torch.float32),
                draw((3 * group.size,), torch.float32, 6, rank),
                op=ReduceOp.PREMUL_SUM,
                factor=factor(rank, "number"),
            ),
        )
    )
    yield from against_reference(group, cases)


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

    yield from against_reference(
        group,
        [
            case(ReduceOp.SUM, torch.float32),
            case(ReduceOp.SUM, torch.float64),
            case(ReduceOp.SUM, torch.int64),
            case(ReduceOp.AVG, torch.float32),
            case(ReduceOp.PREMUL_SUM, torch.float32, 1.5),
        ],
    )


def check_reduce(group: Group) -> Problems:
    """To each root in turn; the other ranks' tensors keep their values."""

    def case(root: int, shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp) -> Case:
        return Case(f"reduce {op.name}", lambda rank: build.reduce(draw(shape, dtype, 10, root, rank), dst=root, op=op))

    cases = [case(root, (13,), torch.float32, ReduceOp.SUM) for root in range(group.size)]
    cases += [case(0, shape, torch.float32, ReduceOp.SUM) for shape in ((0,), ())]
    last = group.size - 1
    cases += [case(last, (2, 5), dtype, op) for dtype in (torch.float32, torch.int32) for op in reductions_of(dtype)]
    cases += [case(last, (5,), dtype, ReduceOp.SUM) for dtype in dtypes(group.size)]
    yield from against_reference(group, cases)


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


def check_reduce_scatter_tensor(group: Group) -> Problems:
    """From one tensor per rank, flat or stacked, and several pairs as one operation."""
    size = group.size

    def pair(i: int, shape: Sequence[int], dtype: torch.dtype, rank: int, *, stacked: bool = False) -> list[Tensor]:
        whole = (size, *shape) if stacked else (size * shape[0], *shape[1:])
        return [blank(shape, dtype), draw(whole, dtype, 12, i, rank)]

    def case(shape: Sequence[int], dtype: torch.dtype, op: ReduceOp, *, stacked: bool = False) -> Case:
        return Case(
            "stacked" if stacked else "concatenated",
            lambda rank: build.reduce_scatter_tensor(*pair(0, shape, dtype, rank, stacked=stacked), op=op),
        )

    def coalesced(rank: int) -> Collective:
        shapes = (((3,), torch.float32), ((0,), torch.float32), ((2, 2), torch.int64), ((600,), torch.float32))
        pairs = [pair(i, shape, dtype, rank) for i, (shape, dtype) in enumerate(shapes)]
        return build.reduce_scatter_tensor([out for out, _ in pairs], [whole for _, whole in pairs])

    cases = [case((n,), torch.float32, ReduceOp.SUM) for n in (0, 1, 13, 600)]
    cases += [case((2,), dtype, op) for dtype in (torch.bfloat16, torch.uint8) for op in reductions_of(dtype)]
    cases += [case((2, 3), torch.float32, ReduceOp.AVG), case((2, 3), torch.float32, ReduceOp.SUM, stacked=True)]
    cases += [case((4,), dtype, ReduceOp.SUM) for dtype in dtypes(group.size)]
    yield from against_reference(group, [*cases, Case("several pairs", coalesced)])
