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
A step that all ranks drop because a gradient is not finite has changed the states, and what they sent in it is lost. So where steps
may be dropped, each state is copied before its reduction, and the copies take their place if the step is dropped: in the memory of
the tensors of which they are copies, since CUDA graphs of the reduction contain its addresses.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import HookError
from gradwire.hooks.base import CommHook
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.state import add_owed
from gradwire.reducer.buckets.layout import plain_name

VERSION = 2
"""Of the form of `hook_state_dict()`."""
_KEYS = {"version", "hook", "rank", "step", "state"}
_Copies = list[tuple[Tensor, Tensor]]


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
        self.can_roll_back = False
        """Whether what a bucket has is copied before each reduction, for `roll_back`."""
        self._before: dict[int, tuple[tuple[BucketSpec, Any] | None, _Copies, int | None, dict[str, Tensor]]] = {}

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
        if self.can_roll_back:
            made, memo = self._made.get(spec.index), dict[int, Any]()
            if made is not None and not isinstance(self.hook, OuterHook):  # whose states a backward does not change
                made = made[0], copy.deepcopy(made[1], memo)
            copies = [(of, memo[id(of)]) for of in memo.get(id(memo), ()) if isinstance(of, Tensor)]
            owing = {name: self.owed[name] for name in spec.names if name in self.owed}
            self._before[spec.index] = made, copies, self._next_steps.get(spec.index), owing
        step = self._next_steps.get(spec.index, self._step)
        self._next_steps[spec.index] = step + 1
        if self.owed:
            for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True):
                owed = self.owed.pop(name, None)
                if owed is not None:
                    gradient.narrow(0, offset, numel).add_(owed.to(gradient))
        return step

    def roll_back(self) -> None:
        """The step is dropped: have what was there before it. All its reductions are over."""
        for index, (made, copies, step, owed) in self._before.items():
            if made is not None:
                self._made[index] = made
                _keep_addresses(copies)
            if step is None:
                self._next_steps.pop(index, None)
            else:
                self._next_steps[index] = step
            self.owed.update(owed)
        self._before.clear()

    def commit(self) -> None:
        self._before.clear()

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
        for spec, state in self._made.values():
            self._saved.update(self.hook.save(state, spec))
        self._made.clear()

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
        owed = add_owed(self.owed, self.hook.owed(parts))
        if owed is None:
            warnings.warn(
                f"{hook!r} takes the place of {self.hook!r}, which keeps gradients that it has not sent and cannot tell which: "
                "they are dropped. Override CommHook.owed to have them sent.",
                stacklevel=5,
            )
        return HookStates(hook, owed=self.owed if owed is None else owed)


@torch.no_grad()
def _keep_addresses(copies: _Copies) -> None:
    """Move copies to the memory of what they are copies of."""
    plain = (Tensor, torch.nn.Parameter)
    if all(type(t) in plain and not t.is_sparse and torch._debug_has_internal_overlap(t) != 1 for t, _ in copies):
        for tensor, copied in copies:
            copied.data = tensor.copy_(copied).data


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
    doing = f"load_hook_state_dict on rank {rank}"
    if not isinstance(saved, Mapping) or not saved.keys() >= _KEYS:
        missing = sorted(_KEYS - saved.keys()) if isinstance(saved, Mapping) else sorted(_KEYS)
        raise HookError(
            f"{doing} for {hook!r}: this is not a hook state: it lacks {', '.join(missing)}. Pass what hook_state_dict() gave.",
            hook=repr(hook),
        )
    if saved["version"] != VERSION:
        raise HookError(
            f"{doing} for {hook!r}: the state has format {saved['version']}, and this gradwire reads format {VERSION}. "
            "Load it with the gradwire that saved it.",
            hook=repr(hook),
        )
    if saved.get("structure") != hook.structure:
        raise HookError(
            f"{doing}: the state was saved under the hook {saved['hook']}, and the model now has {hook!r}, whose state is made up "
            f"otherwise ({saved.get('structure')!r}, not {hook.structure!r}). Settings may differ, hooks may not: "
            "set the hook under which it was saved, load, and then set the other; or start without it.",
            hook=repr(hook),
        )
    own = saved["rank"] == rank
    parts = saved["state"] if own else hook.shared(saved["state"])
    owed = saved.get("owed", {}) if own else {}
    return HookStates(hook, step=int(saved["step"]), saved=_by_plain_name(parts), owed=_by_plain_name(owed))


def _by_plain_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): copy.deepcopy(part) for name, part in parts.items()}
