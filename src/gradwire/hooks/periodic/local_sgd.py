"""Local SGD: average the parameters every few steps. See `periodic.base` for the two halves of such a hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_numbers
from gradwire.hooks.base import Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.dense import Mean
from gradwire.hooks.periodic.base import OuterHook, check_every


@dataclass(frozen=True, slots=True)
class LocalSGD(OuterHook):
    """The hook of `local_sgd`."""

    every: int
    outer_collectives = 1

    @property
    def equalizes(self) -> bool:
        """All ranks take the mean."""
        return True

    def due(self, step: int) -> tuple[int, ...]:
        """After every `every`-th step."""
        return () if step % self.every else (0,)

    def after_step(self, parameters: Tensor, state: Any, turn: Turn) -> Reduction:
        """The mean of the parameters."""
        yield all_reduce(parameters, op=ReduceOp.AVG, label=f"parameters {turn.spec.index}")
        return Reduced(parameters, parameters)

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        """2 (n - 1) / n of the parameters."""
        return 2 * (world_size - 1) / world_size * spec.nbytes

    def __repr__(self) -> str:
        return f"local_sgd(every={self.every})"


@checks_numbers
def local_sgd(*, every: int) -> OuterHook:
    """Average the parameters, instead of the gradients, every `every` steps (arXiv 1805.09767).

    Requires `model.attach_optimizer(optimizer)`. No memory. On the wire: 2 (n - 1) / n of the parameters' bytes every `every`
    steps for n ranks. Optimizer states (momentum, Adam's moments) are not averaged.
    """
    check_every("local_sgd", every=every)
    return LocalSGD(every)


@dataclass(frozen=True, slots=True)
class PostLocalSGD(LocalSGD):
    """The hook of `post_local_sgd`."""

    start: int
    collectives = None

    def averages_gradients(self, step: int) -> bool:
        """In the first `start` steps."""
        return step < self.start

    def due(self, step: int) -> tuple[int, ...]:
        """After every `every`-th step from `start` on."""
        return (0,) if step > self.start and (step - self.start) % self.every == 0 else ()

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Average in the first `start` steps; leave the gradient as it is afterwards."""
        if turn.step < self.start:
            return (yield from Mean().reduce(grad, None, turn))
        return Reduced(grad, grad)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """As the mean, and after `start` steps nothing."""
        return Mean().wire_bytes(spec, world_size) if step < self.start else 0.0

    def __repr__(self) -> str:
        return f"post_local_sgd(start={self.start}, every={self.every})"


@checks_numbers
def post_local_sgd(*, start: int, every: int) -> OuterHook:
    """Average the gradients for `start` steps, and from then on the parameters every `every` steps (arXiv 1808.07217).

    Requires `model.attach_optimizer(optimizer)`. No memory. On the wire: as `mean()` for `start` steps, then as `local_sgd`.
    """
    check_every("post_local_sgd", every=every)
    if start < 0:
        raise UsageError(f"post_local_sgd(start={start}): must be at least 0. Pass a number of steps.")
    return PostLocalSGD(every, start)
