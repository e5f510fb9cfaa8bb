"""The communication hook: `CommHook`, what it is given (`Turn`) and what it returns (`Reduced`).

A hook's `reduce` is a generator: `yield all_reduce(t)` communicates and continues when the result is in `t`; `yield from
inner.reduce(...)` composes. It sees no group, no thread and no future, so the same hook runs on simulated ranks, on a Group and
inside torch's own DDP.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout
from gradwire.errors import UsageError
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.state import Owed, merge_owed, scale_owed
from gradwire.hooks.state_fork import Fork


class Reduced(NamedTuple):
    """The result of a reduction."""

    value: Tensor
    """The averaged gradient, the same bits on every rank."""
    sent: Tensor
    """What this rank in effect contributed: `value` is the mean of all ranks' `sent`. Error feedback needs it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The circumstances of one reduction."""

    spec: BucketSpec
    rank: int
    world_size: int
    step: int = 0
    """How many times this bucket has been reduced before."""
    donated: bool = False
    """Whether `grad` may be overwritten and `sent` is not needed, because the bucket has no other user."""
    divisor: int | None = None
    """The number of ranks in the average, if not all: ranks that have run out of inputs contribute zeros."""
    weight: float = 1.0
    """The weight of this rank's gradient, usually its number of samples, for hooks that average by weight."""
    hosts: Layout | None = None
    """Which ranks share a host, where that is known. A hook may then yield `op.among(Scope.INSIDE)` or `Scope.ACROSS`."""
    origin: tuple[int, ...] = ()
    """Rank and step before any combinator changed them: random numbers are derived from these."""
    room: Tensor | None = None
    """Memory for `value`, as large as `grad`, if the hook `uses_room`."""
    anchor: Tensor | None = None
    """Inside `diloco`: the parameters at the start of the round. The gradient is the progress since then, to be subtracted."""
    residual: Tensor | None = None
    """If the hook `adds_residual`: to be added to the gradient, and replaced by what is not sent of the sum."""
    path: str = ""
    """Tells apart the parts of a combinator that see the same bucket in the same step, so that they draw different numbers."""
    varying: Callable[[Callable[[Turn], int]], Tensor] | None = field(default=None, repr=False)
    """Makes the tensors of `on_device` in a reduction that is captured. They are filled before each replay."""

    def __post_init__(self) -> None:
        if not self.origin:
            object.__setattr__(self, "origin", (self.rank, self.step))

    @property
    def counted(self) -> int:
        """The number of ranks in the average."""
        return self.world_size if self.divisor is None else self.divisor

    @property
    def share(self) -> float:
        """The factor from the mean over all ranks to the mean over those that count: 1, or more under `join`."""
        return 1.0 if self.divisor is None else self.world_size / self.divisor

    def on_device(self, number: Callable[[Turn], int]) -> Tensor:
        """`number(turn)` as an int64 tensor of one element. Kernels that read it can be captured although the number changes.

        For a replay it is computed of this turn with the step of the replay in `origin`.
        """
        if self.varying is None:
            return torch.full((1,), number(self), dtype=torch.int64, device=self.spec.device)
        return self.varying(lambda turn: number(replace(self, origin=(self.origin[0], turn.origin[1]))))


Reduction = Generator[Collective, None, Reduced]
"""What `CommHook.reduce` returns: it yields collectives, and in the end its result."""


