"""Policies: choices about replication as values, instead of flags that interact."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradwire.errors import UsageError, UsageTypeError

MiB = 2**20


class Graph(Enum):
    """What is known about which parameters get a gradient in a step."""

    ALL_USED = "all used"
    """Every parameter does, in every step, on every rank. One that does not is an error that names it."""
    FIND_UNUSED = "find unused"
    """Some may not: the graph is searched after every forward, and ranks exchange which parameters they used."""
    STATIC = "static"
    """The same ones, the same number of times, in every step; learned in the first."""


class Gradients(Enum):
    """Where `.grad` lives."""

    COPIES = "copies"
    """In tensors of its own; buckets are copied in and out."""
    VIEWS = "views"
    """In the buckets: no copy out, and none in while `.grad` is kept between steps."""


class Buffers(Enum):
    """When a module's buffers (BatchNorm's statistics, say) are made equal to rank 0's."""

    EVERY_FORWARD = "every forward"
    """Before every forward, and when the model is replicated."""
    AT_START = "at start"
    """Once, when the model is replicated."""
    NEVER = "never"
    """Each rank keeps its own."""


class NonFinite(Enum):
    """What happens when a gradient, or an average of gradients, holds NaN or infinity. All ranks find out together."""

    PASS = "pass"
    """It is averaged like any other and not looked for, as in torch."""
    RECORD = "record"
    """It is averaged like any other. Rank, parameter and origin are recorded as a warning; the first time rank 0 shows it."""
    SKIP = "skip"
    """Recorded too, and the step is skipped on every rank: all gradients become None, so the optimizer does nothing. Not for
    `torch.amp.GradScaler`, which skips steps itself and needs the gradients for it. With a fused optimizer attached on CUDA,
    the optimizer skips its step on the device, and gradients become None one step later, if they were not zeroed."""
    RAISE = "raise"
    """Recorded too, and every rank raises NonFiniteGradient from backward, before an average is written to `.grad`. With a fused
    optimizer attached on CUDA, the optimizer skips its step on the device, and the next backward raises."""


class Divergence(Enum):
    """What happens when replicas of a model are not equal: see `DivergenceCheck`."""

    RECORD = "record"
    """It is recorded as a warning; the first time rank 0 shows it. Training continues with different replicas."""
    HEAL = "heal"
    """Recorded too, and what differs is copied from a rank of the majority; without a majority, every rank raises."""
    RAISE = "raise"
    """Recorded too, and every rank raises ReplicasDiverged."""


@dataclass(frozen=True, slots=True)
class DefaultChecks:
    """The checks of models whose code chooses none: `gradwire run --nonfinite` and `--check-divergence`."""

    nonfinite: NonFinite = NonFinite.PASS
    check_divergence: int | None = None
    """Compare replicas every so many steps."""


_default_checks = DefaultChecks()


def default_checks() -> DefaultChecks:
    """Those of this process."""
    return _default_checks


def set_default_checks(checks: DefaultChecks) -> None:
    """For models that are replicated from now on."""
    global _default_checks
    _default_checks = checks


class BucketMemory(Enum):
    """How long the memory of a bucket stays allocated."""

    KEPT = "kept"
    """From the first step on."""
    DURING_BACKWARD = "during backward"
    """From the launch of the bucket to the end of the backward: a lower peak, because it does not add to the activations."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """How large buckets are. The first to be launched is small, so that communication starts early."""

    limits: tuple[int, ...] = (1 * MiB, 25 * MiB)
    """Bytes of the first, second, … bucket; the last limit applies to all that follow."""
    from_start: bool = False
    """Whether the limits apply to the first step too. Normally it has one bucket, since the order of gradients is not known yet."""
    memory: BucketMemory = BucketMemory.KEPT

    def __post_init__(self) -> None:
        if not self.limits or any(limit <= 0 for limit in self.limits):
            raise UsageError(f"Buckets(limits={self.limits}): every bucket must be allowed more than 0 bytes.")


@dataclass(frozen=True, slots=True)
class ScaleCheck:
    """Compares a hook's result with the true mean, on a projection of one number per bucket, every `every` steps.

    Catches a hook that sums where it should average, or averages twice. `tolerance` is the relative error that a lossy hook
    may have. On the wire: three float64 per bucket.
    """

    every: int = 1
    tolerance: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.tolerance < 1:
            raise UsageError(f"{self}: every must be at least 1 and tolerance between 0 and 1.")


def check_policies(**given: tuple[object, Any]) -> None:
    """Raise unless every value has its policy's type: any other value would silently act as the default.

    >>> check_policies(nonfinite=(True, NonFinite))
    Traceback (most recent call last):
    gradwire.errors.UsageTypeError: nonfinite=True: not a gradwire.policies.NonFinite. Pass NonFinite.PASS, \
NonFinite.RECORD, NonFinite.SKIP or NonFinite.RAISE.
    """
    for argument, (value, kind) in given.items():
        if not isinstance(value, kind):
            policy = getattr(kind, "__args__", (kind,))[0]  # `Buckets | None` has args
            values = [str(member) for member in policy] if issubclass(policy, Enum) else [f"{policy.__name__}(...)"]
            choice = " or ".join(part for part in (", ".join(values[:-1]), values[-1]) if part)
            raise UsageTypeError(f"{argument}={value!r}: not a gradwire.policies.{policy.__name__}. Pass {choice}.")
