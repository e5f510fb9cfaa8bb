"""`before_optimizer_steps` and `after_optimizer_steps`: hooks on the steps of every optimizer of the process.

Note [One hook for all]
torch iterates over the dictionary of its global hooks while it calls them, so a step raises if another thread, such as a rank of
the same process, adds or removes a hook meanwhile. One of each kind is registered, once, and calls a snapshot of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.events import Callbacks, Handle
from gradwire.runtime.dynamo import untraced_call

Arguments = tuple[Any, dict[str, Any]]
"""Those of a step: the optimizer and the other positional ones as a tuple, and those with names."""
Before = Callable[[Any, Any, dict[str, Any]], Arguments | None]
After = Callable[[Any, Any, dict[str, Any]], object]

_before: Callbacks[Before] = Callbacks()
_after: Callbacks[After] = Callbacks()
_registering = threading.Lock()
_registered = False


def before_optimizer_steps(hook: Before) -> Handle:
    """Call `hook(optimizer, args, kwargs)` before each step of any optimizer outside torch.compile. It may return new arguments."""
    _register()
    return _before.add(hook)


def after_optimizer_steps(hook: After) -> Handle:
    """Call `hook(optimizer, args, kwargs)` after each step of any optimizer, outside torch.compile."""
    _register()
    return _after.add(hook)


def _register() -> None:
    global _registered
    with _registering:
        if not _registered:
            register_optimizer_step_pre_hook(_call_before)
            register_optimizer_step_post_hook(_call_after)
            _registered = True


@untraced_call
def _call_before(optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
    given = changed = args, kwargs
    for hook in _before:
        changed = hook(optimizer, *changed) or changed
    return None if changed is given else changed


@untraced_call
def _call_after(optimizer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for hook in _after:
        hook(optimizer, args, kwargs)
