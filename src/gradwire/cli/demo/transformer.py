"""The demo's model: a character-level transformer, pre-norm and causal, small enough for one core.

Its weights are drawn from a given generator: ranks may be threads of one process, where torch's global generator would be
shared and the weights would depend on the scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.cli.block import Block


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the model. `context` is the number of characters of its context."""

    width: int
    layers: int
    heads: int
    context: int


SIZES = {
    "tiny": Shape(width=16, layers=1, heads=2, context=16),
    "small": Shape(width=64, layers=2, heads=4, context=64),
}


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Transformer(nn.Module):
    """Symbols in, logits of the next symbol out."""

    def __init__(self, shape: Shape, symbols: int, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.symbol = nn.Embedding(symbols, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(
            *[Block(width=shape.width, heads=shape.heads, activation=_squared_relu) for _ in range(shape.layers)]
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, symbols)
        self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                # GPT-2's rule: layers that write to the residual stream start smaller, by the number of writers.
                writes = name.endswith(("out.weight", "down.weight"))
                p.normal_(0.0, 0.02 / (2 * self.shape.layers) ** 0.5 if writes else 0.02, generator=generator)

    def forward(self, symbols: Tensor) -> Tensor:
        """`symbols` is [batch, time] with time at most `shape.context`; the result is [batch, time, symbols]."""
        x = self.symbol(symbols) + self.place.weight[: symbols.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per character, of predicting each symbol of `windows` except the first."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def continue_text(
        self, symbols: Tensor, count: int, generator: torch.Generator, temperature: float = 0.6
    ) -> Tensor:
        """`symbols` ([time]) and `count` more, drawn one by one."""
        for _ in range(count):
            logits = self(symbols[None, -self.shape.context :])[0, -1]
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            symbols = torch.cat([symbols, drawn])
        return symbols
