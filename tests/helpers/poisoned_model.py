"""A model whose gradients, of some layers, can be made NaN, infinite or large, with a loss that is not."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 0.0001
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"bucket_cap_mb": SMALL},
    "one bucket": {},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "lazy": {"lazy_bucket_allocation": True},
    "mixed": {
        "mixed_precision": SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=None)
    },
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor, poison: float = 1.0) -> Tensor:
        return self.last(Scale.apply(torch.tanh(self.first(x)), poison)) + self.empty.sum()


class Scale(torch.autograd.Function):
    """Multiplies gradients alone, so that those of `first` are poisoned and the loss is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.rand(3, 4, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.1


def means(model: nn.Module, n: int, step: int) -> list[Tensor]:
    """The mean of the gradients of `n` ranks."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    for rank in range(n):
        copied(inputs(rank, step)).pow(2).sum().div(n).backward()
    return [p.grad for p in copied.parameters()]  # type: ignore[misc]
