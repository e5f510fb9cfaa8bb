"""The transformer block of the demo's and the benchmarks' models: pre-norm and causal, without dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention, then an MLP, each on a normalized residual stream."""

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
