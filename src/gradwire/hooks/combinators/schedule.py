"""Hooks by step: `after` switches to another hook, `every` communicates in every n-th step only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks, checks_arguments, refuse_traits
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.composite import Composite
from gradwire.hooks.dense import MEAN
from gradwire.hooks.state import pick


class _ByStep(Composite):
    @abstractmethod
    def at(self, step: int) -> tuple[str, int]:
        """The part that reduces in this step, and how many steps it has had before."""

    @property
    def collectives(self) -> int | None:
        counts = {part.collectives for part in self.parts.values()}
        return counts.pop() if len(counts) == 1 else None

    def reduce(self, grad: Tensor, state: dict[str, Any], turn: Turn) -> Reduction:
        name, step = self.at(turn.step)
        return (yield from self.parts[name].reduce(grad, state[name], replace(turn, step=step)))

    def capture_key(self, turn: Turn) -> Any:
        name, step = self.at(turn.step)
        key = self.parts[name].capture_key(replace(turn, step=step))
        return None if key is None else (name, key)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        name, step = self.at(step)
        return self.parts[name].wire_bytes(spec, world_size, step)


@dataclass(frozen=True, slots=True)
class After(_ByStep):
    """See `after`. A bucket's state is that of one part at a time."""

    step: int
    hook: CommHook
    before: CommHook

    @property
    def parts(self) -> Mapping[str, CommHook]:
        return {"before": self.before, "hook": self.hook}

    def at(self, step: int) -> tuple[str, int]:
        return ("before", step) if step < self.step else ("hook", step - self.step)

    def init(self, spec: BucketSpec) -> dict[str, Any]:
        return {"before": self.before.init(spec)}

    def reduce(self, grad: Tensor, state: dict[str, Any], turn: Turn) -> Reduction:
        if turn.step >= self.step and "hook" not in state:
            state.clear()
            state["hook"] = self.hook.init(turn.spec)
        # Spelled out: without arguments super() would look for the class that the dataclass decorator has replaced.
        return (yield from _ByStep.reduce(self, grad, state, turn))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> dict[str, Any]:
        """The state of the later hook if there is one for any of the parameters; the others start fresh in it."""
        name = "hook" if pick(saved, "hook").keys() & set(spec.names) else "before"
        return {name: self.parts[name].load(pick(saved, name), spec)}

    @property
    def structure(self) -> str:
        """With the step of the change, since a state belongs to the hook before it or to the one after it."""
        return f"After({self.step}: {self.before.structure}; {self.hook.structure})"

    def __repr__(self) -> str:
        return f"after({self.step}, {self.hook!r}, before={self.before!r})"


@checks_arguments(step="[0, inf)")
def after(step: int, hook: CommHook, *, before: CommHook = MEAN) -> CommHook:
    """`before` in a bucket's first `step` steps, then `hook`, whose state and step count start there.

    The state of `before` is dropped at the change, so it must not owe anything. On the wire: as the hook of the step.

    >>> from gradwire.hooks import cast, chain, mean
    >>> after(100, chain(cast(torch.bfloat16), mean()))
    after(100, cast(torch.bfloat16) > mean(), before=mean())
    """
    check_hooks("after", hook=hook, before=before)
    made = After(step, hook, before)
    if before.remembers:
        raise UsageError(
            f"{made}: what the earlier hook still owes at step {step} would never be sent. Put error_feedback() around after()."
        )
    if before.local and not hook.local:
        raise UsageError(
            f"{made}: the earlier hook lets parameters diverge, and they would never be equal again. Make it the later one."
        )
    return made


@dataclass(frozen=True, slots=True)
class Every(Composite):
    """See `every`: the form that keeps the gradients of the other steps, summed, under "kept" in the state."""

    n: int
    hook: CommHook

    dense_only = True
    tensors = owes = ("kept",)

    @property
    def parts(self) -> Mapping[str, CommHook]:
        return {"hook": self.hook}

    @property
    def traits(self) -> Trait:
        return Trait.of(self.hook) | Trait.REMEMBERS

    def reduce(self, grad: Tensor, state: dict[str, Any], turn: Turn) -> Reduction:
        # More ranks may have run out of inputs by a later step, so each step's gradient is scaled for its own mean.
        share, kept = turn.share, state["kept"]
        if (turn.step + 1) % self.n:
            kept.add_(grad, alpha=share)
            nothing = grad.zero_() if turn.donated else torch.zeros_like(grad)
            return Reduced(nothing, nothing)
        total = torch.add(kept, grad, alpha=share).to(grad.dtype)
        if turn.donated:
            total = grad.copy_(total)  # in the bucket's memory, from which the group sends fastest
        inner = replace(turn, step=turn.step // self.n, divisor=None)
        value, sent = yield from self.hook.reduce(total, state["hook"], inner)
        kept.zero_()
        return Reduced(value, sent if share == 1.0 else sent / share)

    def capture_key(self, turn: Turn) -> Any:
        if (turn.step + 1) % self.n:
            return "kept"
        key = self.hook.capture_key(replace(turn, step=turn.step // self.n, divisor=None))
        return None if key is None else ("sent", key)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return 0.0 if (step + 1) % self.n else self.hook.wire_bytes(spec, world_size, step // self.n)

    def __repr__(self) -> str:
        return f"every({self.n}, {self.hook!r})"


@dataclass(frozen=True, slots=True)
class Alternating(_ByStep):
    """See `every`: the form with a hook for the other steps."""

    n: int
    hook: CommHook
    otherwise: CommHook

    @property
    def parts(self) -> Mapping[str, CommHook]:
        return {"hook": self.hook, "otherwise": self.otherwise}

    def at(self, step: int) -> tuple[str, int]:
        rounds = step // self.n
        return ("otherwise", step - rounds) if (step + 1) % self.n else ("hook", rounds)

    def __repr__(self) -> str:
        return f"every({self.n}, {self.hook!r}, otherwise={self.otherwise!r})"


@checks_arguments(n="[1, inf)")
def every(n: int, hook: CommHook, *, otherwise: CommHook | None = None) -> CommHook:
    """`hook` in every n-th step; in the others `otherwise`, or no communication.

    Without `otherwise` each rank sums the gradients of the other steps, and the optimizer gets zeros; in the n-th step it gets the
    mean over the ranks of the whole sum. Step optimizers with moments in every n-th step only. Memory: one tensor of the bucket's
    size. On the wire: 1/n of what `hook` sends, in bursts.

    >>> from gradwire.hooks import mean
    >>> every(4, mean())
    every(4, mean())
    """
    check_hooks("every", hook=hook, otherwise=MEAN if otherwise is None else otherwise)
    if otherwise is not None and otherwise.local != hook.local:
        raise UsageError(
            f"every({n}, {hook!r}, otherwise={otherwise!r}): one of them leaves gradients on their rank, and averaging gradients "
            "in other steps does not make the parameters equal again. Use local hooks in all steps or in none."
        )
    if n == 1:
        return hook
    if otherwise is not None:
        return Alternating(n, hook, otherwise)
    why = (
        "gradients of several steps are sent as one, but each step has its own weight. Use mean(), or pass otherwise=."
    )
    refuse_traits(f"every({n}, {hook!r})", hook, {Trait.WEIGHS: why})
    return Every(n, hook)