class Trait(Flag):
    """Properties of a hook that decide what it can be combined with."""

    REMEMBERS = auto()
    """It keeps what it did not send and sends it later (error feedback, or a momentum of its own)."""
    CONTINUES = auto()
    """It starts a step from the result of its last one, for the same elements, though it owes nothing (a warm start)."""
    LOCAL = auto()
    """Gradients stay on their rank, so `value` differs between ranks (local SGD)."""
    WEIGHS = auto()
    """It weights ranks by `turn.weight`, so a mean of its means is not the mean over all ranks."""
    VOTES = auto()
    """Its error cannot be fed back: the residual would grow without bound."""
    DISTORTS = auto()
    """It changes gradients on purpose (clipping, noise), so the difference must not be fed back."""
    ANCHORED = auto()
    """It needs `turn.anchor`, which only a hook inside `diloco` gets."""
    MOMENTUM = auto()
    """What it owes is a momentum and not a gradient, so it is dropped when a hook of another structure is set."""
    AVERAGES = auto()
    """It averages what it makes of the gradients, so `mean()` to its right in a chain is redundant."""
    MATRICES = auto()
    """It compresses parameters of two or more dimensions, so it does nothing to gradients that are given without shapes."""

    @staticmethod
    def of(*hooks: CommHook) -> Trait:
        """The traits of a hook made of these: all of theirs, without `AVERAGES`."""
        return functools.reduce(operator.or_, (hook.traits for hook in hooks), Trait(0)) & ~Trait.AVERAGES


class HookState:
    """What a hook keeps from step to step: a state for each bucket, saved by parameter. Whatever runs the hook owns it."""

    if TYPE_CHECKING:

        @property
        def remembers(self) -> bool: ...

    def init(self, spec: BucketSpec) -> Any:
        """The state for one bucket before its first reduction."""
        return None

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        """The state by parameter name; empty if there is none."""
        return {}

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        """The state for `spec` from what `save` returned, possibly for other buckets; parameters not in it start fresh."""
        return self.init(spec)

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The part of what `save` returned on one rank that is valid on every rank. A new rank starts from it."""
        return {}

    @property
    def structure(self) -> str:
        """The format of what `save` returns: hooks of equal structure can `load` each other's states. "" for no state."""
        return "" if type(self).save is HookState.save else type(self).__qualname__

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        """What is in a saved state that this rank has not sent yet: parameters and their tensors, not copies; None if unknown.

        When a hook of another structure replaces this one, they are added to the next gradients, unless it has Trait.MOMENTUM.
        """
        return None if self.remembers else []

    def fork(self, state: Any) -> Fork:
        """The way back to this state, before a step that may be dropped: its `drop()` restores all that the state consists of."""
        return Fork(state)

    def rebase(self, saved: Mapping[str, Any], old_size: int, new_size: int) -> Any:
        """A saved state after the number of ranks has changed: what is owed counts 1 / size in the average, so it is rescaled.

        Momenta and bases that are not owed stay as they are. If it is unknown what is owed, all does.
        """
        return scale_owed(saved, {id(t) for _, t in self.owed(saved) or ()}, new_size / old_size)

    def inherit(self, saved: Mapping[str, Any], leaver: Mapping[str, Any]) -> Any:
        """A saved state with what another rank, which leaves, owes in its own. Before `rebase`."""
        return merge_owed(saved, leaver, {id(t) for _, t in self.owed(leaver) or ()})


