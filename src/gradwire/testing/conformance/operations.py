"""Checks of what collectives compute and move: reductions, broadcast, all_gather, all_to_all, gather, scatter, barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Collective, ReduceOp, build
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.testing.conformance.compare import Case, Make, Problems, against_reference, held_up, holds, unlike
from gradwire.testing.conformance.data import COMPLEX, FLOATS, blank, draw, dtypes, reductions_of, sizes

Shaper = Callable[[Tensor], Tensor]

_SEVERAL = (((3,), torch.float32), ((0,), torch.float32), ((2, 2), torch.int64), ((600,), torch.float32))
"""Shapes and dtypes of tensors that are communicated as one operation."""


def as_is(t: Tensor) -> Tensor:
    """The tensor itself."""
    return t


def every_kind(
    size: int,
    shape: Sequence[int],
    placed: Shaper = as_is,
    *,
    dtype: torch.dtype = torch.float32,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
) -> dict[str, Make]:
    """What each rank submits in one case of each collective. All tensors are passed through `placed`."""

    def value(rank: int, i: int = 0) -> Tensor:
        return placed(draw(shape, dtype, 41, i, rank))

    def values(rank: int) -> list[Tensor]:
        return [value(rank, i) for i in range(size)]

    def out() -> Tensor:
        return placed(blank(shape, dtype))

    def outs() -> list[Tensor]:
        return [out() for _ in range(size)]

    def whole(rank: int) -> Tensor:
        return placed(draw((size, *shape), dtype, 42, rank))

    def whole_out() -> Tensor:
        return placed(blank((size, *shape), dtype))

    return {
        "all_reduce": lambda rank: build.all_reduce([value(rank), value(rank, 1)], op=op),
        "broadcast": lambda rank: build.broadcast([value(rank), value(rank, 1)], src=root),
        "reduce": lambda rank: build.reduce(value(rank), dst=root, op=op),
        "all_gather": lambda rank: build.all_gather(outs(), value(rank)),
        "all_gather_into_tensor": lambda rank: build.all_gather_into_tensor(whole_out(), value(rank)),
        "reduce_scatter": lambda rank: build.reduce_scatter(out(), values(rank), op=op),
        "reduce_scatter_tensor": lambda rank: build.reduce_scatter_tensor(out(), whole(rank), op=op),
        "all_to_all": lambda rank: build.all_to_all(outs(), values(rank)),
        "all_to_all_single": lambda rank: build.all_to_all_single(whole_out(), whole(rank)),
        "gather": lambda rank: build.gather(value(rank), outs() if rank == root else None, dst=root),
        "scatter": lambda rank: build.scatter(out(), values(rank) if rank == root else None, src=root),
    }


def _regular(group: Group, kind: str) -> list[Case]:
    """One collective with each root, without elements or dimensions, of several sizes, with each dtype and reduction."""
    size, last = group.size, group.size - 1

    def case(shape: Sequence[int], dtype: torch.dtype, root: int = last, op: ReduceOp = ReduceOp.SUM) -> Case:
        return Case(kind, every_kind(size, shape, dtype=dtype, op=op, root=root)[kind])

    cases = [case(shape, torch.float32) for shape in ((), *sizes(size))]
    cases += [case((3, 2), dtype) for dtype in dtypes(size)]
    if kind in ("broadcast", "reduce", "gather", "scatter"):
        cases += [case((13,), torch.float32, root) for root in range(size)]
    if kind.startswith("reduce"):
        cases += [case((2, 5), dtype, op=op) for dtype in (torch.float64, torch.int32) for op in reductions_of(dtype)]
    return cases


def check_all_reduce_ops(group: Group) -> Problems:
    """Every reduction on every dtype it is defined for."""

    def case(dtype: torch.dtype, op: ReduceOp) -> Case:
        return Case(f"all_reduce {op.name}", lambda rank: build.all_reduce(draw((7,), dtype, 1, rank), op=op))

    yield from against_reference(group, [case(d, op) for d in dtypes(group.size) for op in reductions_of(d)])


def check_all_reduce_sizes(group: Group) -> Problems:
    """No elements, no dimensions, one element, fewer than ranks, primes, thousands."""
    yield from against_reference(group, _regular(group, "all_reduce"))


def check_all_reduce_coalesced(group: Group) -> Problems:
    """Several tensors, of several shapes and dtypes, as one operation."""
    mixed = (((5,), torch.float32), ((0,), torch.float16), ((2, 3), torch.int64), ((), torch.float64))
    alike = [((n,), torch.float32) for n in (3, 1, 17, 600)]

    def drawn(parts: Sequence[tuple[tuple[int, ...], torch.dtype]], rank: int) -> list[Tensor]:
        return [draw(shape, dtype, 3, i, rank) for i, (shape, dtype) in enumerate(parts)]

    several = Case("several dtypes", lambda rank: build.all_reduce(drawn(mixed, rank)))
    average = Case("one dtype", lambda rank: build.all_reduce(drawn(alike, rank), op=ReduceOp.AVG))
    yield from against_reference(group, [several, average])


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


def check_reduce(group: Group) -> Problems:
    """To each root in turn; the other ranks' tensors keep their values."""
    yield from against_reference(group, _regular(group, "reduce"))


