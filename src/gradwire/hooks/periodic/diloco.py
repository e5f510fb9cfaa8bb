"""DiLoCo, whole and in fragments: every few steps an outer optimizer moves the parameters by the mean of the ranks' progress.

The anchor (the parameters that all ranks started the round from) and the outer momentum are the same bits on every rank, because
they are computed from such values only. `visible` is a stage for what is sent of the progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage, check_hooks, checks_arguments, refuse_traits
from gradwire.hooks.base import CommHook, Reduction, Stage, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.combinators.feedback import error_feedback
from gradwire.hooks.composite import Reduce, Wrapped
from gradwire.hooks.compressors.chunked import chunked_top_k
from gradwire.hooks.dense import MEAN, chain
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.pump import begin
from gradwire.hooks.state import Owed, bundle, join_flat, pick, split_flat


@dataclass(slots=True)
class _Anchored:
    """The parameters at the start of the round, the outer momentum, and the inner hook's state."""

    inner: Any
    anchor: Any = None
    """Set by `begin`, which is called first."""
    momentum: Tensor | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class DiLoCo(OuterHook):
    every: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    hook: CommHook
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    made_by: str = "diloco"

    @property
    def outer_collectives(self) -> int | None:
        return self.hook.collectives

    @property
    def equalizes(self) -> bool:
        """Unless something of a rank's own parameters is mixed in."""
        return self.delay == 0 and self.alpha == 0

    def check(self, spec: BucketSpec) -> None:
        """Raise unless the inner hook accepts each parameter: the buckets of outer steps are their own, and dense."""
        inside = replace(_inside(spec), sparse=False)
        for i in range(len(spec.names)):
            self.hook.check(inside.select([i]))

    def begin(self, parameters: Tensor, state: _Anchored, turn: Turn) -> None:
        anchor = parameters.to(wide(turn.spec.dtype), copy=True)
        for name, part in zip(turn.spec.names, anchor.split(turn.spec.numels), strict=True):
            if name in state.given:
                part.copy_(state.given[name].reshape(-1))
        state.anchor, state.given = anchor, {}
        if state.momentum is None and self.outer_momentum:
            state.momentum = torch.zeros_like(anchor)

    def after_step(self, parameters: Tensor, state: _Anchored, turn: Turn) -> Reduction:
        delta = state.anchor - parameters
        inside = replace(turn, spec=_inside(turn.spec), donated=True, anchor=state.anchor)
        return (yield from begin(self.hook, self.hook.reduce, delta, state.inner, inside, like=delta))

    def settle(self, parameters: Tensor, value: Tensor, state: _Anchored, turn: Turn) -> Tensor:
        """Move the anchor by a step of SGD with momentum along that mean; return it, mixed with `alpha` of the parameters."""
        anchor, step = state.anchor, value
        if state.momentum is not None:
            momentum = state.momentum.mul_(self.outer_momentum).add_(value)
            step = value.add(momentum, alpha=self.outer_momentum) if self.nesterov else momentum
        anchor.sub_(step, alpha=self.outer_lr)
        return torch.lerp(anchor, parameters.to(anchor.dtype), self.alpha) if self.alpha else anchor

    def outer_wire_bytes(self, spec: BucketSpec, world_size: int) -> float | None:
        return self.hook.wire_bytes(_inside(spec), world_size)

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

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        """What the inner hook has not sent of this rank's progress, which is no gradient: it ends with the hook."""
        return self.hook.owed(pick(saved, "inner"))

    @property
    def structure(self) -> str:
        """With the number of fragments, which assigns parameters to them, and the inner hook's structure."""
        return f"DiLoCo({self.fragments}: {self.hook.structure})"

    def __repr__(self) -> str:
        if self.made_by == "sparse_loco":
            feedback: Any = self.hook
            top, start = feedback.inner, f"sparse_loco(every={self.every}, outer_lr={self.outer_lr}"
            return f"{start}, decay={feedback.decay}, k={top.k}, chunk={top.chunk})"
        streaming = () if self.made_by == "streaming_diloco" else ("fragments", "delay", "alpha")
        return self._call("made_by", *streaming)


_OUTER = {"every": "[1, inf)", "outer_lr": "(0, inf)", "outer_momentum": "[0, 1)"}


@checks_arguments(**_OUTER)
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
    return DiLoCo(every, outer_lr, outer_momentum, nesterov, _inner("diloco", hook))


