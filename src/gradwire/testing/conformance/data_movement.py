"""Checks of operations without arithmetic: broadcast, all_gather, all_to_all, gather, scatter, barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Collective, build
from gradwire.collectives.op_kinds import ONLY_BITS
from gradwire.groups.base import Group
from gradwire.testing.conformance.cases import Case
from gradwire.testing.conformance.compare import Problems, against_reference, holds, meet, side_group, unlike
from gradwire.testing.conformance.data import blank, draw, dtypes, sizes


def check_broadcast(group: Group) -> Problems:
    """From each root in turn, one tensor and several."""

    def case(root: int, shape: Sequence[int], dtype: torch.dtype) -> Case:
        return Case("broadcast", lambda rank: build.broadcast(draw(shape, dtype, 21, root, rank), src=root))

    def several(root: int) -> Case:
        kinds = (((3,), torch.float32), ((), torch.int64), ((0, 2), torch.float32), ((5, 1), torch.bool))
        return Case(
            "broadcast of several tensors",
            lambda rank: build.broadcast([draw(s, d, 22, i, rank) for i, (s, d) in enumerate(kinds)], src=root),
        )

    cases = _from_each_root(group, case) + [case(0, shape, torch.int64) for shape in sizes(group.size)]
    yield from against_reference(group, [*cases, several(0), several(group.size - 1)])


def check_all_gather(group: Group) -> Problems:
    """Into a list; sizes may differ between ranks, down to zero."""

    def case(lengths: Sequence[int], dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            return build.all_gather([blank((n,), dtype) for n in lengths], draw((lengths[rank],), dtype, 23, rank))

        return Case(f"all_gather of {list(lengths)} elements", make)

    size = group.size
    cases = [case([n] * size, torch.float32) for n in (0, 1, 13, 4099)] + [
        case([3] * size, dtype) for dtype in dtypes(group.size)
    ]
    uneven = (range(size), range(size, 0, -1), [5 * (rank == size - 1) for rank in range(size)])
    cases += [case(lengths, dtype) for lengths in uneven for dtype in (torch.float32, torch.uint8)]
    yield from against_reference(group, cases)


def check_all_gather_into_tensor(group: Group) -> Problems:
    """Into one tensor, concatenated or stacked, and several pairs as one operation."""
    size = group.size

    def pair(i: int, shape: Sequence[int], dtype: torch.dtype, rank: int, *, stacked: bool = False) -> list[Tensor]:
        whole = (size, *shape) if stacked else (size * shape[0], *shape[1:])
        return [blank(whole, dtype), draw(shape, dtype, 24, i, rank)]

    def case(shape: Sequence[int], dtype: torch.dtype, *, stacked: bool = False) -> Case:
        return Case(
            "stacked" if stacked else "concatenated",
            lambda rank: build.all_gather_into_tensor(*pair(0, shape, dtype, rank, stacked=stacked)),
        )

    def coalesced(rank: int) -> Collective:
        shapes = (((3,), torch.float32), ((0,), torch.float32), ((2, 2), torch.int64), ((600,), torch.float32))
        pairs = [pair(i, shape, dtype, rank) for i, (shape, dtype) in enumerate(shapes)]
        return build.all_gather_into_tensor([whole for whole, _ in pairs], [t for _, t in pairs])

    cases = [case((n,), torch.float32) for n in (0, 1, 13, 4099)] + [
        case((2, 3), dtype) for dtype in dtypes(group.size)
    ]
    cases += [case((2, 3), torch.float32, stacked=True), case((), torch.float32, stacked=True)]
    yield from against_reference(group, [*cases, Case("several pairs", coalesced)])


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

    cases = [case(torch.float32, even) for even in (None, 0, 1, 13, 600)] + [
        case(dtype, None) for dtype in dtypes(group.size)
    ]
    yield from against_reference(group, cases)


def check_all_to_all_single(group: Group) -> Problems:
    """One tensor: equal parts, uneven parts, and split sizes given for one side only."""
    size = group.size

    def even(rows: int, dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            shape = (rows * size, 2)
            return build.all_to_all_single(blank(shape, dtype), draw(shape, dtype, 26, rank))

        return Case("equal parts", make)

    def length(src: int, dst: int) -> int:
        return (src + 3 * dst) % 5

    def uneven(rank: int) -> Collective:
        sent, received = [length(rank, dst) for dst in range(size)], [length(src, rank) for src in range(size)]
        return build.all_to_all_single(
            blank((sum(received), 3), torch.float32),
            draw((sum(sent), 3), torch.float32, 27, rank),
            output_split_sizes=received,
            input_split_sizes=sent,
        )

    def only(side: str) -> Case:
        lengths = [rank + 1 for rank in range(size)]

        def make(rank: int) -> Collective:
            cut, equal = sum(lengths), lengths[rank] * size
            if side == "input":  # rank j gets j + 1 elements from every rank
                out, t = blank((equal,), torch.int64), draw((cut,), torch.int64, 28, rank)
                return build.all_to_all_single(out, t, input_split_sizes=lengths)
            out, t = blank((cut,), torch.int64), draw((equal,), torch.int64, 28, rank)
            return build.all_to_all_single(out, t, output_split_sizes=lengths)

        return Case(f"only {side}_split_sizes", make)

    cases = [even(rows, torch.float32) for rows in (0, 1, 13, 300)] + [even(2, dtype) for dtype in dtypes(group.size)]
    yield from against_reference(group, [*cases, Case("uneven parts", uneven), only("input"), only("output")])


def _from_each_root(group: Group, case: Callable[[int, Sequence[int], torch.dtype], Case]) -> list[Case]:
    """The case with each root in turn, without elements or dimensions, and with each dtype."""
    cases = [case(root, (13,), torch.float32) for root in range(group.size)]
    cases += [case(0, shape, torch.float32) for shape in ((0,), ())]
    return cases + [case(group.size - 1, (3, 2), dtype) for dtype in dtypes(group.size)]


def check_gather(group: Group) -> Problems:
    """To each root in turn."""

    def case(root: int, shape: Sequence[int], dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            outputs = [blank(shape, dtype) for _ in range(group.size)] if rank == root else None
            return build.gather(draw(shape, dtype, 29, root, rank), outputs, dst=root)

        return Case("gather", make)

    yield from against_reference(group, _from_each_root(group, case))


def check_scatter(group: Group) -> Problems:
    """From each root in turn."""

    def case(root: int, shape: Sequence[int], dtype: torch.dtype) -> Case:
        def make(rank: int) -> Collective:
            inputs = [draw(shape, dtype, 30, root, dst) for dst in range(group.size)] if rank == root else None
            return build.scatter(blank(shape, dtype), inputs, src=root)

        return Case("scatter", make)

    yield from against_reference(group, _from_each_root(group, case))


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


def check_dtypes_without_arithmetic(group: Group) -> Problems:
    """Dtypes that only hold bits (float4, float8_e8m0fnu) are moved by every collective that does not reduce."""
    size, rank, last = group.size, group.rank, group.size - 1

    def value(dtype: torch.dtype, r: int, n: int = 1) -> Tensor:
        return draw((48 * n,), torch.uint8, 62, r).view(dtype)

    def empty(dtype: torch.dtype, n: int = 1) -> Tensor:
        return torch.ones(48 * n, dtype=torch.uint8).view(dtype)

    def moved(op: Collective, outputs: list[Tensor], want: list[Tensor]) -> Problems:
        group.run(op)
        for got, right in zip(outputs, want, strict=True):
            yield from unlike(f"{op}", got.view(torch.uint8), right.view(torch.uint8))

    for d in sorted(ONLY_BITS, key=str):
        all_values = [value(d, r) for r in range(size)]
        outs, whole = [empty(d) for _ in range(size)], empty(d, size)
        yield from moved(build.all_gather(outs, value(d, rank)), outs, all_values)
        yield from moved(build.all_gather_into_tensor(whole, value(d, rank)), list(whole.view(size, -1)), all_values)
        mine = value(d, rank)
        yield from moved(build.broadcast(mine, src=last), [mine], all_values[last:])
        outs = [empty(d) for _ in range(size)]
        op = build.gather(value(d, rank), outs if rank == 0 else None, dst=0)
        yield from moved(op, outs if rank == 0 else [], all_values if rank == 0 else [])
        place = empty(d)
        yield from moved(
            build.scatter(place, all_values if rank == last else None, src=last), [place], [value(d, rank)]
        )
        outs = [empty(d) for _ in range(size)]
        yield from moved(build.all_to_all(outs, [value(d, rank) for _ in range(size)]), outs, all_values)
