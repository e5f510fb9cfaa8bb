"""The contenders of `collectives`, each as a table of calls without arguments, their buffers, and how a rank times them.

A contender is one entry of `CONTENDERS`: its name, and a function that makes its buffers and calls in a rank's process.
"""

from __future__ import annotations

import functools
import gc
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from benchmarks import mpi, peers
from benchmarks.timing import Rounds, interleave
from benchmarks.world import RankContext
from gradwire.errors import InternalError
from gradwire.groups import SharedMemoryGroup

HEAP = "gradwire heap"
ORDINARY = "gradwire ordinary"
GLOO = "gloo"
MPI = "Open MPI"
MEMCPY = "memcpy"

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
GATHERED = ("all_gather", "reduce_scatter", "all_to_all")
"""Those whose tensor is split into one part per rank."""

Key = tuple[str, int]
"""A contender's name, and a number of bytes."""
FLOAT32 = 4
_MOST_CALLS = 1000
_WARM_UP = 3
"""Untimed calls of each."""

Call = Callable[[], object]
Allocate = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Buffers:
    """One contender's memory: `full` and `other` have the size of the operation's larger tensor, `part` one rank's share.

    Memory of the largest size is allocated once, and touched; smaller sizes use its beginning.
    """

    full: Tensor
    part: Tensor
    other: Tensor

    @classmethod
    def make(cls, op: str, numel: int, ranks: int, allocate: Allocate) -> Buffers:
        """Buffers of zeros. Those that `op` does not use are empty."""
        part = numel // ranks if op in ("all_gather", "reduce_scatter") else 0
        other = numel if op in ("all_to_all", MEMCPY) else 0
        return cls(*(allocate(count).zero_() for count in (numel, part, other)))

    def first(self, numel: int, ranks: int) -> Buffers:
        """The beginning: buffers of `numel` elements."""
        return Buffers(self.full[:numel], self.part[: numel // ranks], self.other[:numel])

    def source_and_result(self, op: str) -> tuple[Tensor, Tensor]:
        """Where `op` reads, and where its result is."""
        return {
            "all_gather": (self.part, self.full),
            "reduce_scatter": (self.full, self.part),
            "all_to_all": (self.full, self.other),
            MEMCPY: (self.full, self.other),
        }.get(op, (self.full, self.full))


class Contender:
    """One way to move bytes, in one rank's process."""

    def __init__(self, op: str, buffers: Buffers, calls: Callable[[Buffers], Mapping[str, Call]], ranks: int) -> None:
        self._op, self._buffers, self._calls, self._ranks = op, buffers, calls, ranks

    def call(self, numel: int) -> Call:
        """The operation on `numel` elements."""
        return self._calls(self._buffers.first(numel, self._ranks))[self._op]

    def check(self, name: str, numel: int, rank: int) -> None:
        """Run it once on known values, raise if the result is wrong, and leave zeros."""
        buffers = self._buffers.first(numel, self._ranks)
        source, result = buffers.source_and_result(self._op)
        source.fill_(rank + 1.0)
        self.call(numel)()
        expected = torch.empty_like(result)
        for index, chunk in enumerate(expected.chunk(self._ranks)):
            chunk.fill_(_expected(self._op, rank, index, self._ranks))
        if not torch.equal(result, expected):
            raise InternalError(f"collectives: {self._op} of {name} on {numel} elements has a wrong result.")
        for tensor in (source, result):
            tensor.zero_()


def _expected(op: str, rank: int, chunk: int, ranks: int) -> float:
    """The elements of chunk number `chunk` of the result, if every rank fills its source with its rank plus one."""
    if op in ("all_reduce", "reduce_scatter"):
        return ranks * (ranks + 1) / 2
    if op in ("all_gather", "all_to_all"):
        return chunk + 1.0
    return 1.0 if op == "broadcast" else rank + 1.0


# -- the contenders ----------------------------------------------------------------------------------------------------------


def _gradwire_calls(group: SharedMemoryGroup, b: Buffers) -> dict[str, Call]:
    return {
        "all_reduce": lambda: group.all_reduce(b.full),
        "broadcast": lambda: group.broadcast(b.full, 0),
        "all_gather": lambda: group.all_gather_into_tensor(b.full, b.part),
        "reduce_scatter": lambda: group.reduce_scatter_tensor(b.part, b.full),
        "all_to_all": lambda: group.all_to_all_single(b.other, b.full),
    }


def _gradwire(context: RankContext, op: str, numel: int, stack: ExitStack, *, heap: bool) -> Contender:
    name = "heap" if heap else "ordinary"
    group = SharedMemoryGroup(
        PrefixStore(name, context.store), context.rank, context.size, timeout=context.timeout, name=name
    )
    stack.callback(group.close)
    buffers = Buffers.make(op, numel, context.size, group.allocate if heap else _ordinary)
    return Contender(op, buffers, lambda b: _gradwire_calls(group, b), context.size)


def _gloo(context: RankContext, op: str, numel: int, stack: ExitStack) -> Contender:
    stack.enter_context(peers.torch_world("gloo", context.store, context.rank, context.size, timeout=context.timeout))
    buffers = Buffers.make(op, numel, context.size, _ordinary)
    return Contender(op, buffers, lambda b: peers.gloo_calls(b.full, b.part, b.other), context.size)


def _mpi(context: RankContext, op: str, numel: int, stack: ExitStack) -> Contender:
    buffers = Buffers.make(op, numel, context.size, _ordinary)
    return Contender(op, buffers, lambda b: mpi.calls(b.full, b.part, b.other), context.size)


def _memcpy(context: RankContext, op: str, numel: int, stack: ExitStack) -> Contender:
    buffers = Buffers.make(MEMCPY, numel, context.size, _ordinary)
    return Contender(MEMCPY, buffers, lambda b: {MEMCPY: lambda: b.other.copy_(b.full)}, context.size)


def _ordinary(numel: int) -> Tensor:
    return torch.empty(numel)


CONTENDERS: Mapping[str, Callable[[RankContext, str, int, ExitStack], Contender]] = MappingProxyType(
    {
        HEAP: functools.partial(_gradwire, heap=True),
        ORDINARY: functools.partial(_gradwire, heap=False),
        GLOO: _gloo,
        MPI: _mpi,
        MEMCPY: _memcpy,
    }
)
"""Factories: `(context, operation, elements, what to close) -> Contender`, called in the same order on all ranks."""


# -- what a rank does -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Race:
    """What is measured: contenders `names` at `sizes` in bytes; `turn` is the target duration of a turn in seconds."""

    op: str
    sizes: tuple[int, ...]
    rounds: int
    turn: float
    names: tuple[str, ...]

    @property
    def keys(self) -> list[Key]:
        """All pairs, grouped by size, in the order of their turns."""
        return [(name, nbytes) for nbytes in self.sizes for name in self.names]


@dataclass(frozen=True, slots=True)
class Laps:
    """What one rank has measured: seconds per call in each round, and the number of calls per turn."""

    seconds: Mapping[Key, tuple[float, ...]]
    blocks: Mapping[Key, int]


def run_race(race: Race, context: RankContext) -> Laps:
    """Measure on this rank, together with all others."""
    with ExitStack() as stack:
        largest = race.sizes[-1] // FLOAT32
        made = {name: CONTENDERS[name](context, race.op, largest, stack) for name in race.names}
        for name, nbytes in race.keys:
            made[name].check(name, nbytes // FLOAT32, context.rank)
            context.report(0)
        calls = {(name, nbytes): made[name].call(nbytes // FLOAT32) for name, nbytes in race.keys}
        blocks = _agree(context, {key: _block(context, call, race.turn) for key, call in calls.items()})
        gc.collect()
        gc.freeze()
        series = interleave(
            {_text(key): call for key, call in calls.items()},
            Rounds(race.rounds, {_text(key): block for key, block in blocks.items()}, lead_in=1, warm_up=_WARM_UP),
            fence=context.barrier.wait,
            after_round=context.report if context.rank == 0 else None,
        )
        context.barrier.wait()  # no rank closes while another is still working
    return Laps({key: series[_text(key)].seconds for key in calls}, blocks)


def _block(context: RankContext, call: Call, turn: float) -> int:
    """How many calls a turn should have, as measured on this rank."""
    context.barrier.wait()
    call()
    begin = time.perf_counter()
    call()
    call()
    seconds = (time.perf_counter() - begin) / 2
    return max(1, min(_MOST_CALLS, round(turn / seconds)))


def _agree(context: RankContext, blocks: Mapping[Key, int]) -> dict[Key, int]:
    """Rank 0's numbers, on every rank: all must make the same calls."""
    if context.rank == 0:
        context.store.set("bench/blocks", json.dumps(list(blocks.values())))
    return dict(zip(blocks, json.loads(context.store.get("bench/blocks")), strict=True))


def _text(key: Key) -> str:
    return f"{key[0]}, {key[1]} bytes"