@checks_arguments(every="[1, inf)", outer_lr="(0, inf)")
def sparse_loco(
    *, every: int = 30, outer_lr: float = 1.0, decay: float = 0.95, k: int = 64, chunk: int = 4096
) -> OuterHook:
    """SparseLoCo (arXiv 2508.15706, with the settings of arXiv 2603.08163): DiLoCo in which error feedback replaces outer momentum.

    A rank adds its progress to `decay` of what it has not sent, and sends the `k` largest of every `chunk` elements of the sum, in
    two bits each (`chunked_top_k`). A step of SGD along the mean moves the anchor. Requires `model.attach_optimizer(optimizer)`.
    Memory: two tensors of the model's size, in float32 at least.
    On the wire, n ranks: (n - 1) (14 k / 8 + 4) bytes for each chunk of 4,096, every `every` steps. A rank's message is 141 times
    smaller than DiLoCo's in float32; since it goes to all other ranks, 8 ranks send 35 times fewer bytes.
    """
    sparse = chain(error_feedback(decay=decay), chunked_top_k(k, chunk=chunk, bits=2))
    return DiLoCo(every, outer_lr, 0.0, True, sparse, made_by="sparse_loco")


@checks_arguments(fragments="[1, inf)", delay="[0, inf)", alpha="[0, 1)", **_OUTER)
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

    Each fragment, of whole parameters in the model's order, has one every `every` steps. The result is applied `delay` steps later
    (a `hook` of one collective is in flight meanwhile), and mixed with `alpha` of the rank's parameters; the paper uses 0.5.
    With alpha > 0 or fragments > 1 ranks never hold the same parameters: call `model.average_parameters()` at the end of training.
    Memory and total bytes: as `diloco`; at most about 1 / `fragments` of them at a time.
    """
    inner = _inner("streaming_diloco", hook)
    if fragments > every:
        raise UsageError(
            f"streaming_diloco(every={every}, fragments={fragments}): some steps would have several of them. Pass at most {every}."
        )
    if delay >= every:
        raise UsageError(
            f"streaming_diloco(every={every}, delay={delay}): it must be applied before the next is sent. Pass at most {every - 1}."
        )
    return DiLoCo(every, outer_lr, outer_momentum, nesterov, inner, fragments, delay, alpha, "streaming_diloco")


def _inner(name: str, hook: CommHook | None) -> CommHook:
    hook = MEAN if hook is None else hook
    check_hooks(name, hook=hook)
    local = "it communicates nothing. Pass a hook that averages, such as mean()."
    refuse_traits(f"{name}(hook={hook!r})", hook, {Trait.LOCAL: local})
    return hook


def _inside(spec: BucketSpec) -> BucketSpec:
    """The bucket as anchor and inner hook have it: in float32 at least, so that the small progress of one round is not lost."""
    return replace(spec, dtype=wide(spec.dtype))


@dataclass(frozen=True, slots=True, repr=False)
class Visible(Wrapped):
    dtype: torch.dtype

    made_by = "visible"
    dense_only = True
    adds = Trait.ANCHORED

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Reduce the elements of the progress that change the anchor's value in `dtype`, and zeros for the others."""
        anchor = turn.anchor
        if anchor is None or anchor.numel() != grad.numel():
            raise UsageError(
                f"{self!r}: the parameters that these {grad.numel()} elements belong to are not known here. Use it in the hook of "
                "diloco(), and to the left of random_k() and outside hierarchical()."
            )
        unseen = anchor.to(self.dtype) == (anchor - grad).to(self.dtype)  # a NaN is always sent
        return (yield from reduce(grad.masked_fill(unseen, 0), state, turn))


def visible(dtype: torch.dtype) -> Stage:
    """Send only the elements that change the value of their parameter in `dtype`, such as torch.bfloat16. (arXiv 2602.03839)

    Models are computed in bfloat16 and trained in float32, and most of a round's progress in fine-tuning is too small to change the
    bfloat16 value of its parameter. The next forward would not see it, so it can wait.

    It belongs into the hook of `diloco`, where a gradient is a rank's progress since the anchor: an element is sent if the anchor
    minus it is another number in `dtype` than the anchor. Put `error_feedback()` to its left, which keeps the others until their
    sum is visible, and to its right a hook that does not send zeros:

        diloco(every=8, hook=chain(error_feedback(), visible(torch.bfloat16), threshold(value=0.0)))

    On the wire: as the inner hook; with `threshold`, for n ranks, (n - 1) (8 + 8 k) bytes for k visible elements.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            f"visible({dtype!r}): not a floating-point dtype. Pass that of the forward, e.g. torch.bfloat16."
        )
    return NamedStage(f"visible({dtype})", lambda inner: Visible(inner, dtype))
