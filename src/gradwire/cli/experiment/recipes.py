"""Communication hooks by their command-line names, with the settings in which they are compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from gradwire.hooks import (
    CommHook,
    cast,
    chain,
    dgc,
    diloco,
    error_feedback,
    mean,
    power_sgd,
    quantize,
    sign,
    top_k,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to make a hook."""

    name: str
    words: str
    """A short description of the settings."""
    build: Callable[[], CommHook]
    every: int = 1
    """The number of steps after which all replicas are equal again."""

    @property
    def steps_on_its_own(self) -> bool:
        """Whether replicas diverge between exchanges, so that the hook needs the optimizer."""
        return self.every > 1


def _with_feedback(make: Callable[..., CommHook], **settings: Any) -> Callable[[], CommHook]:
    """With error feedback, unless the hook keeps a residual itself."""

    def build() -> CommHook:
        hook = make(**settings)
        return hook if hook.remembers else chain(error_feedback(), hook)

    return build


def _quantize(bits: int) -> Recipe:
    block = 64 if bits == 1 else 256  # one bit has no magnitude, so there are more scales
    words = f"{bits} bit{'s' if bits > 1 else ''} per element, blocks of {block}, error feedback"
    return Recipe(f"quantize{bits}", words, _with_feedback(quantize, bits=bits, block=block))


_PERIOD = 50
_OFTEN = 10
_ALL = (
    Recipe("mean", "dense float32", mean),
    Recipe("bf16", "dense bfloat16", lambda: chain(cast(torch.bfloat16), mean())),
    Recipe("fp16", "dense float16", lambda: chain(cast(torch.float16), mean())),
    *map(_quantize, (8, 4, 2, 1)),
    Recipe("sign", "the sign of each element, error feedback", _with_feedback(sign)),
    Recipe("power_sgd", "rank 4", _with_feedback(power_sgd, rank=4)),
    Recipe("power_sgd16", "rank 16", _with_feedback(power_sgd, rank=16)),
    Recipe(
        "power_sgd_batched",
        "rank 4, the bucket as one matrix",
        _with_feedback(power_sgd, rank=4, batched=True),
    ),
    Recipe("top_k", "the largest 1 %, error feedback", _with_feedback(top_k, ratio=0.01)),
    Recipe("dgc", "the largest 0.1 % after a momentum", _with_feedback(dgc, ratio=0.001)),
    Recipe(
        "diloco",
        f"parameters every {_PERIOD} steps",
        # Nesterov momentum without its gain: in the long run an outer step is as long as the mean of the local ones.
        lambda: diloco(every=_PERIOD, outer_lr=0.7, outer_momentum=0.3),
        every=_PERIOD,
    ),
    Recipe(
        "local4",
        f"parameters' mean every {_OFTEN} steps, changes in 4 bits, error feedback",
        lambda: diloco(every=_OFTEN, outer_lr=1.0, outer_momentum=0.0, hook=_with_feedback(quantize, bits=4)()),
        every=_OFTEN,
    ),
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""All recipes by name."""


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument type: comma-separated names out of `known`, in the given order, without duplicates.

    >>> names_of(["a", "b"])("b, a,b")
    ['b', 'a']
    >>> names_of(["a", "b"])("c")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: unknown name 'c'; known names: a, b
    """

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(item.strip() for item in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; known names: {', '.join(known)}")
        return names

    return parse
