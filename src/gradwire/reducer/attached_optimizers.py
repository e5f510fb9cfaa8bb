"""AttachedOptimizers: calls back after the steps of the optimizers that train a model, and has them skip steps on the device.

Note [Steps that the device skips]
torch's fused optimizers take a number on the device, `found_inf`, and change nothing where it is 1: `torch.amp.GradScaler`
gives them its own. So the host need not know whether a step is to be skipped when it enqueues it. If a GradScaler has set one,
the step is skipped if either is 1. `can_skip` is False until the optimizers have made a step after the last that they were to
skip: otherwise another one, which is not attached, may be training the model. Also, fused SGD leaves its momentum uninitialized
if its first step is skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle


class AttachedOptimizers:
    """The optimizers attached to one model."""

    def __init__(self) -> None:
        self.attached = False
        """Whether the steps of the model's optimizers are reported: by hooks, or by a caller who has promised to."""
        self.skip_if: Tensor | None = None
        """A number on the device: where it is 1, the optimizers change nothing in their steps."""
        self._handles: list[Handle] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._all_parameters = False
        self._stepped = False

    def skip_next(self, where: Tensor) -> None:
        """Have the next step change nothing if this number on the device is 1. Only if `can_skip`."""
        self.skip_if, self._stepped = where, False

    def forget_steps(self) -> None:
        """Other ranks may have made no step: `can_skip` is False until the next one."""
        self._stepped = False

    def can_skip(self) -> bool:
        """Whether optimizers that train all parameters and take `skip_if` are attached, and have stepped since the last
        `skip_next`. See Note [Steps that the device skips]."""
        optimizers = [one() for one in self._optimizers]
        return self._all_parameters and self._stepped and all(one is not None and _can_skip(one) for one in optimizers)

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
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._all_parameters = ours <= {id(p) for optimizer in optimizers for p in _parameters(optimizer)}

        def all_stepped() -> None:
            self._stepped = True
            stepped()

        after = _after_all(len(optimizers), all_stepped)
        for index, optimizer in enumerate(optimizers):
            skipping = _Skipping(self, then=after(index))
            before = optimizer.register_step_pre_hook(skipping.before_step)
            self._handles += [
                Handle(before.remove),
                Handle(optimizer.register_step_post_hook(skipping.after_step).remove),
            ]

    def detach(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers, self.skip_if = [], [], None
        self._all_parameters = self._stepped = False


class _Skipping:
    """Has one optimizer skip its step where `skip_if` is 1, and calls `then` after each step."""

    def __init__(self, attached: AttachedOptimizers, *, then: Callable[[], None]) -> None:
        self._attached = attached
        self._then = then
        self._others: Tensor | None = None
        """During a step: what the optimizer had, of a GradScaler or of another model that it trains."""
        self._set: Tensor | None = None

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        others = getattr(optimizer, "found_inf", None)
        if self._set is not None and others is self._set:  # the last step has raised
            others = None
            del optimizer.found_inf
        self._others, self._set = others, None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._skip(optimizer)
            return None

        def with_flag() -> Any:
            loss = closure()  # whose backward is the one that is checked
            self._skip(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], with_flag, *args[2:]), kwargs
        return args, {**kwargs, "closure": with_flag}

    def _skip(self, optimizer: Any) -> None:
        ours, others = self._attached.skip_if, self._others
        if ours is None or (ours.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if not _can_skip(optimizer) or _begins(optimizer):
            if bool(ours):  # waits for the device
                for parameter in _parameters(optimizer):
                    parameter.grad = None
            return
        # A GradScaler adds up those of several devices, and optimizers compare with 1.
        self._set = ours if others is None else ((ours + others.to(ours)) > 0).to(ours)
        optimizer.found_inf = self._set

    def after_step(self, optimizer: Any, *_: Any) -> None:
        if self._set is not None and hasattr(optimizer, "found_inf"):  # another model may have taken it off
            if self._others is None:
                del optimizer.found_inf
            else:
                optimizer.found_inf = self._others
        self._others = self._set = None
        self._then()


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _begins(optimizer: Optimizer) -> bool:
    """Whether SGD has yet to allocate momentum of a parameter, which would stay uninitialized in a step that the device skips."""
    return any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
    )


def _can_skip(optimizer: Optimizer) -> bool:
    """Not if somebody has written another `step`, which may do without `found_inf`."""
    supports: bool = getattr(optimizer, "_step_supports_amp_scaling", False)
    of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    return supports and of_torch and all(group.get("fused") for group in optimizer.param_groups)


def _check(optimizer: Any, parameters: set[int]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(
            f"attach_optimizer({optimizer!r}): not a torch.optim.Optimizer, so it cannot report its steps. Call "
            "attach_optimizer() without it, and outer_step() after every step of it."
        )
    if not any(id(p) in parameters for p in _parameters(optimizer)):
        raise UsageError(
            f"attach_optimizer({type(optimizer).__name__}): it moves none of the model's parameters. Attach the optimizer "
            "that was made of model.parameters()."
        )


def _after_all(number: int, do: Callable[[], object]) -> Callable[[int], Callable[[], None]]:
    """Functions for so many optimizers that call `do` whenever every one of them has made a step."""
    stepped: set[int] = set()

    def of(index: int) -> Callable[[], None]:
        def after_step() -> None:
            stepped.add(index)
            if len(stepped) == number:
                stepped.clear()
                do()

        return after_step

    return of
