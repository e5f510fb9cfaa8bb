"""What each rank does in `training`: one model per variant, all with the same initial weights, and steps in turns.

Note [Without communication]
The cost of communication is the extra time of a step over the same step without it. The latter runs on the same wrapped model,
under its own `no_sync`, with an SGD step whose learning rate is 0: it reads and writes the same memory and does not change the
parameters, so replicas stay equal.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from benchmarks import peers
from benchmarks.models import GPT2, SIZES
from benchmarks.timing import Rounds, interleave
from benchmarks.world import RankContext
from gradwire.errors import InternalError
from gradwire.groups import Group, SharedMemoryGroup

QUIET = ", no_sync"
"""Suffix of a variant's name: its step without communication."""
_RATE = 0.05
_FIRST_STEPS = 5
"""Steps of each variant before replicas are compared: both DDPs rebuild their buckets after the first."""
_CLOSE = 1e-3
"""The difference that the parameters of two variants may have then, relative to how far they have moved."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is trained, and for how many steps."""

    size: str
    batch: int
    tokens: int
    rounds: int
    block: int
    names: tuple[str, ...] = ()
    """Which variants; none: all of them."""
    without_communication: bool = True
    """Whether each is measured without communication, too."""


@dataclass(frozen=True, slots=True)
class Times:
    """What one rank has measured: seconds per step in each round, and what it trained."""

    seconds: Mapping[str, tuple[float, ...]]
    elements: int
    parameters: int


def run_trial(trial: Trial, context: RankContext) -> Times:
    """Train on this rank, together with all others."""
    with ExitStack() as stack:
        stack.enter_context(
            peers.torch_world(
                "gloo", PrefixStore("gloo", context.store), context.rank, context.size, timeout=context.timeout
            )
        )
        group = SharedMemoryGroup(
            PrefixStore("gradwire", context.store), context.rank, context.size, timeout=context.timeout
        )
        stack.callback(group.close)
        torch.manual_seed(0)
        start = GPT2(SIZES[trial.size])
        torch.manual_seed(1 + context.rank)  # every rank reads different data
        inputs = start.batch(trial.batch)[:, : trial.tokens + 1]
        wrappers = peers.wrappers(group)
        models = {name: wrappers[name](copy.deepcopy(start)) for name in trial.names or wrappers}
        steps = {name: _step(model, inputs, _RATE) for name, model in models.items()}
        for step in steps.values():
            for _ in range(_FIRST_STEPS):
                step()
            context.report(0)
        check_same(start, {name: model for name, model in models.items() if name != peers.BARE}, group)
        named = [name for name in models if name != peers.BARE] if trial.without_communication else []
        quiet = {name + QUIET: _quiet(models[name], inputs) for name in named}
        gc.collect()
        gc.freeze()
        series = interleave(
            steps | quiet,
            Rounds(trial.rounds, block=trial.block, lead_in=1, warm_up=1),
            fence=context.barrier.wait,
            after_round=context.report if context.rank == 0 else None,
        )
        context.barrier.wait()  # no rank closes while another is still working
        for model in models.values():
            peers.unwrap(model)
    sizes = [p.numel() for p in start.parameters()]
    return Times({name: s.seconds for name, s in series.items()}, sum(sizes), len(sizes))


def _step(model: nn.Module, inputs: Tensor, rate: float) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()

    return step


def _quiet(model: Any, inputs: Tensor) -> Callable[[], None]:
    """See Note [Without communication]."""
    step = _step(model, inputs, 0.0)

    def quiet() -> None:
        with model.no_sync():
            step()

    return quiet


def check_same(start: nn.Module, models: Mapping[str, nn.Module], group: Group) -> None:
    """Raise unless all models have moved from `start` to the same parameters, and each is the same on every rank."""
    begin = _flat(start)
    first, expected = next((name, _flat(model)) for name, model in models.items())
    for name, model in models.items():
        found = _flat(model)
        if bool((found - expected).norm() > _CLOSE * (expected - begin).norm()):
            raise InternalError(f"training: {name} has other parameters than {first} after the same number of steps.")
        rank0 = found.clone()
        group.broadcast(rank0, 0, label="parameters of rank 0")
        if not torch.equal(found, rank0):
            raise InternalError(f"training: rank {group.rank}'s parameters of {name} differ from rank 0's.")


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
