"""The communication hook: `CommHook`, what it returns, and what it is told.

A hook's `reduce` is a generator: `yield all_reduce(t)` means "communicate this" and continues when the result is in `t`;
`yield from inner.reduce(...)` means "compose". No group, no thread and no future is in sight, so one hook runs on simulated
ranks, on a Group and inside torch's own DDP alike.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout
from gradwire.errors import GroupError, HookError
from gradwire.hooks.bucket import BucketSpec


class Reduced(NamedTuple):
    """What a reduction gives back."""

    value: Tensor
    """The averaged gradient, the same bits on every rank."""
    sent: Tensor
    """What this rank in effect contributed: `value` is the mean of all ranks' `sent`. Error feedback needs it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a hook is told about the reduction it carries out."""

    spec: BucketSpec
    rank: int
    world_size: int
    step: int = 0
    """How many times this bucket has been reduced before."""
    donated: bool = False
    """Whether `grad` may be overwritten and `sent` is not asked for: nobody else needs this bucket."""
    divisor: int | None = None
    """How many ranks the average counts, where that is not all: some have run out of inputs and contribute zeros."""
    weight: float = 1.0
    """How much this rank's gradient counts, for hooks that weigh: usually its number of samples."""
    hosts: Layout | None = None
    """Which ranks share a host, where the driver knows. A hook may then yield `op.among(Scope.INSIDE)` or `Scope.ACROSS`."""
    origin: tuple[int, ...] = ()
    """Rank and step as the driver gave them. Hooks made of hooks may tell those inside others; these stay, for chance to go by."""
    path: str = ""
    """Which part of a hook made of hooks this is, where two parts see the same bucket in the same step: chance goes by it too."""

    def __post_init__(self) -> None:
        if not self.origin:
            object.__setattr__(self, "origin", (self.rank, self.step))

    @property
    def share(self) -> float:
        """By what a mean over all ranks is to be multiplied to be the mean over those that count: 1, or more under `join`."""
        return 1.0 if self.divisor is None else self.world_size / self.divisor


Reduction = Generator[Collective, None, Reduced]


class Trait(Flag):
    """What a hook is, as far as it matters to what is combined with it."""

    REMEMBERS = auto()
    """It keeps what it did not send and sends it later (error feedback, or a momentum of its own)."""
    CONTINUES = auto()
    """It begins a step where its last one ended, with the same elements, though it owes nothing (a warm start)."""
    LOCAL = auto()
    """Gradients stay on their rank, so that ranks do not agree on `value` (local SGD)."""
    WEIGHS = auto()
    """`turn.weight` counts, so that a mean of its means is not the mean of all."""
    VOTES = auto()
    """What it did not send cannot be paid back: what would be owed grows without bound."""
    DISTORTS = auto()
    """It changes gradients on purpose (clipping, noise), so that what it took away must not be fed back."""
    AVERAGES = auto()
    """It takes the mean of what it makes of the gradients, so that `mean()` to its right in a chain says nothing new."""

    @staticmethod
    def of(*hooks: CommHook) -> Trait:
        """What a hook made of these is: all that one of them is, but that it is no end of a chain for `mean()` to follow."""
        return functools.reduce(operator.or_, (hook.traits for hook in hooks), Trait(0)) & ~Trait.AVERAGES


