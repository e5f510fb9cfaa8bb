"""Small models and their inputs, the same for every test file."""

import torch
from torch import Tensor, nn


def mlp(*, hidden: int = 1, seed: int | None = None) -> nn.Sequential:
    """From 4 features to 2, with `hidden` layers of 8; with a seed, the same parameters on every call."""
    if seed is not None:
        torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.ReLU()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def inputs(rank: int, step: int = 0, rows: int = 3) -> Tensor:
    """The batch of a rank in a step."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def descend(model: nn.Module, lr: float) -> None:
    """A step of plain SGD. Every parameter must have a gradient."""
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad  # type: ignore[operator]


def train(model: nn.Module, rank: int, steps: range, *, lr: float = 0.05) -> Tensor:
    """Plain SGD on this rank's batches; all parameters afterwards, in one row."""
    for step in steps:
        model.zero_grad()
        model(inputs(rank, step)).pow(2).sum().backward()
        descend(model, lr)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Counter(nn.Module):
    """A layer with a buffer that every rank changes differently."""

    def __init__(self, rank: int, *, reassign: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.reassign = reassign
        self.register_buffer("seen", torch.full((2,), float(rank)))
        self.register_buffer("count", torch.tensor(rank))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.seen
        if self.reassign:
            self.seen = self.seen + 1 + x[0, 0].detach()
        else:
            self.seen.add_(1 + x[0, 0].detach())
        return y


def flip(t: Tensor, byte: int = 0, bit: int = 0) -> None:
    """Flip one bit of a tensor, in place, whatever its strides."""
    with torch.no_grad():
        flat = t.detach().contiguous().reshape(-1)
        flat.view(torch.uint8)[byte] ^= 1 << bit
        t.copy_(flat.reshape(t.shape))
