"""Training on a problem whose ranks have different optima."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.groups import Group
from gradwire.hooks import CommHook
from gradwire.parallel import replicate
from gradwire.policies import Buckets

with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
    CENTRES = torch.randn(4, 16)


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Four kinds of digits, as noisy points around four centers."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    labels = torch.randint(4, (size,), generator=generator)
    return CENTRES[labels] + 0.7 * torch.randn(size, 16, generator=generator), labels


def loss_on(model: nn.Module, rank: int, step: int) -> Tensor:
    points, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(points), labels)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    group: Group,
    hook: CommHook,
    steps: int,
    *,
    first: int = 0,
    lr: float = 0.2,
    momentum: float = 0.0,
    ready: Callable[[Any, Any], None] | None = None,
) -> tuple[nn.Module, list[Tensor]]:
    """Train; the model, and its parameters after each step."""
    model = copy.deepcopy(NET)
    replica = replicate(model, group=group, hook=hook, buckets=Buckets((600,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    replica.attach_optimizer(optimizer)
    if ready is not None:
        ready(replica, optimizer)
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_on(model, group.rank, step).backward()
        optimizer.step()
        seen.append(flat(model))
    replica.detach()
    return model, seen
