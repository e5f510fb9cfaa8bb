"""AttachedOptimizers: calls back after the steps of the optimizers that train a model, and has them skip steps on the device.

Note [Steps that the device skips]
torch's fused optimizers take a flag on the device, `found_inf`, and change nothing if it is 1: `torch.amp.GradScaler` gives them
its own. So the host need not know whether a step is to be skipped when it enqueues it. If a GradScaler has set one, the step
is skipped if either is 1.

The flag is for the next step of each attached optimizer. Until the next backward of the model, others may use the same
gradients: an optimizer that steps twice, or one that is not attached but trains our parameters. There the host waits for the
flag, and sets bad gradients to None; it looks at them, because they may come from a later backward. The host also waits for an
optimizer that is not fused any more, and for fused SGD that has yet to allocate momentum, which would stay uninitialized.

A step that is captured in a CUDA graph is left alone: when it is replayed, no hooks run, so the optimizers have not stepped for
`can_skip`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.autograd.optimizer_steps import Arguments, before_optimizer_steps
from gradwire.collectives.finite import is_finite
from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.runtime.dynamo import untraced_call

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
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Skipping] = weakref.WeakKeyDictionary()
        self._number = 0
        """Of the attached optimizers, with those that are gone."""
        self._stepped: set[int] = set()
        """Which of them have stepped since `skip_if` was set or `forget_steps` called."""
        self._handles: list[Handle] = []
        self._others: Handle | None = None
        """Of the hook on optimizers that are not attached."""
        self._parameters: dict[int, Tensor] = {}
        """By id."""
        self._all_parameters = False

    def attach(
        self, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor], stepped: Callable[[], object]
    ) -> None:
        """Call `stepped` after each step of the optimizer; of several, once all have made one.

        Optimizers that were attached before are detached: their steps would count twice.
        """
        ours = {id(p): p for p in parameters}
        for optimizer in optimizers:
            name = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else repr(optimizer)
            check_optimizer(f"attach_optimizer({name})", optimizer, ours.values(), without=_CANNOT_REPORT)
        used = self.skip_if is not None and self.all_stepped
        self._remove()
        self.attached = True
        self._parameters = ours
        self._all_parameters = ours.keys() <= {id(p) for optimizer in optimizers for p in _parameters(optimizer)}
        self._number = len(optimizers)
        self._stepped = set(range(self._number)) if used else set()
        after = _after_all(len(optimizers), stepped)
        for index, optimizer in enumerate(optimizers):
            skipping = _Skipping(self, index, then=after(index))
            self._optimizers[optimizer] = skipping
            before = optimizer.register_step_pre_hook(skipping.before_step)
            self._handles += [
                Handle(before.remove),
                Handle(optimizer.register_step_post_hook(skipping.after_step).remove),
            ]

    def detach(self) -> None:
        """Take the hooks off the optimizers. If they have a step to skip, they will make it without gradients.

        Their hooks cannot stay for that step and go then: torch iterates over them, as Note [One hook for all] has it.
        """
        self.drop_bad_gradients(self._parameters.values())
        self.clear_flag()
        self._remove()
        if self._others is not None:
            self._others.remove()
            self._others = None

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for optimizer, skipping in list(self._optimizers.items()):
            _Borrowed.give_back(optimizer, skipping)
        self._handles, self._optimizers, self._number = [], weakref.WeakKeyDictionary(), 0
        self._all_parameters = False
        self._stepped = set()

    # -- steps that the device skips -------------------------------------------------------------------------------------

    @property
    def all_stepped(self) -> bool:
        """Whether every attached optimizer has stepped since `skip_next` or `forget_steps`."""
        return bool(self._number) and len(self._stepped) == self._number

    @property
    def gradients_used(self) -> bool:
        """Whether no optimizer has yet to use the gradients of the last backward, as far as it is known."""
        return self.skip_if is None or self.all_stepped

    def can_skip(self) -> bool:
        """Whether optimizers that train all parameters and take a flag on the device are attached, and all have stepped since
        the last flag: if not, somebody else may use the gradients."""
        fused = len(self._optimizers) == self._number and all(map(_can_skip, list(self._optimizers)))
        return self._all_parameters and fused and self.all_stepped

    def skip_next(self, where: Tensor) -> None:
        """Have the next step change nothing if this flag on the device is 1. Only if `can_skip`."""
        self.skip_if = where
        self._stepped.clear()
        if self._others is None:
            self._others = _on_all_optimizers(self)

    def clear_flag(self) -> None:
        """Have the next step made whatever the last flag was."""
        self.skip_if = None

    def forget_steps(self) -> None:
        """Other ranks may have made none: `can_skip` is False until all have stepped again."""
        self._stepped.clear()

    def drop_bad_gradients(self, parameters: Iterable[Tensor], *, again: bool = False) -> None:
        """If the flag is 1, set the gradients of these parameters to None. Waits for the device.

        Unless they may come from a later backward, as all optimizers have stepped or this one steps `again`, and all are finite.
        """
        if self.skip_if is None or _is_captured(self.skip_if) or not bool(self.skip_if):
            return
        gradients = (p.grad for p in self._parameters.values() if p.grad is not None)
        if (again or self.all_stepped) and all(map(is_finite, gradients)):
            return
        for p in parameters:
            p.grad = None

    def before_other(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
        """Before a step of any optimizer: one that is not attached may train our parameters."""
        if optimizer in self._optimizers:
            return None
        ours = [p for p in _parameters(optimizer) if id(p) in self._parameters]
        return _after_closure(args, kwargs, lambda: self.drop_bad_gradients(ours)) if ours else None

    def before_attached(self, optimizer: Optimizer, skipping: _Skipping) -> None:
        """Before the step of an attached optimizer, and after the backward in its closure."""
        flag = self.skip_if
        if flag is None or _is_captured(flag):
            return
        if skipping.index in self._stepped:
            self.drop_bad_gradients(_parameters(optimizer), again=True)
        elif _can_skip(optimizer) and not _begins(optimizer):
            _Borrowed.add(optimizer, skipping, flag)
        else:
            self.drop_bad_gradients(_parameters(optimizer))

    def after_attached(self, skipping: _Skipping) -> None:
        """After its step."""
        self._stepped.add(skipping.index)


class _Skipping:
    """The hooks on one attached optimizer. Calls `then` after each step."""

    def __init__(self, attached: AttachedOptimizers, index: int, *, then: Callable[[], None]) -> None:
        self._attached = attached
        self.index = index
        self._then = then

    @untraced_call
    def before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
        """Returns the arguments with another closure, if there is one: its backward is the one that is checked."""
        _Borrowed.give_back(optimizer, self)  # if the last step has raised
        return _after_closure(args, kwargs, lambda: self._attached.before_attached(optimizer, self))

    @untraced_call
    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Give `found_inf` back."""
        _Borrowed.give_back(optimizer, self)
        self._attached.after_attached(self)
        self._then()


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


