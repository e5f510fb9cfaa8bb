"""`OuterHook`: hooks that communicate every few steps, and then parameters instead of gradients.

Gradients stay on their rank, and each rank's optimizer updates its own parameters. The outer step, after the optimizer's, makes the
ranks one model again. `after_step`, a generator of collectives like `reduce`, combines this rank's parameters with those of the
others; `settle` computes the new parameters from the result, possibly some steps later (`delay`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks, refuse_traits
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec


class OuterHook(CommHook):
    """A hook with outer steps. Its states are those of the outer steps: one per bucket of parameters."""

    traits = Trait.LOCAL
    collectives: int | None = 0

    if TYPE_CHECKING:

        @property
        def outer_collectives(self) -> int | None:
            """How many collectives `after_step` yields for a bucket, if that is always the same number."""

        @property
        def equalizes(self) -> bool:
            """Whether all ranks hold the same parameters after an outer step of all fragments at once."""
    else:
        outer_collectives = None
        equalizes = False

    every: int
    """The number of optimizer steps from one outer step to the next, for `due`."""
    fragments: int = 1
    """Into how many parts the parameters are split; each has its outer steps at a different time."""
    delay: int = 0
    """How many optimizer steps after `after_step` the result is applied by `settle`."""

    def averages_gradients(self, step: int) -> bool:
        """Whether the gradients of this step, counted from 0, are averaged, so that equal replicas stay equal."""
        return False

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Leave the gradient as it is. `turn.step` counts the optimizer's steps here; there is no state."""
        return Reduced(grad, grad)
        yield

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that have an outer step after the optimizer's step of this number, counted from 1: evenly spread."""
        return tuple(f for f in range(self.fragments) if (step - f * self.every // self.fragments) % self.every == 0)

    def begin(self, parameters: Tensor, state: Any, turn: Turn) -> None:
        """Record what later outer steps need of the parameters: before the first step, and after a state was loaded."""
        return

    @abstractmethod
    def after_step(self, parameters: Tensor, state: Any, turn: Turn) -> Reduction:
        """Communicate. `parameters` is flat, and a copy that may be overwritten; `turn.step` counts this bucket's outer steps."""

    def settle(self, parameters: Tensor, value: Tensor, state: Any, turn: Turn) -> Tensor:
        """The new parameters, from the current ones and the value that `after_step` returned."""
        return value

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 0.0

    @property
    def structure(self) -> str:
        """The class: the count of optimizer steps, at least, is state."""
        return type(self).__qualname__

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        """The bytes that a rank sends in an outer step for a bucket of parameters, as `wire_bytes`; None if unknown."""
        return None


def check_outer(hook: CommHook, doing: str) -> None:
    """Refuse a hook that leaves gradients on their rank and has no outer steps."""
    check_hooks(doing, hook=hook)
    if hook.local and not isinstance(hook, OuterHook):
        raise UsageError(
            f"{doing}({hook!r}): it leaves gradients on their rank and nothing would ever average the parameters. Use a hook such "
            "as local_sgd() alone, with nothing around it; give stages to the inner hook: diloco(hook=chain(...))."
        )
    anchored = "it compares a rank's progress with the parameters, and gradients are no progress. Use diloco(hook=...) with it."
    refuse_traits(f"{doing}({hook!r})", hook, {Trait.ANCHORED: anchored})
