"""Checks for the arguments of hooks: numbers, and hooks, with advice if a stage, a class or a function was passed as a hook.

A stage changes gradients around the hook that communicates them, so it cannot be used in place of a hook.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from gradwire.errors import HookTypeError, UsageTypeError
from gradwire.hooks.base import CommHook, Stage


class NamedStage:
    """A stage whose repr is the call that made it.

    >>> from gradwire.hooks import error_feedback
    >>> error_feedback()
    error_feedback()
    """

    def __init__(self, call: str, stage: Stage) -> None:
        self._call = call
        self._stage = stage

    def __call__(self, inner: CommHook) -> CommHook:
        return self._stage(inner)

    def __repr__(self) -> str:
        return self._call


P = ParamSpec("P")
R = TypeVar("R")


def checks_numbers(factory: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function whose arguments annotated `int` or `float` must be numbers: `"4"`, None and True are refused.

    >>> from gradwire.hooks import power_sgd
    >>> power_sgd("4")
    Traceback (most recent call last):
    gradwire.errors.UsageTypeError: power_sgd(rank='4'): `rank` must be a whole number, got str.
    """
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
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UsageTypeError(
                    f"{factory.__name__}({name}={value!r}): `{name}` must be {what}, got {type(value).__name__}."
                )
        return factory(*args, **kwargs)

    return checked


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
    if isinstance(hook, NamedStage):
        problem = f"{hook!r} is a stage, which communicates nothing by itself"
        advice = f"End it with a hook that communicates: chain({hook!r}, mean())"
        shown = repr(hook)
    elif isinstance(hook, type) and issubclass(hook, CommHook):
        problem, advice, shown = f"{hook.__name__} is a class", f"Pass an instance: {hook.__name__}(...)", hook.__name__
    elif inspect.isfunction(hook) and hook.__module__.startswith("gradwire.hooks."):
        problem, advice, shown = f"{hook.__name__} is a function", f"Call it: {hook.__name__}(...)", hook.__name__
    else:
        return
    raise HookTypeError(f"{where}({shown}): {problem}. {advice}.", hook=shown)
