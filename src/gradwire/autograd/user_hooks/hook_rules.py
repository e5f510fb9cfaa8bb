"""What a hook may give back: torch's rules with torch's words, as functions from values to a finding.

Knows values only. It must not know chains, places or targets: `chain` adds those names when it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradwire.errors import AutogradHookError, AutogradHookTypeError

Hook = Callable[..., Any]


class Broken(NamedTuple):
    """A rule that a hook broke: torch's words for it, what came back, and the error to raise."""

    words: str
    details: str
    error: type[AutogradHookError] = AutogradHookError


def find_broken(fn: Hook, value: Any, result: Any) -> Broken | None:
    """Compare the one tensor that hook `fn` returned with the one it was given.

    The order is torch's, so that a result with two faults is reported under the same words. Unlike torch's, the
    comparison of devices includes the index.

    >>> find_broken(len, torch.ones(2), torch.ones(3)).words
    "hook 'len' has changed the size of value"
    """
    if result is None or result is value:
        return None
    if value is None:
        return Broken("can't replace a None gradient with a non-None value", f"It returned {describe_value(result)}.")
    if not isinstance(result, torch.Tensor):
        return Broken(f"expected Variable, but hook returned '{type(result).__name__}'", "", AutogradHookTypeError)
    if value.dtype != result.dtype or value.layout != result.layout or value.device != result.device:
        became = f"type of value (was {_type_name(value)} got {_type_name(result)})"
    elif value.shape != result.shape:
        became = "size of value"
    else:
        return None
    details = f"It was given {describe_value(value)} and returned {describe_value(result)}."
    return Broken(f"hook '{hook_name(fn)}' has changed the {became}", details)


def find_broken_tuple(fn: Hook, values: tuple[Any, ...], results: Any) -> Broken | None:
    """Compare the tuple that node hook `fn` returned with the one it was given, element by element.

    >>> find_broken_tuple(len, (torch.ones(2),), [torch.ones(2)]).words
    "expected tuple, but hook returned 'list'"
    """
    if not isinstance(results, tuple):
        return Broken(f"expected tuple, but hook returned '{type(results).__name__}'", "", AutogradHookTypeError)
    if len(results) != len(values):
        counts = f"(got {len(results)}, but expected {len(values)})"
        return Broken(f"hook '{hook_name(fn)}' has returned an incorrect number of values {counts}", "")
    for index, (value, result) in enumerate(zip(values, results)):
        broken = find_broken(fn, value, result)
        if broken is not None:
            return broken._replace(details=f"This is value {index} of {len(values)}. {broken.details}".strip())
    return None


def hook_name(fn: Hook) -> str:
    """The name torch gives a hook in its messages: `__name__` where that is a string."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else "<unknown>"


def describe_hook(fn: Hook) -> str:
    """A name by which a reader finds the hook: its qualified name, or that of its class.

    >>> describe_hook(describe_value)
    'gradwire.autograd.user_hooks.hook_rules.describe_value'
    """
    named = fn if isinstance(getattr(fn, "__qualname__", None), str) else type(fn)
    return f"{named.__module__}.{named.__qualname__}"


def _type_name(tensor: torch.Tensor) -> str:
    """torch's name for dtype, layout and device together, where it has one."""
    try:
        return str(tensor.type())
    except RuntimeError:
        return f"{tensor.dtype} {tensor.layout} on {tensor.device}"


def describe_value(value: Any) -> str:
    """A value in few words; a tensor by its shape and type, never by its contents.

    >>> describe_value(torch.zeros(2, 3))
    'a tensor of shape (2, 3), torch.float32, torch.strided, on cpu'
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {value.layout}, on {value.device}"
    return f"a value of type '{type(value).__name__}'"
