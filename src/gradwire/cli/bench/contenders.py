"""The contenders of `gradwire bench collectives`, each as a table of calls without arguments, and their buffers.

A contender is one entry of `CONTENDERS`: its name, and a function that makes its buffers and calls in a rank's process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from gradwire.cli.experiment import mpi, peers
from gradwire.cli.experiment.rank_context import RankContext
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
            raise InternalError(f"bench collectives: {self._op} of {name} on {numel} elements has a wrong result.")
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


def settings() -> dict[str, Any]:
    """A description of how the contenders are used."""
    return {
        "memory": "heap: tensors from group.allocate; all others: ordinary tensors; memcpy: dst.copy_(src) on all ranks at once",
        "values": "zeros, float32, in memory that was touched before; results are checked once before timing",
    }
