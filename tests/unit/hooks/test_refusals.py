"""Invalid combinations are refused when they are built: all of them in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks import (
    CommHook,
    Reduced,
    Reduction,
    Trait,
    Turn,
    after,
    by_size,
    cast,
    chain,
    error_feedback,
    every,
    hierarchical,
    masked,
    mean,
    partition,
    weighted_mean,
)

HALF = chain(cast(torch.bfloat16), mean())
FED = chain(error_feedback(), HALF)


class Local(CommHook):
    """Leaves gradients on their rank."""

    traits = Trait.LOCAL

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return Reduced(grad, grad)
        yield

    def __repr__(self) -> str:
        return "local()"


LOCAL = Local()

REFUSED: dict[str, tuple[Callable[[], CommHook], str]] = {
    "what is kept would be kept in a narrow dtype": (lambda: chain(cast(torch.bfloat16), FED), "Put error_feedback"),
    "what is owed would be sent twice": (lambda: chain(error_feedback(), FED), "sent twice"),
    "owed twice, through a partition": (
        lambda: chain(error_feedback(), partition({"a": FED, "*": mean()})),
        "sent twice",
    ),
    "owed twice, through every": (lambda: chain(error_feedback(), every(2, mean())), "sent twice"),
    "owed twice, through hierarchical": (lambda: chain(error_feedback(), hierarchical(across=FED)), "sent twice"),
    "owed twice, later": (lambda: chain(error_feedback(), after(5, FED)), "sent twice"),
    "kept in a narrow dtype, through every": (
        lambda: chain(cast(torch.bfloat16), every(2, mean())),
        "would be kept in",
    ),
    "there is no error to feed back": (lambda: chain(error_feedback(), LOCAL), "no error to feed back"),
    "part of the model local": (lambda: partition({"a": LOCAL, "*": mean()}), "for all parameters or for none"),
    "masked parameters local": (lambda: masked("a", LOCAL), "for all parameters or for none"),
    "large parameters local": (lambda: by_size(numel=5, large=LOCAL), "for all parameters or for none"),
    "from local to shared": (lambda: after(5, mean(), before=LOCAL), "never be equal again"),
    "local in some steps": (lambda: every(5, mean(), otherwise=LOCAL), "does not make them equal again"),
    "shared in some steps": (lambda: every(5, LOCAL, otherwise=mean()), "does not make them equal again"),
    "local in the host": (lambda: hierarchical(inside=LOCAL, across=mean()), "leaves gradients on their rank"),
    "local between hosts": (lambda: hierarchical(across=LOCAL), "leaves gradients on their rank"),
    "what the earlier hook owes is lost": (lambda: after(5, mean(), before=FED), "would never be sent"),
    "what every has kept is lost": (lambda: after(5, mean(), before=every(2, mean())), "would never be sent"),
    "one weight for several steps": (lambda: every(2, weighted_mean()), "each step has its own weight"),
    "one weight for several steps, in a chain": (
        lambda: every(2, partition({"a": chain(cast(torch.bfloat16), weighted_mean()), "*": mean()})),
        "each step has its own weight",
    ),
    "weights fed back as errors": (
        lambda: chain(error_feedback(), cast(torch.bfloat16), weighted_mean()),
        "by its share of all samples",
    ),
    "weights fed back, through a partition": (
        lambda: chain(error_feedback(), partition({"a": weighted_mean(), "*": mean()})),
        "multiply each rank's loss by its share",
    ),
    "weights within hosts": (lambda: hierarchical(inside=weighted_mean(), across=mean()), "not the weighted mean"),
    "weights between hosts": (lambda: hierarchical(across=after(3, weighted_mean())), "not the weighted mean"),
    "before the first step": (lambda: after(-1, mean()), "a negative step"),
    "no such step": (lambda: every(0, mean()), "there is no such step"),
    "a stage for a hook, after": (lambda: after(1, cast(torch.bfloat16)), "is a stage"),  # type: ignore[arg-type]
    "a stage for a hook, every": (lambda: every(2, mean(), otherwise=3), "`otherwise` must be a CommHook, got 3"),  # type: ignore[arg-type]
    "a stage for a hook, hierarchical": (lambda: hierarchical(across=None), "`across` must be a CommHook, got None"),  # type: ignore[arg-type]
    "a stage for a hook, masked": (lambda: masked("a", error_feedback()), "is a stage"),  # type: ignore[arg-type]
    "a stage for a hook, by_size": (lambda: by_size(numel=1, large=3), "`large` must be a CommHook, got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_when_built(build: Callable[[], CommHook], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


ALLOWED: dict[str, Callable[[], CommHook]] = {
    "error feedback around all kinds": lambda: chain(
        error_feedback(), after(5, partition({"a": HALF, "*": mean()}), before=HALF)
    ),
    "error feedback in a partition": lambda: partition({"a": FED, "*": mean()}),
    "local from some step on": lambda: after(100, LOCAL),
    "local everywhere": lambda: partition({"a": LOCAL, "*": LOCAL}),
    "error feedback between hosts": lambda: hierarchical(inside=HALF, across=FED),
    "weights in some steps": lambda: every(2, weighted_mean(), otherwise=mean()),
}


@pytest.mark.parametrize("build", ALLOWED.values(), ids=ALLOWED)
def test_valid_combinations_are_built(build: Callable[[], CommHook]) -> None:
    assert isinstance(build(), CommHook)
