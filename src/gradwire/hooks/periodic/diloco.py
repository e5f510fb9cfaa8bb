"""DiLoCo, whole and in fragments: every few steps an outer optimizer moves the parameters by the mean of the ranks' progress.

The anchor (the parameters that all ranks started the round from) and the outer momentum are the same bits on every rank, because
they are computed from such values only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks, checks_numbers
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.dense import mean
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.periodic.base import OuterHook, check_every
from gradwire.hooks.pump import begin
from gradwire.hooks.state import bundle, join_flat, pick, split_flat


@dataclass(slots=True)
class _Anchored:
    """The parameters at the start of the round, the outer momentum, and the inner hook's state."""

    inner: Any
    anchor: Tensor | None = None
    momentum: Tensor | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiLoCo(OuterHook):
    """The hook of `diloco`."""

    hook: CommHook
    every: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool

    @property
    def outer_collectives(self) -> int | None:
        return self.hook.collectives

    @property
    def equalizes(self) -> bool:
        return True

    def due(self, step: int) -> tuple[int, ...]:
        return () if step % self.every else (0,)

    def check(self, spec: BucketSpec) -> None:
        """Raise unless the inner hook accepts each parameter: the buckets of outer steps are their own, and dense."""
        inside = replace(_inside(spec), sparse=False)
        for name, shape, stride in zip(spec.names, spec.shapes, spec.strides, strict=True):
            self.hook.check(replace(inside, names=(name,), shapes=(shape,), strides=(stride,)))

    # -- an outer step -------------------------------------------------------------------------------------------------

    def begin(self, parameters: Tensor, state: _Anchored, turn: Turn) -> None:
        """Set the anchor to the parameters, or to what was loaded."""
        anchor = parameters.to(wide(turn.spec.dtype), copy=True)
        for name, view in zip(turn.spec.names, _parts(anchor, turn.spec), strict=True):
            if name in state.given:
                view.copy_(state.given[name].reshape(-1))
        state.anchor, state.given = anchor, {}
        if state.momentum is None and self.outer_momentum:
            state.momentum = torch.zeros_like(anchor)

    def after_step(self, parameters: Tensor, state: _Anchored, turn: Turn) -> Reduction:
        """Average the ranks' progress since the anchor with the inner hook."""
        anchor = _anchor(state)
        delta = anchor - parameters
        inside = replace(turn, spec=_inside(turn.spec), donated=True)
        start = partial(self.hook.reduce, delta, state.inner, inside)
        return (yield from begin(start, self.hook, inside, delta.numel(), delta.dtype))

    def settle(self, parameters: Tensor, value: Tensor, state: _Anchored, turn: Turn) -> Tensor:
        """Move the anchor by a step of SGD with momentum along that mean; the parameters continue from it."""
        anchor, step = _anchor(state), value
        if state.momentum is not None:
            momentum = state.momentum.mul_(self.outer_momentum).add_(value)
            step = value.add(momentum, alpha=self.outer_momentum) if self.nesterov else momentum
        return anchor.sub_(step, alpha=self.outer_lr)

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        return self.hook.wire_bytes(_inside(spec), world_size)

    # -- state ---------------------------------------------------------------------------------------------------------

    def init(self, spec: BucketSpec) -> _Anchored:
        return _Anchored(self.hook.init(_inside(spec)))

    def save(self, state: _Anchored, spec: BucketSpec) -> dict[str, Any]:
        parts: dict[str, Mapping[str, Any]] = {"inner": self.hook.save(state.inner, _inside(spec))}
        anchor = state.given if state.anchor is None else split_flat(state.anchor, spec)
        parts["anchor"] = {name: anchor[name] for name in spec.names if name in anchor}
        if state.momentum is not None:
            parts["momentum"] = split_flat(state.momentum, spec)
        return bundle(**parts)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Anchored:
        """The same; a parameter that was not saved is its own anchor, with zero momentum."""
        inside = _inside(spec)
        sizes = dict(zip(spec.names, spec.numels, strict=True))
        given = {n: a for n, a in pick(saved, "anchor").items() if n in sizes and a.numel() == sizes[n]}
        kept = {n: m for n, m in pick(saved, "momentum").items() if n in sizes}
        momentum = join_flat(kept, inside) if kept else None
        return _Anchored(self.hook.load(pick(saved, "inner"), inside), None, momentum, given)

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        inner = self.hook.shared(pick(saved, "inner"))
        return bundle(anchor=pick(saved, "anchor"), momentum=pick(saved, "momentum"), inner=inner)

    def _settings(self) -> str:
        outer = f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, nesterov={self.nesterov}"
        return f"{outer}, hook={self.hook!r}"

    @property
    def structure(self) -> str:
        """With the number of fragments, which assigns parameters to them, and the inner hook's structure."""
        return f"DiLoCo({self.fragments}: {self.hook.structure})"

    def __repr__(self) -> str:
        return f"diloco(every={self.every}, {self._settings()})"


