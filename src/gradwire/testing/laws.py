"""`check_hook`: the laws that every communication hook must satisfy, tested on simulated ranks.

A law is a function below that yields a sentence, with numbers, for each violation; the first is raised. A hook's traits decide
which apply: `local` hooks need not agree, those that remember, weigh or distort are not combined with error feedback, and
`wire_bytes` and `collectives` are checked where they are known.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Layout, all_gather_into_tensor
from gradwire.errors import GradwireError, HookError
from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, chain, error_feedback
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import Trait, Turn
from gradwire.hooks.composite import Wrapped
from gradwire.testing.hook_trial import HookTrial, difference, equal_states, same_bits, wide
from gradwire.testing.rank_laws import conserves, forks

SHAPES: tuple[tuple[int, ...], ...] = ((16, 8), (16,), (), (0,), (3, 5, 2))
"""The default parameters of a bucket: a matrix, a vector, a scalar, an empty tensor, and an irregular shape."""


Law = Callable[[HookTrial], Iterator[str]]

_SHORT, _TIMES = 24, 3
"""Minimum steps after which `pays_back` checks the average over time, and the factor by which it then waits longer."""
_MOST = 1000
"""Maximum steps in which a hook must send every element once. One that sends less than a thousandth may fail."""

_CLEAN = 8
"""Steps after which `recovers` expects finite values: some hooks keep gradients for a few steps before they send them."""


def agree(trial: HookTrial) -> Iterator[str]:
    """All ranks hold the same bits."""
    for step, done in enumerate(trial.train(0 if trial.hook.local else trial.steps)):
        first = done.reduced[0].value
        for rank, (value, _) in enumerate(done.reduced):
            if not same_bits(value, first):
                yield f"in step {step} rank {rank} has {difference(value, first)} as rank 0"


def kept(trial: HookTrial) -> Iterator[str]:
    """Value and sent have the gradient's length, dtype and device."""
    spec, done = trial.spec, trial.run(trial.gradients())
    for rank, reduced in enumerate(done.reduced):
        for name, tensor in zip(Reduced._fields, reduced, strict=True):
            facts = (tensor.numel(), tensor.dtype, tensor.device.type)
            if facts != (spec.numel, spec.dtype, spec.device.type):
                yield f"`{name}` of rank {rank} is {tensor.dtype}{list(tensor.shape)} on {tensor.device}"


def unwritten(trial: HookTrial) -> Iterator[str]:
    """A gradient that was not donated is not written, and a donated one yields the same value."""
    brought = trial.gradients()
    before = [g.clone() for g in brought]
    plain = trial.run(brought)
    if not all(map(same_bits, brought, before)):
        yield "a gradient was written, though it was not donated"
    donated = trial.run(brought, donated=True)
    for rank, (one, other) in enumerate(zip(plain.reduced, donated.reduced, strict=True)):
        if not same_bits(one.value, other.value):
            yield f"a donated gradient gives rank {rank} a different value"


def repeatable(trial: HookTrial) -> Iterator[str]:
    """The same gradients in the same step give the same bits: all randomness is seeded."""
    one, two = (trial.run(trial.gradients(), step=3) for _ in range(2))
    for rank, (a, b) in enumerate(zip(one.reduced, two.reduced, strict=True)):
        if not same_bits(a.value, b.value):
            yield f"rank {rank} has {difference(a.value, b.value)} in a second run"


def alike(trial: HookTrial) -> Iterator[str]:
    """Turns with the same `capture_key` differ in nothing but what `turn.on_device` has put on the device."""
    seen: dict[Any, int] = {}
    for step in range(4):
        key = trial.hook.capture_key(Turn(trial.spec, 0, trial.ranks, step, donated=True))
        other = seen.setdefault(key, step)
        if key is None or other == step:
            continue
        replayed = replace(trial, hook=_Replayed(trial.hook, other))
        done, known = (one.run(trial.gradients(), step=step) for one in (trial, replayed))
        for rank, (a, b) in enumerate(zip(done.reduced, known.reduced, strict=True)):
            if not same_bits(a.value, b.value):
                yield f"capture_key is {key!r} in steps {other} and {step}, but rank {rank} has {difference(a.value, b.value)}"


