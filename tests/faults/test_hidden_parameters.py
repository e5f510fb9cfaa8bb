"""A backward that fails where the graph from the loss shows no parameter of the model: the step fails on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from gradwire.errors import GroupAborted
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.parallel import replicate
from gradwire.testing import run_ranks


class Trap(torch.autograd.Function):
    """An identity whose backward raises when it is armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.armed:
            raise ValueError("of the user's own")
        return grad, None


class Model(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for p in self.parameters():
            nn.init.ones_(p)
        self.reentrant = reentrant
        self.armed = False

    def compute(self, x: Tensor) -> Tensor:
        return self.layers[1](Trap.apply(self.layers[0](x), self.armed))

    def forward(self, x: Tensor) -> Tensor:
        if not self.reentrant:
            return self.compute(x)
        return checkpoint(self.compute, x.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["ddp", "replicate"])
@pytest.mark.parametrize("hidden", ["in a re-entrant checkpoint", "behind a gradient edge"])
def test_the_step_fails_on_all_ranks(hidden: str, form: str) -> None:
    def train(group: Group) -> list[str | float]:
        module = Model(reentrant="checkpoint" in hidden)
        model: nn.Module = DDP(module, process_group=group) if form == "ddp" else module
        if form == "replicate":
            replicate(module, group=group)
        log: list[str | float] = []
        for iteration in range(5):
            module.armed = iteration == 2 and group.rank == 0
            model.zero_grad()
            try:
                loss = model(torch.full((1, 1), 1.0 + group.rank + iteration)).sum()
                if "edge" in hidden:
                    torch.autograd.backward([get_gradient_edge(loss)], [torch.ones(())])  # type: ignore[list-item]
                else:
                    loss.backward()
                log.append(module.layers[0].weight.grad.item())  # type: ignore[union-attr,operator]
            except (ValueError, GroupAborted) as error:
                log.append(type(error).__name__)
        return log

    first, second = run_ranks(train, 2)
    assert first == [1.5, 2.5, "ValueError", 4.5, 5.5]
    assert second == [1.5, 2.5, "GroupAborted", 4.5, 5.5]
