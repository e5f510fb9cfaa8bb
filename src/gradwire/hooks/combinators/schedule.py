"""Hooks by step: `after` changes over to another hook, `every` communicates in some steps only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.reference import working_dtype
from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.dense import Mean
from gradwire.hooks.numerics.elementwise import check_dense, refuse_sparse
from gradwire.hooks.state import add_owed, bundle, join_flat, pick, split_flat

_MEAN = Mean()


@dataclass(slots=True)
class _Phases:
    before: Any
    hook: Any = None
    begun: bool = False


@dataclass(frozen=True, slots=True)
class After(CommHook):
    """See `after`."""

    step: int
    hook: CommHook
    before: CommHook

    @property
    def collectives(self) -> int | None:  # type: ignore[override]
        """As many as either, where it is the same number."""
        return self.hook.collectives if self.hook.collectives == self.before.collectives else None

    @property
    def traits(self) -> Trait:  # type: ignore[override]
        """As the hooks; the earlier one remembers nothing and is not local."""
        return Trait.of(self.hook, self.before)

    def _now(self, step: int) -> tuple[CommHook, int]:
        """The hook of a step, and how many steps it has had."""
        return (self.before, step) if step < self.step else (self.hook, step - self.step)

    def check(self, spec: BucketSpec) -> None:
        """Both hooks'."""
        self.before.check(spec)
        self.hook.check(spec)

    def init(self, spec: BucketSpec) -> _Phases:
        """The state of the earlier hook; the later one's is made when its time has come."""
        return _Phases(self.before.init(spec))

    def reduce(self, grad: Tensor, state: _Phases, turn: Turn) -> Reduction:
        """Hand over to the hook of this step."""
        hook, step = self._now(turn.step)
        if hook is self.hook and not state.begun:
            state.hook, state.before, state.begun = hook.init(turn.spec), None, True
        return (yield from hook.reduce(grad, state.hook if state.begun else state.before, replace(turn, step=step)))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """As the hook of that step."""
        hook, step = self._now(step)
        return hook.wire_bytes(spec, world_size, step)

    def error(self, spec: BucketSpec) -> float:
        """The larger of the two."""
        return max(self.before.error(spec), self.hook.error(spec))

    def save(self, state: _Phases, spec: BucketSpec) -> dict[str, Any]:
        """The state of the hook that is at work, and which of the two that is."""
        if not state.begun:
            return bundle(before=self.before.save(state.before, spec))
        return bundle(begun=dict.fromkeys(spec.names, True), hook=self.hook.save(state.hook, spec))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Phases:
        """Whichever has begun. Parameters of buckets that have not, though others have, start afresh in the later hook."""
        begun = pick(saved, "begun")
        if any(name in begun for name in spec.names):
            return _Phases(None, self.hook.load(pick(saved, "hook"), spec), begun=True)
        return _Phases(self.before.load(pick(saved, "before"), spec))

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Both hooks', and which of the two is at work."""
        return bundle(
            begun=pick(saved, "begun"),
            before=self.before.shared(pick(saved, "before")),
            hook=self.hook.shared(pick(saved, "hook")),
        )

    @property
    def structure(self) -> str:
        """With the step of the change, since a state is of the hook before it or of the one after it."""
        return f"After({self.step}: {self.before.structure}; {self.hook.structure})"

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The later hook's; the earlier one keeps nothing."""
        return self.hook.owed(pick(saved, "hook"))

    def __repr__(self) -> str:
        return f"after({self.step}, {self.hook!r}, before={self.before!r})"


