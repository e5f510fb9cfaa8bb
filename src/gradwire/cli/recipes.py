"""Communication hooks under the names by which commands know them, with the settings in which they are compared.

A recipe looks its hooks up in `gradwire.hooks` when it is made, so this table knows only names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from gradwire import hooks
from gradwire.hooks import CommHook, cast, chain, error_feedback, mean


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to make a hook. `needs` names what `gradwire.hooks` must have for it."""

    name: str
    words: str
    """The settings, in a few words."""
    build: Callable[[], CommHook]
    needs: str | None = None
    every: int = 1
    """After how many steps all replicas are equal again."""

    @property
    def here(self) -> bool:
        """Whether this version of gradwire can make it."""
        return self.needs is None or hasattr(hooks, self.needs)

    @property
    def steps_on_its_own(self) -> bool:
        """Whether replicas go apart between exchanges, so that the hook wants to know the optimizer."""
        return self.every > 1


def _hook(name: str, **settings: Any) -> CommHook:
    hook: CommHook = getattr(hooks, name)(**settings)
    return hook


def _fed_back(name: str, **settings: Any) -> Callable[[], CommHook]:
    """With error feedback, unless the hook keeps what it did not send by itself."""

    def build() -> CommHook:
        hook = _hook(name, **settings)
        return hook if hook.remembers else chain(error_feedback(), hook)

    return build


def _quantize(bits: int) -> Recipe:
    block = 64 if bits == 1 else 256  # one bit tells nothing of size, so scales are closer together
    words = f"{bits} bit{'s' if bits > 1 else ''} an element, blocks of {block}, error feedback"
    return Recipe(f"quantize{bits}", words, _fed_back("quantize", bits=bits, block=block), needs="quantize")


_PERIOD = 50
_OFTEN = 10
_ALL = (
    Recipe("mean", "dense float32", mean),
    Recipe("bf16", "dense bfloat16", lambda: chain(cast(torch.bfloat16), mean())),
    Recipe("fp16", "dense float16", lambda: chain(cast(torch.float16), mean())),
    *map(_quantize, (8, 4, 2, 1)),
    Recipe("sign", "the sign of each element, error feedback", _fed_back("sign"), needs="sign"),
    Recipe("power_sgd", "rank 4", _fed_back("power_sgd", rank=4), needs="power_sgd"),
    Recipe("power_sgd16", "rank 16", _fed_back("power_sgd", rank=16), needs="power_sgd"),
    Recipe(
        "power_sgd_batched",
        "rank 4, the bucket as one matrix",
        _fed_back("power_sgd", rank=4, batched=True),
        needs="power_sgd",
    ),
    Recipe("top_k", "the largest 1 %, error feedback", _fed_back("top_k", ratio=0.01), needs="top_k"),
    Recipe("dgc", "the largest 0.1 % after a momentum", _fed_back("dgc", ratio=0.001), needs="dgc"),
    Recipe(
        "diloco",
        f"parameters every {_PERIOD} steps",
        # Nesterov's momentum without its gain: in the long run an outer step is as long as the mean of the local ones.
        lambda: _hook("diloco", every=_PERIOD, outer_lr=0.7, outer_momentum=0.3),
        needs="diloco",
        every=_PERIOD,
    ),
    Recipe(
        "local4",
        f"parameters' mean every {_OFTEN} steps, moves in 4 bits, error feedback",
        lambda: _hook("diloco", every=_OFTEN, outer_lr=1.0, outer_momentum=0.0, hook=_fed_back("quantize", bits=4)()),
        needs="diloco",
        every=_OFTEN,
    ),
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""All recipes by name."""


def available(names: Sequence[str] = tuple(RECIPES)) -> tuple[str, ...]:
    """Those of `names` that can be made here, in their order."""
    return tuple(name for name in names if RECIPES[name].here)


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of argument: some of `known`, with commas between them, in the order given and each once.

    >>> names_of(["a", "b"])("b, a,b")
    ['b', 'a']
    >>> names_of(["a", "b"])("c")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: there is no 'c'; known are a, b
    """

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(item.strip() for item in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; known are {', '.join(known)}")
        return names

    return parse