def check_reduce_scatter(group: Group) -> Problems:
    """From a list with one input per rank, whose sizes may differ from rank to rank."""

    def uneven(lengths: Sequence[int], dtype: torch.dtype, op: ReduceOp) -> Case:
        def make(rank: int) -> Collective:
            inputs = [draw((n,), dtype, 11, i, rank) for i, n in enumerate(lengths)]
            return build.reduce_scatter(blank((lengths[rank],), dtype), inputs, op=op)

        return Case(f"reduce_scatter of parts of {list(lengths)}", make)

    ranks = range(group.size)
    cases = [uneven(ranks, torch.float32, ReduceOp.SUM), uneven([r + 1 for r in ranks], torch.int64, ReduceOp.MAX)]
    yield from against_reference(group, _regular(group, "reduce_scatter") + cases)


def check_reduce_scatter_tensor(group: Group) -> Problems:
    """From one tensor per rank, flat or stacked, and several pairs as one operation."""

    def several(rank: int) -> Collective:
        wholes = [draw((group.size * n, *m), dtype, 12, i, rank) for i, ((n, *m), dtype) in enumerate(_SEVERAL)]
        return build.reduce_scatter_tensor([blank(shape, dtype) for shape, dtype in _SEVERAL], wholes)

    cases = [*_regular(group, "reduce_scatter_tensor"), Case("several, concatenated", several)]
    yield from against_reference(group, cases)


def check_broadcast(group: Group) -> Problems:
    """From each root in turn, one tensor and several."""
    kinds = (((3,), torch.float32), ((), torch.int64), ((0, 2), torch.float32), ((5, 1), torch.bool))

    def several(rank: int) -> Collective:
        tensors = [draw(shape, dtype, 22, i, rank) for i, (shape, dtype) in enumerate(kinds)]
        return build.broadcast(tensors, src=group.size - 1)

    one = Case("of one tensor", lambda rank: build.broadcast(draw((13,), torch.int64, 21, rank), src=0))
    yield from against_reference(group, [*_regular(group, "broadcast"), one, Case("of several", several)])


def check_all_gather(group: Group) -> Problems:
    """Into a list; sizes may differ between ranks, down to zero."""

    def uneven(lengths: Sequence[int], dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            return build.all_gather([blank((n,), dtype) for n in lengths], draw((lengths[rank],), dtype, 23, rank))

        return Case(f"all_gather of {list(lengths)} elements", make)

    size = group.size
    lengths = (range(size), range(size, 0, -1), [5 * (rank == size - 1) for rank in range(size)])
    cases = [uneven(each, dtype) for each in lengths for dtype in (torch.float32, torch.uint8)]
    yield from against_reference(group, _regular(group, "all_gather") + cases)


def check_all_gather_into_tensor(group: Group) -> Problems:
    """Into one tensor, concatenated or stacked, and several pairs as one operation."""

    def several(rank: int) -> Collective:
        wholes = [blank((group.size * n, *m), dtype) for (n, *m), dtype in _SEVERAL]
        return build.all_gather_into_tensor(wholes, [draw(s, d, 24, i, rank) for i, (s, d) in enumerate(_SEVERAL)])

    cases = [*_regular(group, "all_gather_into_tensor"), Case("several, concatenated", several)]
    yield from against_reference(group, cases)


def check_all_to_all(group: Group) -> Problems:
    """Lists, of equal and of different sizes, with empty parts among them."""
    size = group.size

    def uneven(dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            inputs = [draw(((rank + 2 * dst) % 4,), dtype, 25, rank, dst) for dst in range(size)]
            return build.all_to_all([blank(((src + 2 * rank) % 4,), dtype) for src in range(size)], inputs)

        return Case("all_to_all of different sizes", make)

    yield from against_reference(group, _regular(group, "all_to_all") + [uneven(dtype) for dtype in dtypes(size)])


def check_all_to_all_single(group: Group) -> Problems:
    """One tensor: equal parts, uneven parts, and split sizes given for one side only."""
    size = group.size

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

    cases = [split("several rows", lambda src, dst: 300)]
    cases.append(split("uneven parts", lambda src, dst: (src + 3 * dst) % 5, "input", "output"))
    cases.append(split("only input_split_sizes", lambda src, dst: dst + 1, "input"))
    cases.append(split("only output_split_sizes", lambda src, dst: src + 1, "output"))
    yield from against_reference(group, _regular(group, "all_to_all_single") + cases)


def check_gather(group: Group) -> Problems:
    """To each root in turn."""
    yield from against_reference(group, _regular(group, "gather"))


def check_scatter(group: Group) -> Problems:
    """From each root in turn."""
    yield from against_reference(group, _regular(group, "scatter"))


def check_barrier(group: Group) -> Problems:
    """No rank passes before all have joined, and submit does not block; a monitored barrier of all ranks passes."""

    def look(work: Work) -> Problems:
        yield from holds(not work.is_completed(), "barrier: it is completed, though the last rank has not joined")

    yield from held_up(group, lambda: group.barrier(async_op=True), look)
    group.monitored_barrier(timeout=10.0)


def check_many_in_flight(group: Group) -> Problems:
    """Many operations of every kind at once."""
    kinds = [(n, every_kind(group.size, (n,), root=n % group.size)) for n in (0, 1, 5, 40)]
    cases = [Case(f"{name} of {n} elements", make) for n, table in kinds for name, make in table.items()]
    yield from against_reference(group, cases, at_once=len(cases))