def after(step: int, hook: CommHook, *, before: CommHook = _MEAN) -> CommHook:
    """`before` in a bucket's first `step` steps, then `hook`, whose state begins there and whose steps count from there.

    Compression often hurts most while gradients are still large and fresh; the plain mean for the first hundred steps costs little.
    What `before` keeps is dropped at the change, so it must not owe anything. On the wire: as the hook of the step.

    >>> from gradwire.hooks import cast, chain, mean
    >>> after(100, chain(cast(torch.bfloat16), mean()))
    after(100, cast(torch.bfloat16) > mean(), before=mean())
    """
    check_hooks("after", hook=hook, before=before)
    if step < 0:
        raise UsageError(f"after({step}, ...): a negative step. Steps count from 0.")
    if before.remembers:
        raise UsageError(
            f"after({step}, {hook!r}, before={before!r}): what the earlier hook still owes at step {step} would never be sent. "
            "Put error_feedback() around after(), which then pays for both."
        )
    if before.local and not hook.local:
        raise UsageError(
            f"after({step}, {hook!r}, before={before!r}): with the earlier hook ranks go their own ways, and the later one "
            "averages gradients only, so they would never meet again. Let the local hook come last."
        )
    return After(step, hook, before)


@dataclass(slots=True)
class _Kept:
    total: Tensor
    """The gradients of the silent steps, summed; narrow dtypes in float32."""
    hook: Any


