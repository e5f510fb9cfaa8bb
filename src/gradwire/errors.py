"""Every error that gradwire raises on purpose, as one tree; `testing` adds the error of its conformance suite.

A message has three parts: what was being done with which values, what is wrong, what to do about it. The facts are
attributes too, so code need not parse messages. Where torch raises a documented built-in type for the same mistake, ours
is an instance of that type as well. All errors pickle with their attributes: they cross process boundaries in `testing`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from gradwire.collectives.op_kinds import Signature


class GradwireError(Exception):
    """The root of all errors. Facts about one are attributes that its class declares; they are given as keyword arguments."""

    def __init__(self, *message: object, **facts: Any) -> None:
        super().__init__(*message)
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no {name!r}")
            setattr(self, name, tuple(value) if isinstance(value, list | range) else value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[GradwireError], args: tuple[Any, ...], facts: dict[str, Any]) -> GradwireError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


E = TypeVar("E", bound=BaseException)


def again(error: E) -> E:
    """A copy of a stored error, to be raised in its place: same type, attributes, notes and cause.

    Raising one object many times makes its traceback longer each time, and keeps its frames, with their tensors, alive. An error
    of a user's own code keeps its traceback as the cause of the copy.
    """
    try:
        twin = copy.copy(error)
    except Exception:  # a user's class whose constructor does not take `args`
        return error.with_traceback(None)
    if "__notes__" in twin.__dict__:
        twin.__dict__["__notes__"] = list(twin.__dict__["__notes__"])
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    if error.__cause__ is None and error.__traceback__ is not None and not isinstance(error, GradwireError):
        twin.__cause__ = error
    return twin


class UsageError(GradwireError, ValueError):
    """The caller's mistake, found before any communication."""


class UsageTypeError(UsageError, TypeError):
    """A value of the wrong type, where torch raises TypeError."""


class UsageRuntimeError(UsageError, RuntimeError):
    """A mistake where torch raises RuntimeError."""


class HookError(UsageError, RuntimeError):
    """A hook broke its contract, or a completion hook raised: names the hook."""

    hook: str = "<unknown>"


class HookTypeError(HookError, UsageTypeError):
    """An argument that must be a CommHook is something else."""


class AutogradHookError(HookError):
    """An autograd hook could not be registered, or returned something it must not.

    `kind` is the kind of hook, `place` its position counted from 1 (None at registration or once removed), `target` a
    description of the tensor, parameter or node it was registered on.
    """

    kind: str = ""
    place: int | None = None
    target: str = ""


class AutogradHookTypeError(AutogradHookError, TypeError):
    """An autograd hook returned a value of the wrong type, where torch raises TypeError."""


class LayoutError(UsageError, RuntimeError):
    """Ranks disagree about a model's parameters or buckets, or it has changed. `ranks` are those not in the majority."""

    ranks: tuple[int, ...] = ()


class ClosedError(UsageError, RuntimeError):
    """Something was used after it was closed."""


class NoSubgroups(UsageError):
    """The group does not make subgroups. All ranks raise it, and the group can still be used."""


class StepError(GradwireError, RuntimeError):
    """A backward whose gradients cannot be averaged: its graph or its inputs are not what was declared."""


class ReadyTwice(StepError):
    """A parameter's gradient became ready twice in one backward."""


class Unfinished(StepError):
    """A new step began although parameters of the last one never got a gradient."""


class GraphChanged(StepError):
    """A graph declared static has changed."""


class EarlyTermination(StepError):
    """A rank has run out of inputs under `join(throw_on_early_termination=True)`: raised on all ranks."""


class GroupError(GradwireError, RuntimeError):
    """Not the caller's fault: a peer, the network, or an engine failed."""


class PeerLost(GroupError):
    """A rank has died or left. `rank` is None where it is not known which."""

    rank: int | None = None
    op: Signature | None = None


UNEVEN = "If it had fewer batches than this rank, train inside `with model.join():`"
"""The advice in errors about a rank that has closed its group while another waits for it."""


class CollectiveTimeout(GroupError):
    """A deadline passed. `joined` and `missing` are None where the group cannot know which ranks took part."""

    op: Signature | None = None
    joined: tuple[int, ...] | None = None
    missing: tuple[int, ...] | None = None


class CollectiveMismatch(GroupError):
    """Ranks submitted different collectives. `ops` maps each rank to what it submitted."""

    ops: Mapping[int, Signature] = MappingProxyType({})


class GroupAborted(GroupError):
    """The group was aborted, here or by a peer."""

    reason: str = ""


class Evicted(GroupError):
    """The others go on without this member of an elastic run, since it was taken for dead."""


class TooFewMembers(GroupError):
    """An elastic run cannot go on: it had fewer members than `min_ranks` for longer than `patience`, or all of them leave."""


class SharedMemoryFull(GroupError):
    """There is less shared memory than was requested."""


class PrivateFileGone(GroupError):
    """No process has the private file open under this name anymore."""


class Origin(Enum):
    """Where NaN or infinity came from."""

    GRADIENT = "gradient"
    """A rank's own gradient: its batch, its loss, a layer."""
    OVERFLOW = "overflow"
    """All gradients were finite, but one of them, or their sum, is beyond the range of the dtype in which they are reduced."""
    HOOK = "hook"
    """All gradients were finite, and the communication hook has made something else of them."""


class NonFiniteGradient(GradwireError, RuntimeError):
    """A gradient, or what was made of it on its way, holds NaN or infinity.

    `rank`: whose gradient it was, or None if no rank's was. `parameter`: the first one in the order of backward. `index`: its
    first such element. `origin`: where it came from. `step`: the iteration, as in the records of `gradwire.observe`.
    """

    rank: int | None = None
    parameter: str | None = None
    index: tuple[int, ...] | None = None
    origin: Origin | None = None
    step: int | None = None


class ReplicasDiverged(GradwireError, RuntimeError):
    """Ranks hold different `parameters`. `ranks` are those not in the majority, or all if there is a `tie`."""

    ranks: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    tie: bool = False
    step: int | None = None


class InternalError(GradwireError, RuntimeError):
    """A bug in gradwire. `story` is what led to it, for the report."""

    story: tuple[str, ...] = ()