class CommHook(ABC):
    """What happens to a bucket between the model and the wire. Hooks are values: all state comes from `init`."""

    collectives: int | None = None
    """How many collectives `reduce` yields for a bucket, where that is always the same number."""
    traits: Trait = Trait(0)
    """What others must know of it before they combine it with something."""
    alone: str = ""
    """Of a hook that looks like a stage but is none: why no hook to its right could carry what it makes. `chain` says it."""

    @property
    def remembers(self) -> bool:
        """Whether it keeps what it did not send."""
        return Trait.REMEMBERS in self.traits

    @property
    def local(self) -> bool:
        """Whether gradients stay on their rank."""
        return Trait.LOCAL in self.traits

    def check(self, spec: BucketSpec) -> None:
        """Raise UsageError if the hook has no way for one of these parameters: asked when it is set, before any step."""
        return

    def init(self, spec: BucketSpec) -> Any:
        """The state for one bucket, before its first reduction. The reducer owns it."""
        return None

    @abstractmethod
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Average `grad`, flat and not to be written, over all ranks."""

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """The bytes that a rank sends for a bucket, as the hook's documentation says; None where that depends on the values.

        They are counted as `collectives.traffic.sent_bytes` does: by the best algorithm for each collective, and for the rank
        that sends most.
        """
        return None

    def error(self, spec: BucketSpec) -> float:
        """How far `value` may lie from the mean of all `sent`, relative to the largest element: rounding, if nothing else."""
        return 16 * torch.finfo(spec.dtype).eps if spec.dtype.is_floating_point or spec.dtype.is_complex else 0.0

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        """The state as a mapping from parameter name to that parameter's part of it. Empty where there is none."""
        return {}

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        """The state for `spec` from what `save` gave, possibly for other buckets; parameters not in it start afresh."""
        return self.init(spec)

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Of what `save` gave on another rank, what holds on every rank: with this a new rank begins. Nothing, if nothing else."""
        return {}

    def __repr__(self) -> str:
        """The class and its plain settings. Ranks compare hooks by it, so it holds nothing that differs between processes."""
        plain = (str, int, float, type(None), torch.dtype, CommHook)
        settings = [
            f"{k}={v!r}" for k, v in getattr(self, "__dict__", {}).items() if isinstance(v, plain) and k[:1] != "_"
        ]
        return f"{type(self).__qualname__}({', '.join(settings)})"

    @property
    def structure(self) -> str:
        """What `save` gives, whatever the settings: hooks of one structure can `load` each other's states. "" for no state."""
        return "" if type(self).save is CommHook.save else type(self).__qualname__

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Of what `save` gave, by parameter, the gradients that this rank has not sent yet; None where that cannot be told.

        A hook of another structure that takes its place sends them with the next gradients.
        """
        return None if self.remembers else {}


@dataclass(frozen=True, slots=True)
class Wrapped(CommHook):
    """A hook around another, as stages make it: all that it does not say otherwise is as in the hook inside."""

    inner: CommHook

    @property
    def collectives(self) -> int | None:  # type: ignore[override]
        """As many as the hook inside."""
        return self.inner.collectives

    @property
    def traits(self) -> Trait:  # type: ignore[override]
        """Those of the hook inside."""
        return self.inner.traits

    def inside(self, spec: BucketSpec) -> BucketSpec:
        """The bucket as the hook inside sees it."""
        return spec

    def check(self, spec: BucketSpec) -> None:
        """The inner hook's."""
        self.inner.check(self.inside(spec))

    def init(self, spec: BucketSpec) -> Any:
        """The inner hook's state."""
        return self.inner.init(self.inside(spec))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """The inner hook's."""
        return self.inner.wire_bytes(self.inside(spec), world_size, step)

    def error(self, spec: BucketSpec) -> float:
        """The inner hook's."""
        return self.inner.error(self.inside(spec))

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        """The inner hook's."""
        return self.inner.save(state, self.inside(spec))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        """The inner hook's."""
        return self.inner.load(saved, self.inside(spec))

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The inner hook's."""
        return self.inner.shared(saved)

    @property
    def structure(self) -> str:
        """The inner hook's, unless it saves something of its own."""
        inside = self.inner.structure
        return inside if type(self).save is Wrapped.save else f"{type(self).__qualname__}({inside})"

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The inner hook's, unless it saves something of its own."""
        return self.inner.owed(saved) if type(self).save is Wrapped.save else CommHook.owed(self, saved)


Stage = Callable[[CommHook], CommHook]
"""A hook around a hook. `chain` composes them."""


def begin(hook: CommHook, grad: Tensor, state: Any, turn: Turn, *, method: str = "reduce") -> Reduction:
    """`hook.reduce(grad, state, turn)` with everything checked that it yields and returns: what drivers advance."""
    reduction = getattr(hook, method)(grad, state, turn)
    if not isinstance(reduction, Generator):
        raise _broken(
            hook, turn, f"{method}() is not a generator but returned {type(reduction).__name__}; it must yield"
        )
    try:
        op = next(reduction)
        while True:
            if not isinstance(op, Collective):
                raise _broken(
                    hook, turn, f"{method}() yielded {type(op).__name__}, not a Collective such as all_reduce(t)"
                )
            try:
                yield op
            except Exception as error:
                op = reduction.throw(error)
            else:
                op = next(reduction)
    except StopIteration as stop:
        return _check_result(hook, stop.value, grad, turn, method)
    except Exception as error:
        if not isinstance(error, (GroupError, HookError)):  # those say where they come from
            error.add_note(f"raised by {_where(hook, turn)}")
        raise
    finally:
        reduction.close()


def _check_result(hook: CommHook, result: Any, grad: Tensor, turn: Turn, method: str) -> Reduced:
    if not isinstance(result, Reduced):
        raise _broken(hook, turn, f"{method}() returned {type(result).__name__}, not Reduced(value, sent)")
    value = result.value
    if not isinstance(value, Tensor):
        raise _broken(hook, turn, f"{method}() returned Reduced with a value of {type(value).__name__}, not a tensor")
    if value.numel() != grad.numel() or (method == "reduce" and value.dtype != grad.dtype):
        raise _broken(
            hook,
            turn,
            f"{method}() returned {value.dtype} of {value.numel()} elements for a bucket of {grad.dtype} with {grad.numel()}",
        )
    return result


def _where(hook: CommHook, turn: Turn) -> str:
    return f"communication hook {hook!r} on {turn.spec}, rank {turn.rank}"


def _broken(hook: CommHook, turn: Turn, what: str) -> HookError:
    return HookError(f"{_where(hook, turn)}: {what}.", hook=repr(hook))
