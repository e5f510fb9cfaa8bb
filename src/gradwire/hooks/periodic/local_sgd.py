"""Average the parameters every few steps: over all ranks (local SGD), or with a few neighbors (gossip)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce, all_to_all_single
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.dense import Mean
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.numerics.rng import generator
from gradwire.hooks.periodic.base import OuterHook


@dataclass(frozen=True, slots=True, repr=False)
class LocalSGD(OuterHook):
    every: int

    made_by = "local_sgd"
    outer_collectives = 1
    equalizes = True

    def after_step(self, parameters: Tensor, state: Any, turn: Turn) -> Reduction:
        yield all_reduce(parameters, op=ReduceOp.AVG, label=f"parameters {turn.spec.index}")
        return Reduced(parameters, parameters)

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        return 2 * (world_size - 1) / world_size * spec.nbytes


@checks_arguments(every="[1, inf)")
def local_sgd(*, every: int) -> OuterHook:
    """Average the parameters, instead of the gradients, every `every` steps (arXiv 1805.09767).

    Requires `model.attach_optimizer(optimizer)`. No memory. On the wire: 2 (n - 1) / n of the parameters' bytes every `every`
    steps for n ranks. Optimizer states (momentum, Adam's moments) are not averaged.
    """
    return LocalSGD(every)


@dataclass(frozen=True, slots=True, repr=False)
class PostLocalSGD(LocalSGD):
    start: int

    made_by = "post_local_sgd"
    collectives = None

    def averages_gradients(self, step: int) -> bool:
        return step < self.start

    def due(self, step: int) -> tuple[int, ...]:
        return (0,) if step > self.start and (step - self.start) % self.every == 0 else ()

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        if turn.step < self.start:
            return (yield from Mean().reduce(grad, None, turn))
        return Reduced(grad, grad)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return Mean().wire_bytes(spec, world_size) if step < self.start else 0.0


@checks_arguments(start="[0, inf)", every="[1, inf)")
def post_local_sgd(*, start: int, every: int) -> OuterHook:
    """Average the gradients for `start` steps, and from then on the parameters every `every` steps (arXiv 1808.07217).

    Requires `model.attach_optimizer(optimizer)`. No memory. On the wire: as `mean()` for `start` steps, then as `local_sgd`.
    """
    return PostLocalSGD(every, start)


@dataclass(frozen=True, slots=True, repr=False)
class Gossip(OuterHook):
    topology: str
    every: int
    seed: int

    made_by = "gossip"

    def neighbors(self, turn: Turn) -> list[int]:
        """The ranks with which this one averages in this turn, with equal weights."""
        rank, n = turn.rank, turn.world_size
        if self.topology == "ring":
            return sorted({(rank - 1) % n, (rank + 1) % n} - {rank})
        # The same pairs for all buckets of a turn. On the CPU, because the host needs the result to submit.
        common = replace(turn, spec=replace(turn.spec, index=0, names=(), device=torch.device("cpu")))
        order = torch.randperm(n, generator=generator(self.seed, common, shared=True)).tolist()
        mate = order.index(rank) ^ 1
        return [order[mate]] if mate < n else []

    def after_step(self, parameters: Tensor, state: Any, turn: Turn) -> Reduction:
        if turn.world_size == 1:
            return Reduced(parameters, parameters)
        others = self.neighbors(turn)
        numel = parameters.numel()
        splits = [numel if rank in others else 0 for rank in range(turn.world_size)]
        sent = torch.cat([parameters] * len(others)) if others else parameters.new_empty(0)
        received = torch.empty_like(sent)
        label = f"parameters {turn.spec.index}"
        yield all_to_all_single(received, sent, output_split_sizes=splits, input_split_sizes=splits, label=label)
        total = parameters.to(wide(parameters.dtype), copy=True)
        for part in received.view(len(others), numel):
            total.add_(part)
        return Reduced(total.div_(1 + len(others)).to(parameters.dtype), parameters)

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        neighbors = min(world_size - 1, 2 if self.topology == "ring" else 1)
        return float(neighbors * spec.nbytes)


@checks_arguments(topology=("ring", "random"), every="[1, inf)")
def gossip(*, topology: str = "ring", every: int = 1, seed: int = 0) -> OuterHook:
    """Average the parameters with those of the neighbors after every `every`-th step (D-PSGD, arXiv 1705.09056).

    On a "ring" these are the two adjacent ranks, each with weight one third; "random" draws new pairs of ranks each time, from a
    shared seed (one of an odd number stays alone). The ranks converge toward the mean but never reach it: call
    `model.average_parameters()` at the end of training. Requires `model.attach_optimizer(optimizer)`. No persistent memory.
    On the wire: the parameters' bytes twice ("ring" of three or more), or once, for any number of ranks.
    """
    return Gossip(topology, every, seed)
