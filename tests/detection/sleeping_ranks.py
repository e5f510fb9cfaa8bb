"""Ranks whose computation is sleep, so that many fit on few cores: data-parallel training with known times, recorded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import observe
from gradwire.groups import Group
from gradwire.observe.stragglers.steps import Phase
from gradwire.parallel import DistributedDataParallel

_LAYERS = 2
_WIDTH = 16
_BUCKET_MB = 0.001
"""Small enough for a bucket per layer."""


@dataclass(frozen=True, slots=True)
class Delay:
    """One rank takes `share` more for a phase."""

    rank: int
    phase: Phase
    share: float


@dataclass(frozen=True, slots=True)
class Sleeping:
    """A run of sleeping ranks, recorded in `directory`."""

    directory: Path
    steps: int
    seconds: float
    """What data, forward and backward take, each."""
    delay: Delay | None = None

    def of(self, phase: Phase, rank: int) -> float:
        """Seconds that a rank takes for a phase."""
        delay = self.delay
        slow = delay is not None and (delay.rank, delay.phase) == (rank, phase)
        return self.seconds * (1 + delay.share) if slow and delay is not None else self.seconds


def train(run: Sleeping, group: Group) -> None:
    """On every rank: train, and record it."""
    torch.set_num_threads(1)
    observe.start(run.directory, rank=group.rank, size=group.size)
    try:
        _train(run, group)
    finally:
        observe.stop()


def _train(run: Sleeping, group: Group) -> None:
    rank = group.rank
    torch.manual_seed(0)
    forward, backward = (run.of(phase, rank) / _LAYERS for phase in (Phase.FORWARD, Phase.BACKWARD))
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), _Sleep(forward, backward))]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group, bucket_cap_mb=_BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(1, _WIDTH)
    for _ in range(run.steps):
        time.sleep(run.of(Phase.DATA, rank))
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


class _Sleep(nn.Module):
    """Takes time in forward and in backward, and computes nothing."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        """`x`, later."""
        y: Tensor = _SleepFunction.apply(x, *self.seconds)
        return y


class _SleepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None