@dataclass(frozen=True, slots=True)
class _Replayed(Wrapped):
    """A hook as it was captured in another step."""

    step: int

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        captured = replace(turn, step=self.step, origin=(turn.rank, self.step), varying=turn.on_device)
        return (yield from self.inner.reduce(grad, state, captured))


def mean_of_sent(trial: HookTrial) -> Iterator[str]:
    """`value` is the mean of all ranks' `sent`, even if fewer ranks count than take part."""
    if trial.hook.local:
        return
    for absent in (0, 1) if trial.ranks > 1 else (0,):
        brought, divisor = trial.gradients(), trial.ranks - absent
        # Only hooks that weigh use them.
        weights = [1.0 + rank for rank in range(trial.ranks)]
        if absent:  # the last rank has run out of inputs
            brought[-1].zero_()
            weights[-1] = 0.0
        states: Any = None
        for step in range(2 if trial.spec.numel else 0):
            done = trial.run(brought, states, step=step, divisor=divisor if absent else None, weights=weights)
            states = done.states
            sent = torch.stack([wide(s) for _, s in done.reduced])
            scale = float(sent.abs().max()) * trial.ranks / divisor
            off = float((wide(done.reduced[0].value) - sent.sum(0) / divisor).abs().max())
            if not off <= (stated := trial.hook.error(trial.spec)) * scale:
                yield (
                    f"in step {step}, with {divisor} of {trial.ranks} ranks that have inputs, `value` is {off:.3g} off the mean of "
                    f"`sent`, whose largest element is {scale:.3g}; {type(trial.hook).__name__}.error(spec) states {stated:.3g} of "
                    "it. Multiply a mean over all ranks by `turn.share`. A hook that rounds `value` beyond its `sent` states by "
                    "how much in its error method"
                )


def pays_back(trial: HookTrial) -> Iterator[str]:
    """With error feedback the average over time converges to the true mean: the residual stays bounded."""
    hook, brought = trial.hook, trial.gradients()
    feedback_is_not_for = Trait.LOCAL | Trait.DISTORTS | Trait.VOTES | Trait.WEIGHS
    if hook.traits & feedback_is_not_for or not trial.spec.numel:
        return
    if not hook.remembers:
        hook = chain(error_feedback(), hook)
    elif not repr(hook).startswith("error_feedback()"):
        return
    truth = torch.stack([wide(g) for g in brought]).mean(0)
    states: Any = None
    total = torch.zeros_like(truth)
    off: list[float] = []
    sent = 0

    def worst_after(steps: int) -> float:
        """The largest error of the last twenty steps: the residual fluctuates, and may be close to zero in one step by chance."""
        nonlocal states, sent
        while len(off) < steps:
            done = replace(trial, hook=hook).run(brought, states, step=len(off))
            states = done.states
            total.add_(wide(done.reduced[0].value))
            sent += max(int(mine.count_nonzero()) for _, mine in done.reduced)
            off.append(float((total / (len(off) + 1) - truth).norm() / truth.norm()))
        return max(off[-20:])

    early, short = worst_after(_SHORT), _SHORT
    # The residual is bounded once a hook has sent every element, so one that sends few at a time needs more steps.
    if sent and (short := max(_SHORT, min(_MOST, math.ceil(1.5 * _SHORT * trial.spec.numel / sent)))) > _SHORT:
        early = worst_after(short)
    rounding = 64 * torch.finfo(trial.spec.dtype).eps + hook.error(trial.spec) * trial.ranks
    # Random rounding to few bits may take longer than expected; a residual that grows, or leaks, never comes down.
    if not any((late := worst_after(short * _TIMES**n)) <= max(0.5**n * early, rounding) for n in (1, 2)):
        yield (
            f"the average over about {short} steps is up to {early:.3g} off the true mean, over about {len(off)} still {late:.3g}"
        )


