"""The demo's text: the source code of the Python standard library, which every machine has, as symbol ids.

Modules are read in the order of their names and every tenth is held out, so every rank of every run on one Python version
sees the same two texts. This module is independent of models, ranks and groups.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
    """The text of symbol ids."""
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
    starts = torch.randint(len(text) - length + 1, (count,), generator=generator)
    return _windows(text, starts, length)


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """`count` windows of `length` characters spread evenly over the text."""
    starts = torch.arange(count) * ((len(text) - length) // max(1, count - 1))
    return _windows(text, starts, length)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()
