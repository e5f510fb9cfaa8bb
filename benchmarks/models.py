"""The models that benchmarks train: many small parameters, where the cost per parameter matters, and the shape of GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTH = 16


class Block(nn.Module):
    """Attention, then an MLP, each on a normalized residual stream. Not from the package: `--against` runs two versions of that."""

    def __init__(self, *, width: int, heads: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads = heads
        self.activation = activation
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, time, width]."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        y: Tensor = x + self.down(self.activation(self.up(self.norm2(x))))
        return y


class ManySmall(nn.Module):
    """A chain of 16 x 16 linear layers with exactly `parameters` parameters, alternating weights and biases; returns a loss."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(parameters // 2)))
        if parameters % 2:
            self.layers.append(nn.Linear(_WIDTH, _WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, 16]."""
        y: Tensor = self.layers(x)
        return y.square().sum()

    @staticmethod
    def batch(size: int) -> Tensor:
        """Random inputs."""
        return torch.randn(size, _WIDTH)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a transformer."""

    width: int
    layers: int
    heads: int
    symbols: int
    context: int


SIZES = {
    "small": Shape(width=768, layers=12, heads=12, symbols=50257, context=1024),
    "10m": Shape(width=320, layers=6, heads=5, symbols=8192, context=64),
    "tiny": Shape(width=32, layers=2, heads=2, symbols=101, context=16),
}
"""`small` is GPT-2 small, 124 million elements; `10m` has 10 million, for slow cores; `tiny` is for quick tests."""


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class GPT2(nn.Module):
    """The shape of GPT-2, output embedding tied to the input's, without dropout; returns the loss of a batch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.symbol = nn.Embedding(shape.symbols, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(
            Block(width=shape.width, heads=shape.heads, activation=_gelu) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.symbols, bias=False)
        self.head.weight = self.symbol.weight
        for embedding in (self.symbol, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        """The mean cross-entropy of predicting each symbol of `symbols` ([batch, time]) except the first."""
        seen = symbols[:, :-1]
        x = self.symbol(seen) + self.place.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())

    def batch(self, size: int) -> Tensor:
        """Random symbols, one more than the context, on the CPU."""
        return torch.randint(self.shape.symbols, (size, self.shape.context + 1))
