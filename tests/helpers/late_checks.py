"""For tests of checks that are read late: the host takes the place of the device."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP, Replica
from gradwire.policies import NonFinite
from gradwire.reducer.checks import late, nonfinite_search
from helpers.poisoned_model import Model, inputs


@pytest.fixture
def emulate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have checks on the CPU read late, as on CUDA."""
    monkeypatch.setattr(late, "on_device", lambda device: True)
    monkeypatch.setattr(nonfinite_search, "on_host", lambda t: False)
    monkeypatch.setattr(Group, "orders_streams", lambda self, device: True)


def fused(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=0.05, fused=True, **options)


def step(model: nn.Module, rank: int, number: int, poison: float = 1.0) -> None:
    model(inputs(rank, number), poison).float().pow(2).sum().backward()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, poison: float = 1.0) -> None:
    optimizer.zero_grad()
    step(model, rank, number, poison)
    optimizer.step()


def attached(ddp: DDP | Replica, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    ddp.attach_optimizer(optimizer)
    return optimizer


def checked_model(group: Group, policy: NonFinite, **flags: Any) -> tuple[DDP, torch.optim.Optimizer]:
    """A model over the group, and its attached optimizer, which can skip a step."""
    ddp = DDP(Model(), process_group=group, nonfinite=policy, **flags)
    return ddp, attached(ddp, fused(ddp))


def train_until(ddp: nn.Module, optimizer: torch.optim.Optimizer, *, bad: int) -> None:
    """Steps up to the bad one, whose optimizer's step is left to the caller."""
    for number in range(bad + 1):
        optimizer.zero_grad()
        step(ddp, 0, number, math.nan if number == bad else 1.0)
        if number < bad:
            optimizer.step()


def all_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())
