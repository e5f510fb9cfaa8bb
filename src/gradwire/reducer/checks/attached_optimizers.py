"""AttachedOptimizers: a callback after the steps of the optimizers that train a model, and steps that the device skips.

Note [Steps that the device skips]
torch's fused optimizers take a flag on the device, `found_inf`, and change nothing if it is 1: `torch.amp.GradScaler` sets it. So
the host need not know whether a step is to be skipped when it enqueues it. With a GradScaler, either flag skips the step.

The flag is for the next step of each attached optimizer. Other steps before the next backward may use the same gradients: a second
one of the same optimizer, or one of an optimizer that is not attached. There the host waits for the flag, and sets bad gradients to
None, unless they are finite because they come from a later backward. It also waits for an optimizer that is not fused any more, and
for fused SGD that has yet to allocate momentum. A step in a CUDA graph is left alone: hooks do not run when it is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.autograd.optimizer_steps import Arguments, before_optimizer_steps
from gradwire.collectives.finite import is_finite
from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.runtime.dynamo import untraced_call
from gradwire.runtime.threads import weakly

_CANNOT_REPORT = (
    "Another object does not report its steps: for a hook with outer steps, call attach_optimizer() without it, and outer_step() "
    "after every step of it; without such a hook, nothing need be attached."
)


class AttachedOptimizers:
    """The optimizers attached to one model."""

    def __init__(self) -> None:
        self.attached = False
        """Whether the steps of the model's optimizers are reported: by hooks, or by a caller who has promised to."""
        self.skip_if: Tensor | None = None
        """A flag on the device: if it is 1, the gradients of the last backward are bad."""
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._number = 0
        """Of the attached optimizers, with those that have been freed."""
        self.stepped: set[int] = set()
        """Which of them have stepped since `skip_if` was set; cleared where other ranks may have made no step."""
        self._round: set[int] = set()
        """Which of them have stepped since the last call of `_on_step`."""
        self._on_step: Callable[[], object] = lambda: None
        self._handles: list[RemovableHandle] = []
        self._others: Handle | None = None
        """Of the hook on optimizers that are not attached."""
        self._parameters: dict[int, Tensor] = {}
        self._all_parameters = False

    def attach(
        self, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor], stepped: Callable[[], object]
    ) -> None:
        """Call `stepped` after each step of the optimizer; of several, once all have made one. Optimizers that were attached before
        are detached: their steps would count twice."""
        ours = {id(p): p for p in parameters}
        for optimizer in optimizers:
            name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else repr(optimizer)
            check_optimizer(f"attach_optimizer({name})", optimizer, ours.values(), without=_CANNOT_REPORT)
        optimizers = list(dict.fromkeys(optimizers))
        used = self.skip_if is not None and self._all_stepped
        self._remove()
        self.attached = True
        self._parameters = ours
        self._all_parameters = ours.keys() <= {id(p) for optimizer in optimizers for p in _parameters(optimizer)}
        self._number = len(optimizers)
        self.stepped = set(range(self._number)) if used else set()
        self._on_step = stepped
        for index, optimizer in enumerate(optimizers):
            self._optimizers[optimizer] = index
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Remove the hooks on the optimizers. A step that they were to skip is made without gradients."""
        self._drop_bad_gradients(self._parameters.values())
        self.skip_if = None
        self._remove()
        if self._others is not None:
            self._others.remove()
            self._others = None

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for optimizer in list(self._optimizers):
            FoundInfOverride.restore(optimizer, self)
        self._handles, self._optimizers, self._number = [], weakref.WeakKeyDictionary(), 0
        self._all_parameters = False
        self.stepped, self._round = set(), set()

    @property
    def _all_stepped(self) -> bool:
        return bool(self._number) and len(self.stepped) == self._number

    def can_skip(self) -> bool:
        """Whether attached optimizers that take a flag on the device train all parameters, and all have stepped since the last."""
        fused = len(self._optimizers) == self._number and all(map(can_skip_step, list(self._optimizers)))
        return self._all_parameters and fused and self._all_stepped

    def skip_next(self, where: Tensor) -> None:
        """Have the next step change nothing if this flag on the device is 1. Only if `can_skip`."""
        self.skip_if = where
        self.stepped.clear()
        if self._others is None:
            self._others = before_optimizer_steps(weakly(self._before_any))
            weakref.finalize(self, self._others.remove)

    def _drop_bad_gradients(self, parameters: Iterable[Tensor], *, again: bool = False) -> None:
        """If the flag is 1, set the gradients of these parameters to None, unless they may come from a later backward, as all
        optimizers have stepped or this one steps `again`, and all are finite. Waits for the device."""
        if self.skip_if is None or _is_captured(self.skip_if) or not bool(self.skip_if):
            return
        gradients = (p.grad for p in self._parameters.values() if p.grad is not None)
        if (again or self._all_stepped) and all(map(is_finite, gradients)):
            return
        for p in parameters:
            p.grad = None

    def _before_any(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
        """Before a step of any optimizer: one that is not attached may train our parameters."""
        if optimizer in self._optimizers:
            return None
        ours = [p for p in _parameters(optimizer) if id(p) in self._parameters]
        return _after_closure(args, kwargs, lambda: self._drop_bad_gradients(ours)) if ours else None

    @untraced_call
    def _before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
        """Before a step of an attached optimizer. If it has a closure, the backward in it is the one that is checked."""
        FoundInfOverride.restore(optimizer, self)  # if the last step has raised
        return _after_closure(args, kwargs, lambda: self._skip_if_bad(optimizer))

    def _skip_if_bad(self, optimizer: Optimizer) -> None:
        flag = self.skip_if
        if flag is None or _is_captured(flag):
            return
        if self._optimizers.get(optimizer) in self.stepped:
            self._drop_bad_gradients(_parameters(optimizer), again=True)
        elif can_skip_step(optimizer) and not allocates_momentum(optimizer):
            FoundInfOverride.add(optimizer, self, flag)
        else:
            self._drop_bad_gradients(_parameters(optimizer))

    @untraced_call
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        FoundInfOverride.restore(optimizer, self)
        index = self._optimizers.get(optimizer)
        if index is None:
            return  # it was detached in its own closure
        self.stepped.add(index)
        self._round.add(index)
        if len(self._round) == self._number:
            self._round.clear()
            self._on_step()


def _after_closure(args: Any, kwargs: dict[str, Any], do: Callable[[], None]) -> Arguments | None:
    """Call `do` now, or, if a step has these arguments with a closure, after it: returns those to step with then."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        do()
        return None

    def both() -> Any:
        loss = closure()
        do()
        return loss

    return ((args[0], both, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": both})


class FoundInfOverride:
    """An optimizer's `found_inf` during a step, set for one or several models, and the value before: a GradScaler's."""

    of: ClassVar[weakref.WeakKeyDictionary[Optimizer, FoundInfOverride]] = weakref.WeakKeyDictionary()

    def __init__(self, before: Any) -> None:
        self._before = before
        self._users: set[object] = set()
        self._now: Tensor | None = None

    @classmethod
    def add(cls, optimizer: Any, user: object, flag: Tensor) -> None:
        """Have the optimizer skip its step if `flag` is 1, too."""
        now = getattr(optimizer, "found_inf", None)
        override = cls.of.setdefault(optimizer, cls(now))
        override._users.add(user)
        # A GradScaler adds up those of several devices, from the number 0, and optimizers compare with 1.
        other = now.to(flag) if isinstance(now, Tensor) else now or 0
        optimizer.found_inf = override._now = flag if now is None else ((flag + other) > 0).to(flag)

    @classmethod
    def restore(cls, optimizer: Any, user: object) -> None:
        """End the override of `user`. The last one restores the value before, unless it was replaced meanwhile."""
        override = cls.of.get(optimizer)
        if override is None or user not in override._users:
            return
        override._users.remove(user)
        if override._users:
            return
        del cls.of[optimizer]
        if getattr(optimizer, "found_inf", None) is override._now:
            del optimizer.found_inf
            if override._before is not None:
                optimizer.found_inf = override._before


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_captured(flag: Tensor) -> bool:
    return flag.is_cuda and torch.cuda.is_current_stream_capturing()


def allocates_momentum(optimizer: Optimizer) -> bool:
    """Whether SGD has yet to allocate momentum of a parameter."""
    return any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("momentum")
        for p in group["params"]
    )


def can_skip_step(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own fused optimizers: another `step` may ignore `found_inf`."""
    supports: bool = getattr(optimizer, "_step_supports_amp_scaling", False)
    of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    return supports and of_torch and all(group.get("fused") for group in optimizer.param_groups)


def check_optimizer(call: str, optimizer: Any, parameters: Iterable[Tensor], *, without: str) -> None:
    """Refuse what is not an optimizer of some of these parameters. `without`: what can be done without one."""
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(f"{call}: not a torch.optim.Optimizer. {without}")
    ours = {id(p) for p in parameters}
    if not any(id(p) in ours for p in _parameters(optimizer)):
        raise UsageError(
            f"{call}: it moves none of the model's parameters. Pass the optimizer that was made of model.parameters()."
        )
