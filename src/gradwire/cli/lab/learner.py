"""What is trained over slow links: a character-level transformer on the standard library's source, the same for every contender.

Weights, the order of the data and the optimizer depend only on the seed, the rank and the step, never on the averaging.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.cli.demo.text import ALPHABET, Corpus, even_windows, random_windows
from gradwire.cli.demo.transformer import SIZES as DEMO_SIZES
from gradwire.cli.demo.transformer import Shape, Transformer

SIZES: Mapping[str, Shape] = MappingProxyType(
    {
        **DEMO_SIZES,
        "1m": Shape(width=128, layers=5, heads=4, context=64),
        "10m": Shape(width=384, layers=6, heads=6, context=64),
    }
)
"""`10m` has 10.7 million parameters, 43 MB of gradients; the others are for quick tests, and for other rates."""
_EXAM = 16
"""Windows of held-out text, on which the loss is measured."""
_WARM_UP = 5


def start(size: str, seed: int) -> Transformer:
    """The model before the first step."""
    return Transformer(SIZES[size], len(ALPHABET), torch.Generator().manual_seed(seed))


class Learner:
    """One rank's model in training. `wrapped` is `model` as wrapped by a contender."""

    def __init__(
        self, model: Transformer, wrapped: nn.Module, corpus: Corpus, *, seed: int, batch: int, rate: float
    ) -> None:
        """`seed` draws the text that it reads: every rank reads its own."""
        self.model, self.wrapped = model, wrapped
        self.steps = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP))
        self._text, self._batch = corpus.train, batch
        self._places = torch.Generator().manual_seed(seed)
        self._length = model.shape.context + 1
        self._exam = even_windows(corpus.held_out, _EXAM, self._length)

    def step(self) -> None:
        """Forward, backward with its communication, optimizer."""
        self.optimizer.zero_grad()
        windows = random_windows(self._text, self._batch, self._length, self._places)
        _loss(self.wrapped, windows).backward()
        self.optimizer.step()
        self._schedule.step()
        self.steps += 1

    @torch.no_grad()
    def examine(self) -> float:
        """The loss, in nats per character, on the same windows of held-out text every time."""
        return float(_loss(self.model, self._exam))


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