def counted(trial: HookTrial) -> Iterator[str]:
    """The bytes on the wire and the number of collectives are those that the hook declares."""
    for step, done in enumerate(trial.train(trial.steps)):
        told = trial.hook.wire_bytes(trial.spec, trial.ranks, step)
        if told is not None and not math.isclose(told, done.wire_bytes, rel_tol=1e-9, abs_tol=1e-6):
            yield f"in step {step} {done.wire_bytes} bytes were sent; wire_bytes returned {told}"
        if trial.hook.collectives not in (None, len(done.exchanges)):
            yield f"{len(done.exchanges)} collectives; `collectives` is {trial.hook.collectives}"


def saved(trial: HookTrial) -> Iterator[str]:
    """State survives torch.save and a different bucket layout unchanged."""
    (_, trained), (_, again) = trial.train(2), trial.train(2)
    states = []
    for rank, state in enumerate(trained.states):
        taken = trial.hook.save(state, trial.spec)
        if other := sorted(set(taken) - set(trial.spec.names)):
            yield f"save() names {other}, which are not parameters"
        torch.save(taken, file := io.BytesIO())
        file.seek(0)
        back, apart = torch.load(file, weights_only=True), dict[str, Any]()
        for half in _cut(trial.spec):
            apart |= trial.hook.save(trial.hook.load(back, half), half)
        if not equal_states(taken, trial.hook.save(trial.hook.load(apart, trial.spec), trial.spec)):
            yield f"rank {rank}'s state has changed after a round trip through other buckets"
        states.append(trial.hook.load(back, trial.spec))
    brought = trial.gradients(2)
    went_on = trial.run(brought, again.states, step=2).reduced[0].value
    if not same_bits(trial.run(brought, states, step=2).reduced[0].value, went_on):
        yield "a step from loaded state gives a different value than from the state itself"


def from_nothing(trial: HookTrial) -> Iterator[str]:
    """Zero gradients stay zero, and finite."""
    zeros = [torch.zeros_like(g) for g in trial.gradients()]
    value = trial.run(zeros).reduced[0].value
    if not bool(torch.isfinite(value).all()):
        yield "zero gradients gave a non-finite value"