class CommHook(HookState, ABC):
    """What happens to a bucket between the model and the wire. Hooks are values: all state comes from `init`."""

    if TYPE_CHECKING:
        # Read-only to type checkers, so that a subclass may define an attribute or a property.

        @property
        def collectives(self) -> int | None:
            """How many collectives `reduce` yields for a bucket, if that is always the same number."""

        @property
        def traits(self) -> Trait:
            """What restricts how it can be combined with other hooks."""

        @property
        def passes_nonfinite(self) -> bool:
            """Whether NaN or infinity in any rank's gradient is in the value of all ranks: then gradients need not be checked."""
    else:
        collectives = None
        traits = Trait(0)
        passes_nonfinite = False

    dense_only: bool = False
    """Whether it refuses sparse gradients: it selects, splits or rounds elements."""
    real_only: str = ""
    """Why it refuses complex gradients, if it does."""
    uses_room: bool = False
    """Whether it writes its value to `turn.room` if there is one. Hooks that pass their turn on do not."""
    made_by: str = ""
    """The function that makes it, which its repr shows; empty for a hook that is made by its class."""
    alone: str = ""
    """For a hook that could be mistaken for a stage: why no hook to its right can send its output. `chain` quotes it."""

    @property
    def remembers(self) -> bool:
        """Whether it keeps what it did not send."""
        return Trait.REMEMBERS in self.traits

    @property
    def local(self) -> bool:
        """Whether gradients stay on their rank."""
        return Trait.LOCAL in self.traits

    def check(self, spec: BucketSpec) -> None:
        """Raise UsageError if the hook cannot reduce one of these parameters. Called when it is set, before any step."""
        if self.dense_only and spec.sparse:
            raise UsageError(
                f"{self!r} on {spec}: its gradients are sparse, and it supports dense ones only. Use mean() for such parameters, "
                'by partition({"embedding.*": mean(), "*": ...}).'
            )
        if self.real_only and spec.dtype.is_complex:
            raise UsageError(
                f"{self!r} on {spec}: its gradients are complex, and {self.real_only}. Give such parameters mean(), by "
                'partition({"name.*": mean(), "*": ...}).'
            )

    def capture_key(self, turn: Turn) -> Any:
        """What the kernels of `reduce` depend on in this turn, besides rank, world, weight and divisor; None if that is unknown.

        On CUDA, `reduce` is recorded as CUDA graphs for each key, and replayed in later turns with the same one, unless the key is
        None. A hook that returns a key, such as 0, must change its state in place, read no tensor on the host, and decide nothing
        by `turn.step` or random numbers of the host that is not in the key. Kernels may read such numbers from `turn.on_device`.
        See also `capture`.
        """
        return None

    @abstractmethod
    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Average `grad` over all ranks. It is flat, and must not be written unless `turn.donated`."""

    def adds_residual(self, grad: Tensor, residual: Tensor, state: Any, turn: Turn) -> bool:
        """Whether it would make use of this `turn.residual`, because it has kernels for that."""
        return False

    @property
    def scatters(self) -> bool:
        """Whether it has `reduce_scatter`."""
        return type(self).reduce_scatter is not CommHook.reduce_scatter

    def reduce_scatter(self, grad: Tensor, state: Any, turn: Turn) -> Reduction | None:
        """As `reduce`, but the value is only this rank's row of the average; None if the hook has no such form.

        `grad` has `turn.world_size` rows of equal length, which is the length of the value. `sent` is as long as `grad`: row r of
        the mean of all ranks' `sent` is the value of rank r. The state is that of `reduce`.
        """
        return None

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """The bytes that a rank sends for a bucket; None if that depends on the values.

        Counted as by `collectives.op.sent_bytes`: with the best algorithm of each collective, for the rank that sends most.
        """
        return None

    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """As `wire_bytes`, for `reduce_scatter`."""
        return None

    def error(self, spec: BucketSpec) -> float:
        """The largest difference between `value` and the mean of all `sent`, relative to the largest element: rounding."""
        return 16 * torch.finfo(spec.dtype).eps if spec.dtype.is_floating_point or spec.dtype.is_complex else 0.0

    def narrowest(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of least range to which gradients of `dtype` are converted on their way: larger ones become infinite."""
        return dtype

    def __repr__(self) -> str:
        """How it was made, with its plain settings. Ranks compare hooks by it, so it contains nothing specific to a process."""
        return self._call()

    def _call(self, *hidden: str) -> str:
        plain = (str, int, float, torch.dtype, CommHook)
        names = [f.name for f in fields(self)] if is_dataclass(self) else getattr(self, "__dict__", {})
        shown = {name: getattr(self, name) for name in names if name[:1] != "_" and name not in hidden}
        settings = ", ".join(f"{name}={value!r}" for name, value in shown.items() if isinstance(value, plain))
        return f"{self.made_by or type(self).__qualname__}({settings})"


def always_alike(hook: CommHook, turn: Turn) -> int:
    """The method `capture_key` of a hook whose kernels are the same in every turn."""
    return 0


Stage = Callable[[CommHook], CommHook]
"""A function that puts a hook around a hook. `chain` composes them."""
