"""Gossip: each rank averages its parameters with a few others, and nobody with all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import all_to_all_single
from gradwire.errors import UsageError
from gradwire.hooks.base import Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.numerics.rng import generator
from gradwire.hooks.periodic.base import OuterHook, check_every

TOPOLOGIES = ("ring", "random")


@dataclass(frozen=True, slots=True)
class Gossip(OuterHook):
    """See `gossip`."""

    topology: str
    every: int
    seed: int

    def due(self, step: int) -> tuple[int, ...]:
        """After every `every`-th step."""
        return () if step % self.every else (0,)

    def neighbours(self, turn: Turn) -> list[int]:
        """With whom this rank averages in this turn, all of them and itself with the same weight."""
        rank, n = turn.rank, turn.world_size
        if self.topology == "ring":
            return sorted({(rank - 1) % n, (rank + 1) % n} - {rank})
        # All buckets of a turn have the same pairs. On the CPU: what is drawn decides what the host submits.
        everybody = replace(turn, spec=replace(turn.spec, index=0, names=(), device=torch.device("cpu")))
        order = torch.randperm(n, generator=generator(self.seed, everybody, shared=True)).tolist()
        mate = order.index(rank) ^ 1
        return [order[mate]] if mate < n else []

    def after_step(self, parameters: Tensor, state: Any, turn: Turn) -> Reduction:
        """Send to the neighbours and nobody else; average with what they sent."""
        if turn.world_size == 1:
            return Reduced(parameters, parameters)
        others = self.neighbours(turn)
        numel = parameters.numel()
        splits = [numel if rank in others else 0 for rank in range(turn.world_size)]
        sent = torch.cat([parameters] * len(others)) if others else parameters.new_empty(0)
        came = torch.empty_like(sent)
        label = f"parameters {turn.spec.index}"
        yield all_to_all_single(came, sent, output_split_sizes=splits, input_split_sizes=splits, label=label)
        total = parameters.to(wide(parameters.dtype), copy=True)
        for part in came.view(len(others), numel):
            total.add_(part)
        return Reduced(total.div_(1 + len(others)).to(parameters.dtype), parameters)

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        """The parameters, once for each neighbour."""
        neighbours = min(world_size - 1, 2 if self.topology == "ring" else 1)
        return float(neighbours * spec.numel * spec.dtype.itemsize)

    def __repr__(self) -> str:
        return f"gossip(topology={self.topology!r}, every={self.every}, seed={self.seed})"


def gossip(*, topology: str = "ring", every: int = 1, seed: int = 0) -> OuterHook:
    """Average the parameters with the neighbours' after every `every`-th step (D-PSGD, arXiv 1705.09056).

    On a "ring" these are the two next ranks, each counted a third; "random" pairs all ranks anew each time, as a shared seed says
    (of an odd number one stays alone). The weights add up to one over the ranks too, so the mean of all ranks' parameters is
    what it was; and the ranks come closer to it each time, but never get there: `model.average_parameters()` ends training. It
    wants `model.attach_optimizer(optimizer)`. No memory that lasts.
    On the wire: the parameters' bytes twice ("ring" of three or more), or once, whatever the number of ranks.
    """
    check_every("gossip", every=every)
    if topology not in TOPOLOGIES:
        raise UsageError(f"gossip(topology={topology!r}): not known. There are {', '.join(map(repr, TOPOLOGIES))}.")
    return Gossip(topology, every, seed)
