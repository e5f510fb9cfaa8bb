"""DiLoCo, whole and in fragments: every few steps an outer optimizer moves the parameters by the mean of the ranks' progress.

Each rank trains by itself with its own optimizer. See `periodic.base` for the two halves of such a hook.

Note [What a round makes equal]
After an outer step of `local_sgd` and `diloco` all ranks hold the same bits. The anchor of DiLoCo, the parameters that all ranks
started the round from, and the outer momentum are the same bits on every rank at any time: each rank computes them from values
that are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.dense import mean
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.periodic.base import OuterHook, check_every
from gradwire.hooks.pump import begin
from gradwire.hooks.state import bundle, join_flat, pick, split_flat


@dataclass(slots=True)
class _Anchored:
    """The parameters from which the round started, the outer momentum, and the state of the hook inside."""

    inner: Any
    anchor: Tensor | None = None
    momentum: Tensor | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiLoCo(OuterHook):
    """See `diloco`."""

    hook: CommHook
    every: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool

    @property
    def outer_collectives(self) -> int | None:
        """As many as the hook inside."""
        return self.hook.collectives

    @property
    def equalizes(self) -> bool:
        """The anchor moves in the same way on every rank."""
        return True

    def due(self, step: int) -> tuple[int, ...]:
        """After every `every`-th step."""
        return () if step % self.every else (0,)

    def check(self, spec: BucketSpec) -> None:
        """The hook inside, which sees whole parameters, in buckets of the outer half's own; they are dense."""
        inside = replace(_inside(spec), sparse=False)
        for name, shape, stride in zip(spec.names, spec.shapes, spec.strides, strict=True):
            self.hook.check(replace(inside, names=(name,), shapes=(shape,), strides=(stride,)))

    # -- an outer step -------------------------------------------------------------------------------------------------

    def begin(self, parameters: Tensor, state: _Anchored, turn: Turn) -> None:
        """The round starts from the parameters; from what was loaded, where something was."""
        anchor = parameters.to(wide(turn.spec.dtype), copy=True)
        for name, place in zip(turn.spec.names, _parts(anchor, turn.spec), strict=True):
            if name in state.given:
                place.copy_(state.given[name].reshape(-1))
        state.anchor, state.given = anchor, {}
        if state.momentum is None and self.outer_momentum:
            state.momentum = torch.zeros_like(anchor)

    def after_step(self, parameters: Tensor, state: _Anchored, turn: Turn) -> Reduction:
        """The mean over the ranks of how far they went, by the hook inside."""
        anchor = _anchor(state)
        delta = anchor - parameters
        inside = replace(turn, spec=_inside(turn.spec), donated=True)
        inner = self.hook.reduce(delta, state.inner, inside)
        return (yield from begin(inner, self.hook, inside, delta.numel(), delta.dtype))

    def settle(self, parameters: Tensor, came: Tensor, state: _Anchored, turn: Turn) -> Tensor:
        """A step of SGD with momentum, with that mean for a gradient, moves the anchor; the parameters go on from it."""
        anchor, step = _anchor(state), came
        if state.momentum is not None:
            momentum = state.momentum.mul_(self.outer_momentum).add_(came)
            step = came.add(momentum, alpha=self.outer_momentum) if self.nesterov else momentum
        return anchor.sub_(step, alpha=self.outer_lr)

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        """What the hook inside sends."""
        return self.hook.wire_bytes(_inside(spec), world_size)

    # -- state ---------------------------------------------------------------------------------------------------------

    def init(self, spec: BucketSpec) -> _Anchored:
        """No anchor yet."""
        return _Anchored(self.hook.init(_inside(spec)))

    def save(self, state: _Anchored, spec: BucketSpec) -> dict[str, Any]:
        """Anchor, momentum, and what the hook inside keeps."""
        parts: dict[str, Mapping[str, Any]] = {"inner": self.hook.save(state.inner, _inside(spec))}
        anchor = state.given if state.anchor is None else split_flat(state.anchor, spec)
        parts["anchor"] = {name: anchor[name] for name in spec.names if name in anchor}
        if state.momentum is not None:
            parts["momentum"] = split_flat(state.momentum, spec)
        return bundle(**parts)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Anchored:
        """The same; a parameter that is not in it has its anchor where it is, and no momentum."""
        inside = _inside(spec)
        sizes = dict(zip(spec.names, spec.numels, strict=True))
        given = {n: a for n, a in pick(saved, "anchor").items() if n in sizes and a.numel() == sizes[n]}
        kept = {n: m for n, m in pick(saved, "momentum").items() if n in sizes}
        momentum = join_flat(kept, inside) if kept else None
        return _Anchored(self.hook.load(pick(saved, "inner"), inside), None, momentum, given)

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Anchor and momentum, and of the hook inside what its ranks share."""
        inner = self.hook.shared(pick(saved, "inner"))
        return bundle(anchor=pick(saved, "anchor"), momentum=pick(saved, "momentum"), inner=inner)

    def _settings(self) -> str:
        outer = f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, nesterov={self.nesterov}"
        return f"{outer}, hook={self.hook!r}"

    @property
    def structure(self) -> str:
        """Anchor, momentum, and what the hook inside keeps; which parameters are in which fragment matters too."""
        return f"DiLoCo({self.fragments}: {self.hook.structure})"

    def __repr__(self) -> str:
        return f"diloco(every={self.every}, {self._settings()})"


def diloco(
    *,
    every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    hook: CommHook | None = None,
) -> OuterHook:
    """DiLoCo (arXiv 2311.08105): every `every` steps the mean way that the ranks went is a gradient for an outer optimizer.

    Each rank trains by itself. Then how far it went from the anchor (the parameters all started from) is averaged by `hook`,
    which may be any, also one that compresses; a Nesterov step along that mean moves the anchor; and all go on from there. It
    wants `model.attach_optimizer(optimizer)`. Memory: two tensors of the model's size, in float32 at least.
    On the wire: what `hook` sends for the parameters in float32 at least, every `every` steps.
    """
    _check_diloco("diloco", every, outer_lr, outer_momentum, hook)
    return DiLoCo(hook or mean(), every, outer_lr, outer_momentum, nesterov)


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(DiLoCo):
    """See `streaming_diloco`."""

    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def equalizes(self) -> bool:
        """Where nothing of a rank's own remains."""
        return self.delay == 0 and self.alpha == 0

    def due(self, step: int) -> tuple[int, ...]:
        """Each fragment after every `every`-th step, evenly spread."""
        return tuple(f for f in range(self.fragments) if (step - f * self.every // self.fragments) % self.every == 0)

    def settle(self, parameters: Tensor, came: Tensor, state: _Anchored, turn: Turn) -> Tensor:
        """As DiLoCo; `alpha` of where this rank is now stays."""
        # Spelled out: without arguments it would look for the class that the dataclass decorator has replaced.
        anchor = DiLoCo.settle(self, parameters, came, state, turn)
        return torch.lerp(anchor, parameters.to(anchor.dtype), self.alpha) if self.alpha else anchor

    def __repr__(self) -> str:
        what = f"every={self.every}, fragments={self.fragments}, delay={self.delay}, alpha={self.alpha}"
        return f"streaming_diloco({what}, {self._settings()})"


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

    Each fragment has one every `every` steps, and at most about 1 / `fragments` of the bytes travel at a time. What was sent is
    applied `delay` steps later (a `hook` of one collective is then on its way meanwhile), and mixed with where the rank has got
    to: `alpha` of that stays. The paper has alpha 0.5. With alpha > 0 or fragments > 1 ranks do not hold the same parameters at
    any step; `model.average_parameters()` ends training. Fragments are whole parameters, in the model's order. Memory and bytes
    in all: as `diloco`.
    """
    _check_diloco("streaming_diloco", every, outer_lr, outer_momentum, hook)
    check_every("streaming_diloco", fragments=fragments)
    if fragments > every:
        raise UsageError(
            f"streaming_diloco(every={every}, fragments={fragments}): some steps would have several fragments. Pass at most as "
            "many fragments as there are steps in a round."
        )
    if not isinstance(delay, int) or not 0 <= delay < every:
        raise UsageError(
            f"streaming_diloco(every={every}, delay={delay!r}): what was sent must be applied before the fragment is sent again. "
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
            f"{name}(outer_lr={lr}): not a positive number. The paper has 0.7; 1 with outer_momentum=0 averages."
        )
    if not 0 <= momentum < 1:
        raise UsageError(f"{name}(outer_momentum={momentum}): not in [0, 1). The paper has 0.9; 0 leaves it out.")
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
    assert state.anchor is not None, "begin() comes first"
    return state.anchor
