"""`OuterHook`: hooks that communicate less often than every step, and then parameters instead of gradients.

Gradients stay on their rank, and each rank's optimizer moves its own parameters. What makes the ranks one model again is the
outer half: it runs after the optimizer's step, because parameters must not be written during backward.

Note [Two halves of an outer step]
`after_step` is a generator of collectives like `reduce`: it makes of this rank's parameters what all ranks think of them.
`settle` communicates nothing: it makes the new parameters of that. They are apart so that the second may come some steps later
(`delay`), while the bytes of the first are on their way.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec


class OuterHook(CommHook):
    """A hook with an outer half. Its states are those of the outer half: one per bucket of parameters."""

    traits = Trait.LOCAL
    collectives: int | None = 0
    outer_collectives: int | None = None
    """How many collectives `after_step` yields for a bucket, where that is always the same number."""
    fragments: int = 1
    """Into how many parts the parameters are cut, which have their outer steps at different times."""
    delay: int = 0
    """How many of the optimizer's steps after `after_step` comes `settle`."""

    @property
    def equalizes(self) -> bool:
        """Whether all ranks hold the same parameters after an outer step of all fragments at once."""
        return False

    def averages_gradients(self, step: int) -> bool:
        """Whether the gradients of this step, counted from 0, are averaged, so that equal replicas stay equal."""
        return False

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """The gradient stays as it is. `turn.step` counts the optimizer's steps here; there is no state."""
        return Reduced(grad, grad)
        yield

    @abstractmethod
    def due(self, step: int) -> tuple[int, ...]:
        """The fragments for which an outer step follows the optimizer's step of this number, counted from 1."""

    def begin(self, parameters: Tensor, state: Any, turn: Turn) -> None:
        """Before the first step, and after a state was loaded: note what the outer half must know of the parameters."""
        return

    @abstractmethod
    def after_step(self, parameters: Tensor, state: Any, turn: Turn) -> Reduction:
        """Communicate. `parameters` are flat, and a copy that may be overwritten; `turn.step` counts this bucket's outer steps."""

    def settle(self, parameters: Tensor, came: Tensor, state: Any, turn: Turn) -> Tensor:
        """The new parameters, from those of now and the value that `after_step` returned."""
        return came

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """Nothing is sent for a gradient."""
        return 0.0

    @property
    def structure(self) -> str:
        """By class: the count of optimizer steps, at least, is state."""
        return type(self).__qualname__

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        """What a rank sends in an outer step for a bucket of parameters, as `wire_bytes` counts; None where that is not known."""
        return None


def check_outer(hook: CommHook, doing: str) -> None:
    """Refuse a hook that leaves gradients on their rank and has no outer half that anybody would run."""
    check_hooks(doing, hook=hook)
    if hook.local and not isinstance(hook, OuterHook):
        raise UsageError(
            f"{doing}({hook!r}): gradients stay on their rank there and nothing would ever average the parameters. A hook such as "
            "local_sgd() goes alone, with nothing around it; give stages to the hook inside: diloco(hook=chain(...))."
        )


def check_every(name: str, **counts: int) -> None:
    """Raise unless all of them are whole numbers of at least 1."""
    for key, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"{name}({key}={count!r}): not a whole number of at least 1. Pass a number of steps.")