def recovers(trial: HookTrial) -> Iterator[str]:
    """A step with a NaN and an infinite element on one rank does not spoil later steps: eight steps later all values are finite."""
    if not trial.spec.numel:
        return
    brought = trial.gradients()
    brought[-1][0], brought[-1][trial.spec.numel // 2] = float("nan"), float("inf")
    states = trial.run(brought).states
    for step in range(1, _CLEAN + 1):
        done = trial.run(trial.gradients(step), states, step=step)
        states = done.states
    for rank, (value, _) in enumerate(done.reduced):
        if not bool(torch.isfinite(value).all()):
            yield f"rank {rank} has a non-finite value {_CLEAN} steps after the last non-finite gradient"


def passes_nonfinite(trial: HookTrial) -> Iterator[str]:
    """A hook that declares it passes a NaN or infinity of any rank on to all ranks."""
    if not trial.hook.passes_nonfinite or not trial.spec.numel:
        return
    for bad in (float("nan"), float("inf")):
        for culprit in range(trial.ranks):
            brought = trial.gradients()
            brought[culprit][trial.spec.numel // 2] = bad
            for rank, (value, _) in enumerate(trial.run(brought).reduced):
                if bool(torch.isfinite(value).all()):
                    yield f"rank {rank} has finite values only, with {bad} on rank {culprit}"


# `repeatable` is first: randomness without a seed breaks other laws too.
LAWS: tuple[Law, ...] = (repeatable, alike, agree, kept, unwritten, mean_of_sent, pays_back, counted, saved)
LAWS += (from_nothing, recovers, passes_nonfinite, forks, conserves)


def check_hook(
    hook: CommHook,
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    steps: int = 4,
    laws: Sequence[Law] = LAWS,
    hosts: Sequence[Sequence[int]] | Layout | None = None,
) -> None:
    """Raise HookError unless `hook` satisfies the laws, on simulated ranks and buckets of these shapes. No group is needed.

    With `hosts`, such as [[0, 1], [2, 3]], it is tested on those ranks instead of `world_sizes`. Its `reduce_scatter`, if any, must
    satisfy the same laws when an all-gather follows it.

    >>> from gradwire.hooks import cast, mean
    >>> check_hook(chain(cast(torch.bfloat16), mean()))
    """
    check_hooks("check_hook", hook=hook)
    parameters = [(f"layer{i}.weight", torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)]
    spec = BucketSpec.of(0, parameters, torch.empty(0, dtype=dtype, device=device))
    layout = hosts if hosts is None or isinstance(hosts, Layout) else Layout(tuple(tuple(host) for host in hosts))
    for ranks in world_sizes if layout is None else (layout.size,):
        trials = [HookTrial(hook, spec, ranks, seed, steps, layout)]
        if hook.scatters:
            trials.append(HookTrial(Gathered(hook), _divisible(spec, ranks), ranks, seed, steps, layout))
        for trial, law in itertools.product(trials, laws):
            if law is conserves and trial is not trials[0]:
                continue  # a state is that of `reduce`, and with another number of ranks rows would not be equal
            problem: Exception | None = None
            try:
                what = next(law(trial), "")
            except GradwireError as error:
                if isinstance(error, HookError):
                    raise
                what, problem = f"{type(error).__name__}: {error}", error
            if what:
                raise HookError(
                    f"check_hook({trial.hook!r}) on {ranks} ranks, a bucket of {dtype} parameters "
                    f"{', '.join(map(str, shapes))}: the law {law.__name__!r} does not hold: {what}.",
                    hook=repr(hook),
                ) from problem


@dataclass(frozen=True, slots=True, repr=False)
class Gathered(Wrapped):
    """A hook's `reduce_scatter`, followed by an all-gather of the rows, so that the laws of `reduce` apply to it."""

    collectives = None

    @property
    def passes_nonfinite(self) -> bool:
        return self.inner.passes_nonfinite

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        reduction = self.inner.reduce_scatter(grad, state, turn)
        assert reduction is not None
        row, sent = yield from reduction
        value = row.new_empty(grad.numel())
        yield all_gather_into_tensor(value, row)
        return Reduced(value, sent)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        scattered = self.inner.scatter_wire_bytes(spec, world_size, step)
        return None if scattered is None else scattered + (world_size - 1) / world_size * spec.nbytes

    def __repr__(self) -> str:
        return f"{self.inner!r}, by reduce_scatter"


def _divisible(spec: BucketSpec, ranks: int) -> BucketSpec:
    """The bucket with one more parameter, so that it has rows of equal length."""
    name, shape = f"layer{len(spec.names)}.weight", (-spec.numel % ranks,)
    return replace(spec, names=(*spec.names, name), shapes=(*spec.shapes, shape), strides=(*spec.strides, (1,)))


def _cut(spec: BucketSpec) -> list[BucketSpec]:
    """The same parameters in two buckets, in reverse order."""
    fields = list(zip(spec.names, spec.shapes, spec.strides, strict=True))[::-1]
    halves: list[BucketSpec] = []
    for part in filter(None, (fields[: len(fields) // 2], fields[len(fields) // 2 :])):
        names, shapes, strides = zip(*part, strict=True)
        halves.append(BucketSpec(len(halves), names, shapes, strides, spec.dtype, spec.device))
    return halves
