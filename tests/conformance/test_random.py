"""Hundreds of random operations with random delays, several in flight: every rank ends with the bits of the reference.

All ranks draw the same plan from one seed: kinds, sizes, dtypes, roots, values of every rank, and where each rank's tensors lie
(in the group's own memory or not). So each can work out by itself, with `reference.perform`, what everybody must end up with.
"""

import functools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.collectives.reference import perform
from gradwire.groups import Group
from gradwire.groups.shared_memory.board import CHUNK, SMALL
from gradwire.groups.shared_memory.fold import BLOCK
from gradwire.testing import run_ranks

RANKS = 4
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
LARGEST, OFFSETS = 3 * CHUNK, 10_007
"""Bytes of the largest tensor, and from how many places of a pool its values are taken."""
EDGES = [0, 1, 3, SMALL, BLOCK, CHUNK, 2 * CHUNK]
"""Bytes around which a sum takes another way."""


@dataclass(frozen=True)
class Limits:
    """What to draw from: an engine that reduces in another order gives the same bits only for integers."""

    operations: int
    exact: bool
    largest: int = LARGEST


def draw_numel(draw: random.Random, dtype: torch.dtype, limits: Limits, parts: int = 1) -> int:
    """Small most of the time; else around an edge, or anything up to the largest."""
    kind = draw.random()
    if kind < 0.7:
        nbytes = draw.choice([0, 1, 7, 64, draw.randrange(5000)])
    elif kind < 0.92:
        nbytes = max(0, draw.choice(EDGES) + draw.choice([-1, 0, 1, 64, -64]) * dtype.itemsize)
    else:
        nbytes = draw.randrange(limits.largest)
    return min(nbytes, limits.largest) // dtype.itemsize // parts


