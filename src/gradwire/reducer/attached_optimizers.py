"""AttachedOptimizers: calls back after the steps of the optimizers that train a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle


class AttachedOptimizers:
    """The optimizers attached to one model."""

    def __init__(self) -> None:
        self.attached = False
        """Whether the steps of the model's optimizers are reported: by hooks, or by a caller who has promised to."""
        self._handles: list[Handle] = []

    def attach(
        self, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor], stepped: Callable[[], object]
    ) -> None:
        """Call `stepped` after each step of the optimizer; of several, once all have made one.

        Optimizers that were attached before are detached: their steps would count twice.
        """
        ours = {id(p) for p in parameters}
        for optimizer in optimizers:
            _check(optimizer, ours)
        self.detach()
        self.attached = True
        after = _after_all(len(optimizers), stepped)
        self._handles = [Handle(o.register_step_post_hook(after(i)).remove) for i, o in enumerate(optimizers)]

    def detach(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _check(optimizer: Any, parameters: set[int]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(
            f"attach_optimizer({optimizer!r}): not a torch.optim.Optimizer, so it cannot report its steps. Call "
            "attach_optimizer() without it, and outer_step() after every step of it."
        )
    if not any(id(p) in parameters for g in optimizer.param_groups for p in g["params"]):
        raise UsageError(
            f"attach_optimizer({type(optimizer).__name__}): it moves none of the model's parameters. Attach the optimizer "
            "that was made of model.parameters()."
        )


def _after_all(number: int, do: Callable[[], object]) -> Callable[[int], Callable[..., None]]:
    """Hooks for so many optimizers that call `do` whenever every one of them has made a step."""
    stepped: set[int] = set()

    def hook(index: int) -> Callable[..., None]:
        def after_step(*_: Any) -> None:
            stepped.add(index)
            if len(stepped) == number:
                stepped.clear()
                do()

        return after_step

    return hook
