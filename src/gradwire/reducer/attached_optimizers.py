"""AttachedOptimizers: calls back after the steps of the optimizers that train a model, and has them skip steps on the device.

Note [Steps that the device skips]
torch's fused optimizers take a number on the device, `found_inf`, and change nothing where it is 1: `torch.amp.GradScaler` gives
them its own. So the host need not know whether a step is to be skipped when it enqueues it. If a GradScaler has set one, the step
is skipped if either is 1. The number is forgotten when all optimizers have stepped.

If an optimizer steps that cannot skip, the host waits for the number there, and takes the gradients away if it is 1. That is so
for one that is not attached, but trains our parameters; for one that is not fused any more; and for fused SGD that has yet to
allocate momentum, which would stay uninitialized. A step that is captured in a CUDA graph is left alone: when it is replayed,
no hooks run, so the optimizers have not stepped for `can_skip`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.concurrency import weakly
from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.optimizer_steps import before_optimizer_steps
from gradwire.untraced import untraced_call

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
        """A number on the device: where it is 1, the next step changes nothing."""
        self._optimizers: list[tuple[weakref.ref[Optimizer], _Skipping]] = []
        self._handles: list[Handle] = []
        self._others: Handle | None = None
        """Of the hook on optimizers that are not attached, while a step is to be skipped."""
        self._parameters: dict[int, Tensor] = {}
        """By id."""
        self._all_parameters = False
        self._stepped = False

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
        self._remove()
        self.attached = True
        self._parameters = ours
        self._all_parameters = ours.keys() <= {id(p) for optimizer in optimizers for p in _parameters(optimizer)}

        def all_stepped() -> None:
            self._stepped = True
            self.skip_none()
            stepped()

        after = _after_all(len(optimizers), all_stepped)
        for index, optimizer in enumerate(optimizers):
            skipping = _Skipping(self, then=after(index))
            self._optimizers.append((weakref.ref(optimizer), skipping))
            before = optimizer.register_step_pre_hook(skipping.before_step)
            self._handles += [
                Handle(before.remove),
                Handle(optimizer.register_step_post_hook(skipping.after_step).remove),
            ]

    def detach(self) -> None:
        """Take the hooks off the optimizers. If they have a step to skip, they will make it without gradients.

        Their hooks cannot stay for that step and go then: torch iterates over them, as Note [One hook for all] has it.
        """
        if self.skip_if is not None and bool(self.skip_if):  # waits for the device
            _take_gradients(self._parameters.values())
        self.skip_none()
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for optimizer, skipping in self._optimizers:
            if (alive := optimizer()) is not None:
                _Borrowed.give_back(alive, skipping)
        self._handles, self._optimizers = [], []
        self._all_parameters = self._stepped = False

    # -- steps that the device skips -------------------------------------------------------------------------------------

    def can_skip(self) -> bool:
        """Whether optimizers that train all parameters and take `skip_if` are attached, and have stepped since `forget_steps`."""
        optimizers = [optimizer() for optimizer, _ in self._optimizers]
        return self._all_parameters and self._stepped and all(one is not None and _can_skip(one) for one in optimizers)

    def skip_next(self, where: Tensor) -> None:
        """Have the next step change nothing if this number on the device is 1. Only if `can_skip`."""
        self.skip_if, self._stepped = where, False
        if self._others is None:
            self._others = before_optimizer_steps(weakly(self._before_any_step))

    def skip_none(self) -> None:
        """The next step is like any other."""
        self.skip_if = None
        if self._others is not None:
            self._others.remove()
            self._others = None

    def forget_steps(self) -> None:
        """Other ranks may have made none: `can_skip` is False until the next one."""
        self._stepped = False

    def _before_any_step(self, optimizer: Any, *_: Any) -> None:
        """Of an optimizer that is not attached, but trains our parameters."""
        if self.skip_if is None or any(attached() is optimizer for attached, _ in self._optimizers):
            return
        ours = [p for p in _parameters(optimizer) if id(p) in self._parameters]
        if ours and bool(self.skip_if):  # waits for the device
            _take_gradients(ours)


class _Skipping:
    """Has one optimizer skip its step where `skip_if` is 1, and calls `then` after each step."""

    def __init__(self, attached: AttachedOptimizers, *, then: Callable[[], None]) -> None:
        self._attached = attached
        self._then = then

    @untraced_call
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with another closure, if there is one: its backward is the one that is checked."""
        _Borrowed.give_back(optimizer, self)  # if the last step has raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._skip(optimizer)
            return None

        def with_flag() -> Any:
            loss = closure()
            self._skip(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], with_flag, *args[2:]), kwargs
        return args, {**kwargs, "closure": with_flag}

    def _skip(self, optimizer: Any) -> None:
        ours = self._attached.skip_if
        if ours is None or (ours.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if _can_skip(optimizer) and not _begins(optimizer):
            _Borrowed.add(optimizer, self, ours)
        elif bool(ours):  # waits for the device
            _take_gradients(_parameters(optimizer))

    @untraced_call
    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Give `found_inf` back."""
        _Borrowed.give_back(optimizer, self)
        self._then()


class _Borrowed:
    """An optimizer's `found_inf` during a step, in which several models may have a part, and what it was before: a GradScaler's."""

    of: ClassVar[weakref.WeakKeyDictionary[Optimizer, _Borrowed]] = weakref.WeakKeyDictionary()

    def __init__(self, before: Tensor | None) -> None:
        self._before = before
        self._users: set[_Skipping] = set()

    @classmethod
    def add(cls, optimizer: Any, user: _Skipping, flag: Tensor) -> None:
        """Have the optimizer skip its step if `flag` is 1, too."""
        now: Tensor | None = getattr(optimizer, "found_inf", None)
        cls.of.setdefault(optimizer, cls(now))._users.add(user)
        # A GradScaler adds up those of several devices, and optimizers compare with 1.
        optimizer.found_inf = flag if now is None else ((flag + now.to(flag)) > 0).to(flag)

    @classmethod
    def give_back(cls, optimizer: Any, user: _Skipping) -> None:
        """`user` has no part any more: the last one restores what was there."""
        borrowed = cls.of.get(optimizer)
        if borrowed is None or user not in borrowed._users:
            return
        borrowed._users.remove(user)
        if not borrowed._users:
            del cls.of[optimizer], optimizer.found_inf
            if borrowed._before is not None:
                optimizer.found_inf = borrowed._before


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _take_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


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
