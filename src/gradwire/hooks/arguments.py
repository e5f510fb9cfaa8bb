"""Checks for the arguments of hooks: numbers, and hooks, with advice if a stage, a class or a function was passed as a hook.

A stage changes gradients around the hook that communicates them, so it cannot be used in place of a hook.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from gradwire.errors import HookTypeError, UsageError, UsageTypeError
from gradwire.hooks.base import CommHook, Stage, Trait


class NamedStage:
    """A stage whose repr is the call that made it."""

    def __init__(self, call: str, stage: Stage) -> None:
        self._call = call
        self._stage = stage

    def __call__(self, inner: CommHook) -> CommHook:
        return self._stage(inner)

    def __repr__(self) -> str:
        return self._call


P = ParamSpec("P")
R = TypeVar("R")


def checks_arguments(**allowed: str | tuple[Any, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: arguments annotated `int` or `float` must be numbers, not `"4"` or True. `allowed`: an interval, or the choices.

    >>> from gradwire.hooks import random_k
    >>> random_k("4")
    Traceback (most recent call last):
    gradwire.errors.UsageTypeError: random_k(ratio='4'): `ratio` must be a number, got str.
    >>> random_k(4)
    Traceback (most recent call last):
    gradwire.errors.UsageError: random_k(ratio=4): `ratio` must be a number in (0, 1].
    """

    def decorate(factory: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(factory)
        kinds = {
            name: (Integral, "a whole number") if re.match(r"int\b", str(one.annotation)) else (Real, "a number")
            for name, one in signature.parameters.items()
            if re.fullmatch(r"(int|float)( \| None)?", str(one.annotation))
        }

        @functools.wraps(factory)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the call raises a better one
                given = {}
            for name, (kind, what) in kinds.items():
                value = given.get(name)
                if name not in given or (value is None and "None" in str(signature.parameters[name].annotation)):
                    continue
                wrong = f"{factory.__name__}({name}={value!r}): `{name}` must be {what}"
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise UsageTypeError(f"{wrong}, got {type(value).__name__}.")
                if name in allowed and not _within(value, str(allowed[name])):
                    raise UsageError(f"{wrong} in {allowed[name]}.")
            for name, choices in allowed.items():
                if isinstance(choices, tuple) and given.get(name, choices[0]) not in choices:
                    one_of = " or ".join(map(repr, choices))
                    raise UsageError(f"{factory.__name__}({name}={given[name]!r}): `{name}` must be {one_of}.")
            return factory(*args, **kwargs)

        return checked

    return decorate


def _within(value: Any, interval: str) -> bool:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    return bool(low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]"))


def refuse_traits(what: str, hook: CommHook, refused: Mapping[Trait, str]) -> None:
    """Raise UsageError, with the reason given for it, if the hook has one of these traits."""
    for trait, why in refused.items():
        if trait in hook.traits:
            raise UsageError(f"{what}: {why}")


def check_hooks(where: str, **hooks: Any) -> None:
    """Raise HookTypeError unless each of these arguments of `where` is a hook."""
    for name, hook in hooks.items():
        refuse_unfinished(where, hook)
        if isinstance(hook, CommHook):
            continue
        advice = (
            "A torch-style hook goes to register_comm_hook(state, hook); a CommHook has a reduce() that yields collectives."
            if callable(hook)
            else "End a chain of stages with a hook that communicates, e.g. chain(stage, mean())."
        )
        raise HookTypeError(f"{where}(...): `{name}` must be a CommHook, got {hook!r}. {advice}", hook=repr(hook))


def refuse_unfinished(where: str, hook: Any) -> None:
    """Raise HookTypeError if `hook` is one of our stages, the class of a hook, or a function of `gradwire.hooks` not called."""
    shown = getattr(hook, "__name__", repr(hook))
    if isinstance(hook, NamedStage):
        what = f"a stage, which communicates nothing by itself. End it with a hook that communicates: chain({shown}, mean())"
    elif isinstance(hook, type) and issubclass(hook, CommHook):
        what = f"a class. Pass an instance: {shown}(...)"
    elif inspect.isfunction(hook) and hook.__module__.startswith("gradwire.hooks."):
        what = f"a function. Call it: {shown}(...)"
    else:
        return
    raise HookTypeError(f"{where}({shown}): {shown} is {what}.", hook=shown)
