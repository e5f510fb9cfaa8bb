"""Advancing reductions: `begin` checks one, `pump` runs one to its end, `relay` rewrites one, `advance` takes one step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import GeneratorType
from typing import Any

from torch import Tensor

from gradwire.collectives import Collective
from gradwire.errors import GroupError, HookError
from gradwire.hooks.base import CommHook, Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec

Method = Callable[[Tensor, Any, Turn], Any]
"""A method of a hook that makes a reduction: `reduce`, `reduce_scatter` or `after_step`."""


def pump(reduction: Reduction, on_op: Callable[[Collective], object]) -> Reduced:
    """Run a reduction to its end, with `on_op(op)` for each collective. What `on_op` raises is raised at the `yield`."""
    step = advance(reduction)
    while not isinstance(step, Reduced):
        try:
            on_op(step)
        except BaseException as error:
            step = advance(reduction, error)
        else:
            step = advance(reduction)
    return step


def run_by(submit: Callable[[Collective], Any], reduction: Reduction) -> Tensor:
    """The value of a reduction, with `submit(op).wait()` for each collective."""
    return pump(reduction, lambda op: submit(op).wait()).value


def relay(reduction: Reduction, on_op: Callable[[Collective], Collective]) -> Reduction:
    """The reduction with `on_op(op)` in place of each of its collectives."""
    try:
        op = next(reduction)
        while True:
            op = on_op(op)
            try:
                yield op
            except Exception as error:
                op = reduction.throw(error)
            else:
                op = next(reduction)
    except StopIteration as stop:
        result: Reduced = stop.value
        return result
    finally:
        reduction.close()


def advance(reduction: Reduction, error: BaseException | None = None) -> Collective | Reduced:
    """One step: the next collective of a reduction, or its result. With an `error`, that is raised at the `yield`."""
    try:
        return next(reduction) if error is None else reduction.throw(error)
    except StopIteration as stop:
        result: Reduced = stop.value
        return result


def begin(
    hook: CommHook, reduce: Method, row: Tensor, state: Any, turn: Turn, *, like: Tensor | None = None
) -> Reduction:
    """`reduce(row, state, turn)`, a reduction by `hook`; all that it yields and returns is checked. The value must have the length
    and dtype of `like`; without it, the length of `row`. A hook's own exception gets a note of where it was raised."""
    method = f"{reduce.__name__}()"

    def broken(what: str) -> HookError:
        where = describe(repr(hook), turn.spec, turn.rank, turn.step)
        return HookError(f"{where}: {method} {what}.", hook=repr(hook))

    def check(op: object) -> Collective:
        if not isinstance(op, Collective):
            raise broken(f"yielded {type(op).__name__}, not a Collective such as all_reduce(t)")
        return op

    numel, dtype = (row.numel(), None) if like is None else (like.numel(), like.dtype)
    try:
        reduction = reduce(row, state, turn)
        if not isinstance(reduction, GeneratorType) and not isinstance(reduction, Generator):
            raise broken(f"is not a generator but returned {type(reduction).__name__}; it must yield")
        result = yield from relay(reduction, check)
    except Exception as error:
        if not isinstance(error, (GroupError, HookError)):  # those name their origin themselves
            error.add_note(f"raised by {describe(repr(hook), turn.spec, turn.rank, turn.step)}")
        raise
    if not isinstance(result, Reduced):
        raise broken(f"returned {type(result).__name__}, not Reduced(value, sent)")
    value: Any = result.value
    if not isinstance(value, Tensor):
        raise broken(f"returned Reduced with a value of {type(value).__name__}, not a tensor")
    if value.numel() != numel or (dtype is not None and value.dtype != dtype):
        expected = f"{numel}" if dtype is None else f"{dtype} with {numel}"
        raise broken(f"returned {value.dtype} of {value.numel()} elements for a bucket of {expected}")
    return result


def describe(hook: str, spec: BucketSpec, rank: int, step: int) -> str:
    """Where something has happened, for errors and notes: the hook, the bucket with its parameters, the rank and the step."""
    return f"communication hook {hook} on {spec}, rank {rank}, step {step}"