def draw_reduction(draw: random.Random, limits: Limits) -> tuple[torch.dtype, ReduceOp]:
    dtype = draw.choice((FLOATS if limits.exact else []) + INTEGERS)
    ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.PRODUCT]
    if not dtype.is_complex:
        ops += [ReduceOp.MIN, ReduceOp.MAX]
    ops += [ReduceOp.AVG] if dtype in FLOATS else [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    return dtype, draw.choice(ops)


@functools.cache
def pool(dtype: torch.dtype, numel: int) -> Tensor:
    """Values of which tensors are slices: to draw them takes longer than all that is done with them."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randint(-8, 9, (numel,), generator=generator).to(dtype) / 4
        return values + torch.rand(numel, generator=generator).to(dtype) / 8
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


class Maker:
    """Makes tensors: the same values on all ranks, each in memory that was drawn for its owner."""

    def __init__(self, group: Group, draw: random.Random) -> None:
        self.group = group
        self.draw = draw

    def filled(self, owner: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Values that only the seed decides, in the group's memory or not, in a row or not."""
        where = self.draw.choice(["heap", "heap", "view", "ordinary", "strided"])
        first = self.draw.randrange(OFFSETS)
        values = pool(dtype, LARGEST // dtype.itemsize + OFFSETS)[first : first + numel]
        if owner != self.group.rank or where == "ordinary":
            return values.clone()
        if where == "strided":
            t = torch.empty(numel, 2, dtype=dtype)[:, 0]
        elif where == "view":
            t = self.group.allocate(numel + 3, dtype=dtype)[3:]
        else:
            t = self.group.allocate(numel, dtype=dtype)
        return t.copy_(values)


Plan = Callable[[Maker, Limits], list[Collective]]
"""Draws one operation: every rank's record of it."""


def all_reduce(make: Maker, limits: Limits) -> list[Collective]:
    dtype, op = draw_reduction(make.draw, limits)
    n = draw_numel(make.draw, dtype, limits)
    return [build.all_reduce(make.filled(r, n, dtype), op=op) for r in range(RANKS)]


def sum_(make: Maker, limits: Limits) -> list[Collective]:
    dtype = make.draw.choice([torch.float32, torch.float64] if limits.exact else [torch.int32, torch.int64])
    n = draw_numel(make.draw, dtype, limits)
    return [build.all_reduce(make.filled(r, n, dtype)) for r in range(RANKS)]


def coalesced(make: Maker, limits: Limits) -> list[Collective]:
    dtypes = [draw_reduction(make.draw, limits)[0] for _ in range(3)]
    sizes = [draw_numel(make.draw, dtype, limits, 8) for dtype in dtypes]
    tensors = [[make.filled(r, n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)] for r in range(RANKS)]
    return [build.all_reduce(tensors[r]) for r in range(RANKS)]


def reduce(make: Maker, limits: Limits) -> list[Collective]:
    dtype, op = draw_reduction(make.draw, limits)
    n, root = draw_numel(make.draw, dtype, limits), make.draw.randrange(RANKS)
    return [build.reduce(make.filled(r, n, dtype), dst=root, op=op) for r in range(RANKS)]


def broadcast(make: Maker, limits: Limits) -> list[Collective]:
    dtype = make.draw.choice(FLOATS + INTEGERS)
    n, root = draw_numel(make.draw, dtype, limits), make.draw.randrange(RANKS)
    return [build.broadcast(make.filled(r, n, dtype), src=root) for r in range(RANKS)]


def all_gather(make: Maker, limits: Limits) -> list[Collective]:
    dtype = make.draw.choice(FLOATS + INTEGERS)
    sizes = [draw_numel(make.draw, dtype, limits, RANKS) for _ in range(RANKS)]
    return [
        build.all_gather([make.filled(r, n, dtype) for n in sizes], make.filled(r, sizes[r], dtype))
        for r in range(RANKS)
    ]


def all_gather_into_tensor(make: Maker, limits: Limits) -> list[Collective]:
    dtype = make.draw.choice(FLOATS + INTEGERS)
    n = draw_numel(make.draw, dtype, limits, RANKS)
    return [
        build.all_gather_into_tensor(make.filled(r, n * RANKS, dtype), make.filled(r, n, dtype)) for r in range(RANKS)
    ]


def reduce_scatter(make: Maker, limits: Limits) -> list[Collective]:
    dtype, op = draw_reduction(make.draw, limits)
    sizes = [draw_numel(make.draw, dtype, limits, RANKS) for _ in range(RANKS)]
    return [
        build.reduce_scatter(make.filled(r, sizes[r], dtype), [make.filled(r, n, dtype) for n in sizes], op=op)
        for r in range(RANKS)
    ]


def reduce_scatter_tensor(make: Maker, limits: Limits) -> list[Collective]:
    dtype, op = draw_reduction(make.draw, limits)
    n = draw_numel(make.draw, dtype, limits, RANKS)
    return [
        build.reduce_scatter_tensor(make.filled(r, n, dtype), make.filled(r, n * RANKS, dtype), op=op)
        for r in range(RANKS)
    ]


def all_to_all(make: Maker, limits: Limits) -> list[Collective]:
    dtype = make.draw.choice(FLOATS + INTEGERS)
    sizes = [[draw_numel(make.draw, dtype, limits, RANKS) for _ in range(RANKS)] for _ in range(RANKS)]
    return [
        build.all_to_all(
            [make.filled(r, sizes[s][r], dtype) for s in range(RANKS)],
            [make.filled(r, sizes[r][d], dtype) for d in range(RANKS)],
        )
        for r in range(RANKS)
    ]


def all_to_all_single(make: Maker, limits: Limits) -> list[Collective]:
    dtype = make.draw.choice(FLOATS + INTEGERS)
    sizes = [[draw_numel(make.draw, dtype, limits, RANKS) for _ in range(RANKS)] for _ in range(RANKS)]
    ops = []
    for r in range(RANKS):
        outs, ins = [sizes[s][r] for s in range(RANKS)], sizes[r]
        ops.append(
            build.all_to_all_single(
                make.filled(r, sum(outs), dtype),
                make.filled(r, sum(ins), dtype),
                output_split_sizes=outs,
                input_split_sizes=ins,
            )
        )
    return ops


def from_or_to_root(
    make: Maker, limits: Limits, one: Callable[[Tensor, list[Tensor] | None, int], Collective]
) -> list[Collective]:
    dtype = make.draw.choice(FLOATS + INTEGERS)
    n, root = draw_numel(make.draw, dtype, limits, RANKS), make.draw.randrange(RANKS)
    ops = []
    for r in range(RANKS):
        places = [make.filled(r, n, dtype) for _ in range(RANKS)] if r == root else None
        ops.append(one(make.filled(r, n, dtype), places, root))
    return ops


def gather(make: Maker, limits: Limits) -> list[Collective]:
    return from_or_to_root(make, limits, lambda mine, places, root: build.gather(mine, places, dst=root))


def scatter(make: Maker, limits: Limits) -> list[Collective]:
    return from_or_to_root(make, limits, lambda mine, places, root: build.scatter(mine, places, src=root))


def barrier(make: Maker, limits: Limits) -> list[Collective]:
    return [build.barrier() for _ in range(RANKS)]


PLANS: list[Plan] = [
    all_reduce, all_reduce, sum_, sum_, sum_, coalesced, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter,
    reduce_scatter_tensor, all_to_all, all_to_all_single, gather, scatter, barrier,
]  # fmt: skip


def on_copies(op: Collective) -> Collective:
    """The same record with tensors of its own."""
    copies = {id(t): t.clone() for t in op.inputs + op.outputs}
    inputs = tuple(copies[id(t)] for t in op.inputs)
    outputs = inputs if op.outputs is op.inputs else tuple(copies[id(t)] for t in op.outputs)
    return replace(op, inputs=inputs, outputs=outputs)


class Flight:
    """What is under way on this rank, and what it must come to."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group = group
        self.own = random.Random(seed * 100 + group.rank)  # delays and patience are each rank's own affair
        self.waiting: list[tuple[Any, Collective, tuple[Tensor, ...]]] = []
        self.counts: Counter[str] = Counter()

    def start(self, op: Collective, expected: tuple[Tensor, ...], *, wait: bool) -> None:
        if wait:
            self.group.run(op)
            self.compare(op, expected)
        else:
            self.waiting.append((self.group.submit(op), op, expected))

    def land(self, leave: int) -> None:
        """Wait for some of what is in flight, in any order."""
        while len(self.waiting) > leave:
            work, op, expected = self.waiting.pop(self.own.randrange(len(self.waiting)))
            work.wait()
            self.compare(op, expected)

    def compare(self, op: Collective, expected: tuple[Tensor, ...]) -> None:
        for i, (found, wanted) in enumerate(zip(op.outputs, expected, strict=True)):
            assert torch.equal(found, wanted), f"{op}, output {i}, on rank {self.group.rank}"
        self.counts[op.kind.value] += 1


def collective(group: Group, draw: random.Random, limits: Limits, flight: Flight) -> None:
    ops = draw.choice(PLANS)(Maker(group, draw), limits)
    twins = [on_copies(op) for op in ops]
    perform(twins)
    flight.start(ops[group.rank], twins[group.rank].outputs, wait=flight.own.random() < 0.5)


def message(group: Group, draw: random.Random, limits: Limits, flight: Flight, number: int) -> None:
    """One rank sends to another; both may go on meanwhile. Each number is a tag of its own, or shares tag 0 in order."""
    source, target = draw.sample(range(RANKS), 2)
    dtype = draw.choice(FLOATS + INTEGERS)
    n, tag = draw_numel(draw, dtype, limits), draw.choice([0, number])
    make = Maker(group, draw)
    sent, place = make.filled(source, n, dtype), make.filled(target, n, dtype)
    if group.rank == source:
        flight.start(build.send(sent, dst=target, tag=tag), (), wait=False)
    elif group.rank == target:
        flight.start(build.recv(place, src=source, tag=tag), (sent,), wait=False)


def soak(group: Group, seed: int, limits: Limits) -> dict[str, int]:
    """The whole plan, and how many operations of each kind were checked on this rank."""
    draw, flight = random.Random(seed), Flight(group, seed)
    for number in range(1, limits.operations + 1):
        if flight.own.random() < 0.02:
            time.sleep(flight.own.uniform(0, 0.005))
        if draw.random() < 0.2:
            message(group, draw, limits, flight, number)
        else:
            collective(group, draw, limits, flight)
        if flight.own.random() < 0.3 or len(flight.waiting) > 20:
            flight.land(flight.own.randrange(8))
    flight.land(0)
    return dict(flight.counts)


KINDS = {
    "shared_memory": Limits(250, exact=True),
    "threads": Limits(150, exact=True),
    "gloo": Limits(150, exact=False, largest=CHUNK),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_end_with_the_bits_of_the_reference(kind: str) -> None:
    limits = KINDS[kind]
    counts = run_ranks(lambda group: soak(group, 20_26, limits), RANKS, kind=kind)
    total = Counter()
    for one in counts:
        total.update(one)
    assert set(total) == {k.value for k in OpKind}
    collectives = sum(n for name, n in counts[0].items() if name not in ("send", "recv"))
    assert collectives + total["send"] == limits.operations
    assert total["send"] == total["recv"]