@dataclass(frozen=True, slots=True)
class Every(CommHook):
    """See `every`: the form in which gradients of the other steps are kept."""

    n: int
    hook: CommHook

    @property
    def traits(self) -> Trait:  # type: ignore[override]
        """It keeps what it does not send; and those of the hook."""
        return Trait.of(self.hook) | Trait.REMEMBERS

    def check(self, spec: BucketSpec) -> None:
        """Dense, and what the hook asks for."""
        check_dense(f"every({self.n}, ...)", spec)
        self.hook.check(spec)

    def init(self, spec: BucketSpec) -> _Kept:
        """Nothing has been kept yet."""
        return _Kept(torch.zeros(spec.numel, dtype=working_dtype(spec.dtype), device=spec.device), self.hook.init(spec))

    def reduce(self, grad: Tensor, state: _Kept, turn: Turn) -> Reduction:
        """Keep the gradient, or reduce it with all that was kept."""
        refuse_sparse(grad, f"every({self.n}, ...)", turn.spec)
        # Ranks that have run out of inputs may be more in a later step; so each step's gradient is kept as its own mean counts it.
        share = turn.share
        if (turn.step + 1) % self.n:
            state.total.add_(grad, alpha=share)
            nothing = grad.zero_() if turn.donated else torch.zeros_like(grad)
            return Reduced(nothing, nothing)
        wanted = torch.add(state.total, grad, alpha=share).to(grad.dtype)
        if turn.donated:
            wanted = grad.copy_(wanted)  # in the memory that the group moves best
        inner = replace(turn, step=turn.step // self.n, divisor=None)
        value, sent = yield from self.hook.reduce(wanted, state.hook, inner)
        state.total.zero_()
        return Reduced(value, sent if share == 1.0 else sent / share)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """Nothing, and in every n-th step what the hook sends."""
        return 0.0 if (step + 1) % self.n else self.hook.wire_bytes(spec, world_size, step // self.n)

    def error(self, spec: BucketSpec) -> float:
        """The hook's."""
        return self.hook.error(spec)

    def save(self, state: _Kept, spec: BucketSpec) -> dict[str, Any]:
        """What was kept, and the hook's state."""
        return bundle(kept=split_flat(state.total, spec), hook=self.hook.save(state.hook, spec))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Kept:
        """What was kept, nothing for parameters that are not in it, and the hook's state."""
        total = join_flat(pick(saved, "kept"), spec, dtype=working_dtype(spec.dtype))
        return _Kept(total, self.hook.load(pick(saved, "hook"), spec))

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Not what was kept, which its rank has not sent; the hook's."""
        return bundle(hook=self.hook.shared(pick(saved, "hook")))

    @property
    def structure(self) -> str:
        """Sums, and the hook's."""
        return f"Every({self.hook.structure})"

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """What was kept, and what the hook owes."""
        return add_owed(pick(saved, "kept"), self.hook.owed(pick(saved, "hook")))

    def __repr__(self) -> str:
        return f"every({self.n}, {self.hook!r})"


@dataclass(slots=True)
class _Turns:
    hook: Any
    otherwise: Any


@dataclass(frozen=True, slots=True)
class Alternating(CommHook):
    """See `every`: the form with a hook for the other steps."""

    n: int
    hook: CommHook
    otherwise: CommHook

    @property
    def collectives(self) -> int | None:  # type: ignore[override]
        """As many as either, where it is the same number."""
        return self.hook.collectives if self.hook.collectives == self.otherwise.collectives else None

    @property
    def traits(self) -> Trait:  # type: ignore[override]
        """All that one of the two is."""
        return Trait.of(self.hook, self.otherwise)

    def _now(self, step: int) -> tuple[CommHook, int]:
        """The hook of a step, and how many steps it has had."""
        rounds = step // self.n
        return (self.otherwise, step - rounds) if (step + 1) % self.n else (self.hook, rounds)

    def check(self, spec: BucketSpec) -> None:
        """Both hooks'."""
        self.hook.check(spec)
        self.otherwise.check(spec)

    def init(self, spec: BucketSpec) -> _Turns:
        """Both states."""
        return _Turns(self.hook.init(spec), self.otherwise.init(spec))

    def reduce(self, grad: Tensor, state: _Turns, turn: Turn) -> Reduction:
        """Hand over to the hook of this step."""
        hook, step = self._now(turn.step)
        inner = state.otherwise if (turn.step + 1) % self.n else state.hook
        return (yield from hook.reduce(grad, inner, replace(turn, step=step)))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        """As the hook of that step."""
        hook, step = self._now(step)
        return hook.wire_bytes(spec, world_size, step)

    def error(self, spec: BucketSpec) -> float:
        """The larger of the two."""
        return max(self.hook.error(spec), self.otherwise.error(spec))

    def save(self, state: _Turns, spec: BucketSpec) -> dict[str, Any]:
        """Both states."""
        return bundle(hook=self.hook.save(state.hook, spec), otherwise=self.otherwise.save(state.otherwise, spec))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Turns:
        """Both states."""
        return _Turns(self.hook.load(pick(saved, "hook"), spec), self.otherwise.load(pick(saved, "otherwise"), spec))

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Both hooks'."""
        return bundle(
            hook=self.hook.shared(pick(saved, "hook")), otherwise=self.otherwise.shared(pick(saved, "otherwise"))
        )

    @property
    def structure(self) -> str:
        """Both hooks'."""
        return f"Alternating({self.hook.structure}; {self.otherwise.structure})"

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """What both owe."""
        return add_owed(self.hook.owed(pick(saved, "hook")), self.otherwise.owed(pick(saved, "otherwise")))

    def __repr__(self) -> str:
        return f"every({self.n}, {self.hook!r}, otherwise={self.otherwise!r})"


def every(n: int, hook: CommHook, *, otherwise: CommHook | None = None) -> CommHook:
    """`hook` in every n-th step; in the others `otherwise`, or nothing is sent.

    Without `otherwise` the gradients of the other steps are kept and summed on their rank, and the optimizer gets zeros; in the
    n-th step it gets the ranks' mean of the whole sum. With plain SGD that moves the parameters as far as n steps would. Optimizers
    with moments move in the silent steps too, and see one large gradient instead of n: step them in every n-th step only.
    Memory: one tensor of the bucket's size. On the wire: 1/n of what `hook` sends, in bursts.

    >>> from gradwire.hooks import mean
    >>> every(4, mean())
    every(4, mean())
    """
    check_hooks("every", hook=hook, otherwise=_MEAN if otherwise is None else otherwise)
    if n < 1:
        raise UsageError(f"every({n}, {hook!r}): a step that never comes. Choose 1 or more.")
    if otherwise is not None and otherwise.local != hook.local:
        raise UsageError(
            f"every({n}, {hook!r}, otherwise={otherwise!r}): one of them leaves gradients on their rank, so ranks would go their "
            "own ways, and averaging gradients does not bring them together again. Local hooks average parameters themselves."
        )
    if n == 1:
        return hook
    if otherwise is not None:
        return Alternating(n, hook, otherwise)
    if Trait.WEIGHS in hook.traits:
        raise UsageError(
            f"every({n}, {hook!r}): gradients of {n} steps are sent as one, but each step has its own weight. Use mean(), or give "
            "the other steps a hook with otherwise=."
        )
    return Every(n, hook)