@checks_numbers
def diloco(
    *,
    every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    hook: CommHook | None = None,
) -> OuterHook:
    """DiLoCo (arXiv 2311.08105): every `every` steps the mean of the ranks' progress is the gradient of an outer optimizer.

    Each rank trains by itself. Then its difference from the anchor (the parameters at the start of the round) is averaged by
    `hook`, which may compress it; a Nesterov step along that mean moves the anchor; and all ranks continue from there. Requires
    `model.attach_optimizer(optimizer)`. Memory: two tensors of the model's size, in float32 at least.
    On the wire: what `hook` sends for the parameters in float32 at least, every `every` steps.
    """
    _check_diloco("diloco", every, outer_lr, outer_momentum, hook)
    return DiLoCo(hook or mean(), every, outer_lr, outer_momentum, nesterov)


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(DiLoCo):
    """The hook of `streaming_diloco`."""

    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def equalizes(self) -> bool:
        """Only if nothing of a rank's own parameters is mixed in."""
        return self.delay == 0 and self.alpha == 0

    def due(self, step: int) -> tuple[int, ...]:
        """Each fragment every `every` steps, evenly spread."""
        return tuple(f for f in range(self.fragments) if (step - f * self.every // self.fragments) % self.every == 0)

    def settle(self, parameters: Tensor, value: Tensor, state: _Anchored, turn: Turn) -> Tensor:
        """As DiLoCo, mixed with `alpha` of this rank's current parameters."""
        # Spelled out: without arguments it would look for the class that the dataclass decorator has replaced.
        anchor = DiLoCo.settle(self, parameters, value, state, turn)
        return torch.lerp(anchor, parameters.to(anchor.dtype), self.alpha) if self.alpha else anchor

    def __repr__(self) -> str:
        what = f"every={self.every}, fragments={self.fragments}, delay={self.delay}, alpha={self.alpha}"
        return f"streaming_diloco({what}, {self._settings()})"


@checks_numbers
def streaming_diloco(
    *,
    every: int,
    fragments: int,
    delay: int = 0,
    alpha: float = 0.0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    hook: CommHook | None = None,
) -> OuterHook:
    """Streaming DiLoCo (arXiv 2501.18512): DiLoCo in which `fragments` of the parameters have their outer steps in turn.

    Each fragment has one every `every` steps, so at most about 1 / `fragments` of the bytes are sent at a time. The result is
    applied `delay` steps later (a `hook` of one collective is in flight meanwhile), and mixed with `alpha` of the rank's current
    parameters. The paper uses alpha 0.5. With alpha > 0 or fragments > 1 ranks never hold the same parameters; call
    `model.average_parameters()` at the end of training. Fragments are whole parameters, in the model's order. Memory and total
    bytes: as `diloco`.
    """
    _check_diloco("streaming_diloco", every, outer_lr, outer_momentum, hook)
    check_every("streaming_diloco", fragments=fragments)
    if fragments > every:
        raise UsageError(
            f"streaming_diloco(every={every}, fragments={fragments}): some steps would have several fragments. Pass at most as "
            "many fragments as a round has steps."
        )
    if not 0 <= delay < every:
        raise UsageError(
            f"streaming_diloco(every={every}, delay={delay}): what was sent must be applied before the fragment is sent again. "
            f"Pass a whole number from 0 to {every - 1}."
        )
    if not 0 <= alpha < 1:
        raise UsageError(
            f"streaming_diloco(alpha={alpha}): not between 0 and 1. Pass the share of the rank's own parameters that stays."
        )
    return StreamingDiLoCo(
        hook or mean(), every, outer_lr, outer_momentum, nesterov, fragments=fragments, delay=delay, alpha=alpha
    )


def _check_diloco(name: str, every: int, lr: float, momentum: float, hook: CommHook | None) -> None:
    check_every(name, every=every)
    if not (lr > 0 and math.isfinite(lr)):
        raise UsageError(
            f"{name}(outer_lr={lr}): not a positive number. The paper uses 0.7; 1 with outer_momentum=0 averages."
        )
    if not 0 <= momentum < 1:
        raise UsageError(f"{name}(outer_momentum={momentum}): not in [0, 1). The paper uses 0.9; 0 disables it.")
    if hook is not None:
        check_hooks(name, hook=hook)
    if hook is not None and hook.local:
        raise UsageError(f"{name}(hook={hook!r}): it communicates nothing. Pass a hook that averages, such as mean().")


def _inside(spec: BucketSpec) -> BucketSpec:
    """The bucket as anchor and inner hook have it: in float32 at least, so that the small progress of one round is not lost."""
    return replace(spec, dtype=wide(spec.dtype))


def _parts(flat: Tensor, spec: BucketSpec) -> list[Tensor]:
    return [flat.narrow(0, offset, numel) for offset, numel in zip(spec.offsets, spec.numels, strict=True)]


def _anchor(state: _Anchored) -> Tensor:
    assert state.anchor is not None, "begin() must be called first"
    return state.anchor
