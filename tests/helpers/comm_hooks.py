"""Hooks whose reduction is a function of the test."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwire.hooks import BucketSpec, CommHook, Reduction, Turn, mean


class Scripted(CommHook):
    """Reduces by `script(grad, state, turn)`, whose name it has; `collectives` is what it declares."""

    collectives: int | None

    def __init__(self, script: Callable[..., Reduction], collectives: int | None = None) -> None:
        self._script, self.collectives = script, collectives

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return self._script(grad, state, turn)

    def __repr__(self) -> str:
        return f"{self._script.__name__}()"


class CountsSteps(CommHook):
    """The mean, with a number per parameter that counts its steps."""

    collectives: int | None = 1

    def init(self, spec: BucketSpec) -> dict[str, int]:
        return dict.fromkeys(spec.names, 0)

    def reduce(self, grad: Tensor, state: dict[str, int], turn: Turn) -> Reduction:
        for name in state:
            state[name] += 1
        return (yield from mean().reduce(grad, None, turn))

    def save(self, state: dict[str, int], spec: BucketSpec) -> dict[str, Any]:
        return dict(state)

    def load(self, saved: Any, spec: BucketSpec) -> dict[str, int]:
        return {name: int(saved.get(name, 0)) for name in spec.names}
