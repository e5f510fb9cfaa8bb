"""The demo's text and model: the source code of the Python standard library, and a character-level transformer that learns it.

Modules are read in the order of their names and every tenth is held out, so every rank sees the same two texts. The model's weights
are drawn from a given generator: ranks may be threads of one process, where torch's global generator would be shared.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import UsageError

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that have a symbol; every other byte is read as "?", a tab as one space."""

_HOLD_OUT = 10
_TABLE = bytes(ALPHABET.index(" " if b == 9 else chr(b) if chr(b) in ALPHABET else "?") for b in range(256))


@dataclass(frozen=True, slots=True)
class Corpus:
    """A training text and a held-out text, as flat uint8 tensors of symbol ids."""

    train: Tensor
    held_out: Tensor

    def unigram_entropy(self) -> float:
        """The loss, in nats per character, of a model that knows only the frequency of each symbol."""
        counts = torch.bincount(self.train.long(), minlength=len(ALPHABET)).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log()).sum())


def encode(text: str) -> Tensor:
    """The symbol ids of a text.

    >>> decode(encode("def f(x):\\n\\treturn é"))
    'def f(x):\\n return ??'
    """
    return torch.tensor(list(text.encode().translate(_TABLE)), dtype=torch.uint8)


def decode(symbols: Tensor) -> str:
    return "".join(ALPHABET[i] for i in symbols.tolist())


def standard_library(folder: Path | None = None) -> Corpus:
    """The top-level modules of this Python's standard library, or those of `folder`."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if len(modules) < _HOLD_OUT:
        raise UsageError(
            f"reading the demo's text from {folder}: found {len(modules)} Python source files, need at least {_HOLD_OUT}. "
            "Use a Python that ships the source of its standard library."
        )
    return Corpus(
        train=_read([path for i, path in enumerate(modules, 1) if i % _HOLD_OUT]),
        held_out=_read([path for i, path in enumerate(modules, 1) if i % _HOLD_OUT == 0]),
    )


def _read(paths: list[Path]) -> Tensor:
    text = b"\n".join(path.read_bytes() for path in paths).replace(b"\r\n", b"\n")
    return torch.frombuffer(bytearray(text.translate(_TABLE)), dtype=torch.uint8)


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` windows of `length` characters at random positions, as a `[count, length]` int64 tensor."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """`count` windows of `length` characters spread evenly over the text."""
    starts = torch.arange(count)[:, None] * ((len(text) - length) // max(1, count - 1))
    return text[starts + torch.arange(length)].long()


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


class Block(nn.Module):
    """Attention, then an MLP with squared ReLUs, each on a normalized residual stream."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        y: Tensor = x + self.down(F.relu(self.up(self.norm2(x))).square())
        return y


class Transformer(nn.Module):
    """Symbols in, logits of the next symbol out."""

    def __init__(self, shape: Shape, symbols: int, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.symbol = nn.Embedding(symbols, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*[Block(width=shape.width, heads=shape.heads) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, symbols)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.constant_(p, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                # GPT-2's rule: layers that write to the residual stream start smaller, by the number of writers.
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0.0, 0.02 / (2 * shape.layers) ** 0.5 if writes else 0.02, generator=generator)

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
    def continue_text(self, symbols: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """`symbols` ([time]) and `count` more, drawn one by one, at a temperature of 0.6."""
        for _ in range(count):
            logits = self(symbols[None, -self.shape.context :])[0, -1]
            drawn = torch.multinomial((logits / 0.6).softmax(-1), 1, generator=generator)
            symbols = torch.cat([symbols, drawn])
        return symbols


@dataclass(frozen=True, slots=True)
class DemoJob:
    """What to train. `batch_size` is the number of windows that each rank reads per step."""

    size: str
    steps: int
    batch_size: int
    seed: int

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    def model(self) -> Transformer:
        """The same model on every rank."""
        return Transformer(self.shape, len(ALPHABET), torch.Generator().manual_seed(self.seed))
