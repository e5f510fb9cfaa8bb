"""`HookStates`: the states of one hook on one model, made when a bucket first needs one, kept by parameter name in between.

It does not know groups, models or backwards: the HookRunner owns one.

Note [Whose state it is]
A hook's state belongs to the rank that made it: a residual is what this rank has not sent. So a saved state contains its rank.
The rank of the same number takes all of it, in a world of any size. Any other rank takes what all ranks share
(`CommHook.shared`: DiLoCo's anchor, say) and begins with `init` for the rest; so a new rank loads rank 0's state.

Note [Another hook]
States outlive settings. A hook whose state has the same structure (`CommHook.structure`: error feedback around whatever keeps
nothing, say) takes the states over by parameter name, with the count of steps, when it is set and when it loads what the other
saved. When a hook of another structure is set, it begins with its own `init` at step 0, and the gradients that the old one had not
sent (`CommHook.owed`) are added to the next ones, so nothing is lost. Where a hook cannot tell what it owes, a warning says so.

Note [A step that is dropped]
A step that all ranks drop, because a gradient is not finite or a rank was lost, has changed the states, and what they sent in it is
lost. So before such a step states are forked (`HookStates.fork`): each one before its reduction (`CommHook.fork`), and `drop` has
all as it was, so that a retry gives the same bits. Forks nest: one for a check of each backward may be inside one for a whole step.

Note [Other ranks]
What a rank owes counts 1 / n in an average over n ranks. So when n becomes m, all ranks multiply it by m / n, a rank that leaves
gives what it owes to another one first (`with_ranks`), and one that joins owes nothing: the sum over all ranks, divided by
their number, stays the same. A rank that is lost takes what it owed with it; `owed_norm`, divided by n, is how much that was.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import HookError
from gradwire.hooks.base import CommHook, Trait
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.state import add_owed
from gradwire.hooks.state_fork import Fork
from gradwire.reducer.buckets.layout import plain_name

VERSION = 2
"""Of the form of `hook_state_dict()`."""
_KEYS = {"version", "hook", "rank", "step", "state"}


@dataclass(slots=True, eq=False)
class StepFork:
    """What there was before a step that may be dropped. See Note [A step that is dropped]."""

    states: HookStates
    step: int
    next_steps: dict[int, int]
    owed: dict[str, Tensor]
    saved: dict[str, Any]
    """By parameter: what buckets had not picked up."""
    forks: dict[int, tuple[BucketSpec, Fork]] = field(default_factory=dict)
    """By bucket: those that were reduced since."""
    complete: bool = False
    """Whether all states there were have a fork, because buckets were rebuilt since."""
    undo: list[Callable[[], object]] = field(default_factory=list)
    """For what changes besides states: called in reverse order if the step is dropped."""

    def commit(self) -> None:
        """The step counts. So do those that were forked inside it; nothing if it has ended before."""
        self.states.end_fork(self, dropped=False)

    def drop(self) -> None:
        """Have everything as it was. All reductions of the step are over."""
        self.states.end_fork(self, dropped=True)


class HookStates:
    """One state per bucket, and how many times the buckets have been reduced."""

    def __init__(
        self,
        hook: CommHook,
        *,
        step: int = 0,
        saved: Mapping[str, Any] | None = None,
        owed: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.hook = hook
        self._step = step  # that of buckets that have not been reduced yet
        self._next_steps: dict[int, int] = {}
        self._made: dict[int, tuple[BucketSpec, Any]] = {}
        self._saved: dict[str, Any] = dict(saved or {})
        self.owed: dict[str, Tensor] = dict(owed or {})
        """Gradients that an earlier hook had not sent, by parameter. See Note [Another hook]."""
        self.forked: list[StepFork] = []
        """Of the steps that have begun and may be dropped, the outermost first."""
        self._spares: dict[int, Fork] = {}
        """Of earlier steps, whose memory is used again."""

    def of(self, spec: BucketSpec) -> Any:
        """The state for this bucket, which the hook may refuse. If the number last had other parameters, buckets were rebuilt:
        states follow them."""
        made = self._made.get(spec.index)
        if made is not None and made[0] is not spec and made[0] != spec:
            self.store_by_parameter()
            made = None
        if made is None:
            self.hook.check(spec)
            state = self.hook.load(self._saved, spec) if self._saved else self.hook.init(spec)
            for name in spec.names:
                self._saved.pop(name, None)
            made = self._made[spec.index] = (spec, state)
        return made[1]

    def begin(self, spec: BucketSpec, gradient: Tensor) -> int:
        """The reduction of a bucket begins: the number of its step. What an earlier hook has not sent is added to `gradient`."""
        if not isinstance(self.hook, OuterHook):  # whose states a backward does not change
            self.will_change(spec.index)
        step = self._next_steps.get(spec.index, self._step)
        self._next_steps[spec.index] = step + 1
        if self.owed:
            for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True):
                owed = self.owed.pop(name, None)
                if owed is not None:
                    gradient.narrow(0, offset, numel).add_(owed.to(gradient))
        return step

    def fork(self) -> StepFork:
        """A step begins that may be dropped, until `commit` or `drop` of what this returns."""
        self.forked.append(StepFork(self, self._step, dict(self._next_steps), dict(self.owed), dict(self._saved)))
        return self.forked[-1]

    def will_change(self, index: int, undo: Callable[[], object] | None = None) -> None:
        """The state of a bucket is about to change, and something else that `undo` changes back."""
        if not self.forked:
            return
        step, (spec, state) = self.forked[-1], self._made.get(index, (None, None))
        if undo is not None:
            step.undo.append(undo)
        if spec is None or state is None or step.complete or index in step.forks:
            return
        fork = self._spares.pop(index, None)
        if fork is None or fork.state is not state:
            fork = self.hook.fork(state)
        else:
            fork.renew()
        step.forks[index] = spec, fork

    def end_fork(self, step: StepFork, *, dropped: bool) -> None:
        """End a step and all that were forked inside it."""
        while step in self.forked:
            ended = self.forked.pop()
            outside = self.forked[-1] if self.forked else None
            if dropped:
                self._have_again(ended)
            elif outside is not None:
                outside.undo += ended.undo
                if not outside.complete:
                    outside.forks, outside.complete = ended.forks | outside.forks, ended.complete
                continue
            self._spares |= {index: fork for index, (_, fork) in ended.forks.items()}

    @torch.no_grad()
    def _have_again(self, step: StepFork) -> None:
        for undo in reversed(step.undo):
            undo()
        if step.complete:
            self._made.clear()
            self._saved = step.saved
        for index, (spec, fork) in step.forks.items():
            self._made[index] = spec, fork.drop()
        self._step, self._next_steps, self.owed = step.step, step.next_steps, step.owed

    @property
    def steps(self) -> int:
        return max(self._next_steps.values(), default=self._step)

    def next_step(self) -> None:
        """Whatever bucket begins next, it begins the same step: that after the last one of any bucket."""
        self._step = self.steps
        self._next_steps.clear()

    @property
    def specs(self) -> list[BucketSpec]:
        return [spec for spec, _ in self._made.values()]

    def rehearse(self, specs: Iterable[BucketSpec]) -> None:
        """Raise now what `of` would raise for these buckets; nothing is kept."""
        for spec in specs:
            if self._saved:
                self.hook.load(self._saved, spec)

    def store_by_parameter(self) -> None:
        """Buckets will be others: keep every state by parameter, for the new buckets to pick up."""
        for step in self.forked[-1:]:
            for index in self._made:
                self.will_change(index)
            step.complete = True
        for spec, state in self._made.values():
            self._saved.update(self.hook.save(state, spec))
        self._made.clear()
        self._spares.clear()

    def by_name(self) -> dict[str, Any]:
        parts = copy.deepcopy(self._saved)
        for spec, state in self._made.values():
            parts.update(self.hook.save(state, spec))
        return parts

    def transfer_to(self, hook: CommHook, *, step: int) -> HookStates:
        """The states with which another hook takes the place of this one after `step` steps. See Note [Another hook]."""
        parts = self.by_name()
        if hook.structure == self.hook.structure:
            return HookStates(hook, step=step, saved=parts, owed=self.owed)
        # The progress of parameters, which an OuterHook may owe, is no gradient either, and ends with it.
        owed = [] if isinstance(self.hook, OuterHook) else self.hook.owed(parts)
        if owed is None or (owed and Trait.MOMENTUM in self.hook.traits):
            warnings.warn(
                f"{hook!r} takes the place of {self.hook!r}, which keeps gradients that it has not sent and cannot tell which: "
                "they are dropped. Override CommHook.owed to have them sent.",
                stacklevel=5,
            )
            owed = []
        return HookStates(hook, owed=add_owed(self.owed.items(), owed))


def to_dict(states: HookStates, *, rank: int, step: int, **more: Any) -> dict[str, Any]:
    """What `hook_state_dict()` gives: tensors, numbers, text and dicts of them."""
    return {
        "version": VERSION,
        "hook": repr(states.hook),
        "structure": states.hook.structure,
        "rank": rank,
        "step": step,
        "state": states.by_name(),
        "owed": {name: owed.clone() for name, owed in states.owed.items()},
        **more,
    }


def from_dict(saved: Mapping[str, Any], hook: CommHook, *, rank: int) -> HookStates:
    """States as `to_dict` saved them, for this rank: see Note [Whose state it is]. HookError if they are not this hook's."""

    def refused(why: str) -> HookError:
        return HookError(f"load_hook_state_dict on rank {rank} for {hook!r}: {why}", hook=repr(hook))

    missing = _KEYS - saved.keys() if isinstance(saved, Mapping) else _KEYS
    if missing:
        lacking = ", ".join(sorted(missing))
        raise refused(f"this is not a hook state: it lacks {lacking}. Pass what hook_state_dict() gave.")
    if saved["version"] != VERSION:
        raise refused(
            f"the state has format {saved['version']}, and this gradwire reads format {VERSION}. Load it with the gradwire that "
            "saved it."
        )
    if saved.get("structure") != hook.structure:
        raise refused(
            f"the state was saved under the hook {saved['hook']}, and the model now has {hook!r}, whose state is made up otherwise "
            f"({saved.get('structure')!r}, not {hook.structure!r}). Settings may differ, hooks may not: "
            "set the hook under which it was saved, load, and then set the other; or start without it."
        )
    own = saved["rank"] == rank
    parts = saved["state"] if own else hook.shared(saved["state"])
    owed = saved.get("owed", {}) if own else {}
    return HookStates(hook, step=int(saved["step"]), saved=_by_plain_name(parts), owed=_by_plain_name(owed))


def with_ranks(
    saved: Mapping[str, Any], hook: CommHook, old_size: int, new_size: int, *, leavers: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """What `to_dict` saved, for another number of ranks, with what the `leavers` owed in theirs. See Note [Other ranks]."""
    parts, owed = saved["state"], dict(saved["owed"])
    for leaver in leavers:
        parts = hook.inherit(parts, leaver["state"])
        owed = add_owed(owed.items(), leaver["owed"].items())
    owed = {name: one * (new_size / old_size) for name, one in owed.items()}
    return {**saved, "state": hook.rebase(parts, old_size, new_size), "owed": owed}


def owed_norm(saved: Mapping[str, Any], hook: CommHook) -> float:
    """The norm of all that a rank owes in what `to_dict` saved; NaN if that is unknown. Others report it if the rank is lost."""
    owed = hook.owed(saved["state"])
    if owed is None:
        return math.nan
    return math.hypot(*(float(one.abs().double().norm()) for one in add_owed(owed, saved["owed"].items()).values()))


def _by_plain_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): copy.deepcopy(part) for name, part in parts.items()}