def _on_all_optimizers(attached: AttachedOptimizers) -> Handle:
    """Register `before_other`, until the object is gone."""
    ref = weakref.ref(attached)

    def before(optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
        alive = ref()
        if alive is None:
            handle.remove()
            return None
        return alive.before_other(optimizer, args, kwargs)

    handle = before_optimizer_steps(before)
    return handle


class _Borrowed:
    """An optimizer's `found_inf` during a step, in which several models may have a part, and what it was before: a GradScaler's."""

    of: ClassVar[weakref.WeakKeyDictionary[Optimizer, _Borrowed]] = weakref.WeakKeyDictionary()

    def __init__(self, before: Any) -> None:
        self._before = before
        self._users: set[_Skipping] = set()
        self._now: Tensor | None = None

    @classmethod
    def add(cls, optimizer: Any, user: _Skipping, flag: Tensor) -> None:
        """Have the optimizer skip its step if `flag` is 1, too."""
        now = getattr(optimizer, "found_inf", None)
        borrowed = cls.of.setdefault(optimizer, cls(now))
        borrowed._users.add(user)
        # A GradScaler adds up those of several devices, from the number 0, and optimizers compare with 1.
        other = now.to(flag) if isinstance(now, Tensor) else now or 0
        optimizer.found_inf = borrowed._now = flag if now is None else ((flag + other) > 0).to(flag)

    @classmethod
    def give_back(cls, optimizer: Any, user: _Skipping) -> None:
        """`user` has no part any more: the last one restores what was there, unless somebody has set another one since."""
        borrowed = cls.of.get(optimizer)
        if borrowed is None or user not in borrowed._users:
            return
        borrowed._users.remove(user)
        if borrowed._users:
            return
        del cls.of[optimizer]
        if getattr(optimizer, "found_inf", None) is borrowed._now:
            del optimizer.found_inf
            if borrowed._before is not None:
                optimizer.found_inf = borrowed._before


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_captured(flag: Tensor) -> bool:
    """Whether this step is being captured in a CUDA graph."""
    return flag.is_cuda and torch.cuda.is_current_stream_capturing()


def _begins(optimizer: Optimizer) -> bool:
    """Whether SGD has yet to allocate momentum of a parameter."""
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


def check_optimizer(call: str, optimizer: Any, parameters: Iterable[Tensor], *, without: str) -> None:
    """Refuse what is not an optimizer of some of these parameters. `without` says what can be done without one."""
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(f"{call}: not a torch.optim.Optimizer. {without}")
    ours = {id(p) for p in parameters}
    if not any(id(p) in ours for p in _parameters(optimizer)):
        raise UsageError(
            f"{call}: it moves none of the model's parameters. Pass the optimizer that was made of model.parameters()."
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
