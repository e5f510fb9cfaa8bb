"""`before_optimizer_steps` and `after_optimizer_steps`: hooks on the steps of every optimizer of the process.

Note [One hook for all]
torch iterates over the dictionary of its global hooks while it calls them, so a hook that is registered or removed meanwhile, by
another thread, makes a step raise "OrderedDict mutated during iteration". Ranks that are threads of one process do that: one
begins a step while another's optimizer is in one. So one hook of each kind is registered with torch, by the first who needs it,
and stays; who comes and goes is in our own dictionaries, which are copied before hooks are called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.events import Handle
from gradwire.untraced import untraced_call

Hook = Callable[..., object]
"""Called with the optimizer, and the arguments of its step as a tuple and a dictionary. What it returns is ignored."""

_before: dict[object, Hook] = {}
_after: dict[object, Hook] = {}
_registering = threading.Lock()
_registered = False


def before_optimizer_steps(hook: Hook) -> Handle:
    """Call `hook` before each step of any optimizer, outside torch.compile."""
    return _add(_before, hook)


def after_optimizer_steps(hook: Hook) -> Handle:
    """Call `hook` after each step of any optimizer, outside torch.compile."""
    return _add(_after, hook)


def _add(hooks: dict[object, Hook], hook: Hook) -> Handle:
    _register()
    key = object()
    hooks[key] = hook
    return Handle(functools.partial(hooks.__delitem__, key))


def _register() -> None:
    global _registered
    if not _registered:
        with _registering:
            if not _registered:
                register_optimizer_step_pre_hook(_call_before)
                register_optimizer_step_post_hook(_call_after)
                _registered = True


@untraced_call
def _call_before(optimizer: Any, args: Any, kwargs: Any) -> None:
    for hook in tuple(_before.values()):
        hook(optimizer, args, kwargs)


@untraced_call
def _call_after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for hook in tuple(_after.values()):
        hook(optimizer, args, kwargs)
