"""Calls back before a `backward()`, and when one has raised, with the exception.

Knows `torch.autograd.backward`. It must not know what is done about a failure.

Note [Why torch.autograd.backward is wrapped]
    The engine reports nothing about a backward that raises: it drops the callbacks queued for its end, and only of those that
    were queued, so nothing at all is known of a backward that fails in the loss, before it reaches the model. Nor can an object
    that notices its own deletion tell which exception it was. The only place that every failure passes, with its exception, is
    the Python function `torch.autograd.backward`, which `Tensor.backward` looks up in its module at each call. So that name is
    bound to a function around the original one, once per process, when the first listener registers; without listeners, and
    for backwards that succeed, it only passes the call on. `torch.autograd.grad` accumulates nothing and is left alone.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradwire.events import Callbacks, Handle

FailedBackward = Callable[[Any, BaseException], object]
"""Called with what `backward` was called on and with what it raised."""

_listeners: Callbacks[Callable[..., Any]] = Callbacks()
_guards: Callbacks[Callable[..., Any]] = Callbacks()
_beginnings: Callbacks[Callable[..., Any]] = Callbacks()
_installing = threading.Lock()


def on_failed_backward(fn: FailedBackward) -> Handle:
    """Call the bound method `fn(tensors, error)` in the thread in which an outermost `backward()` has raised, before it returns.

    The object of `fn` is held weakly. What `fn` raises is added to `error` as a note.

    >>> class Listener:
    ...     def failed(self, tensors: object, error: BaseException) -> None:
    ...         print("failed with", type(error).__name__)
    >>> listener = Listener()
    >>> handle = on_failed_backward(listener.failed)
    >>> try:
    ...     torch.ones(2, requires_grad=True).backward()
    ... except RuntimeError:
    ...     pass
    failed with RuntimeError
    >>> handle.remove()
    """
    return _register(_listeners, fn)


def before_compiled_backward(fn: Callable[[Any], object]) -> Handle:
    """Call the bound method `fn(tensors)` before an outermost `backward()` that compiled autograd is to run; it may raise.

    The object of `fn` is held weakly.
    """
    return _register(_guards, fn)


def before_backward(fn: Callable[[Any], Callable[[], object] | None]) -> Handle:
    """Call the bound method `fn(tensors)` before an outermost `backward()` that accumulates all gradients behind `tensors`.

    Hence not before one with `inputs` or `create_graph`. What it returns, unless None, is called when that backward has ended
    or failed. The object of `fn` is held weakly.
    """
    return _register(_beginnings, fn)


def _register(callbacks: Callbacks[Callable[..., Any]], fn: Callable[..., object]) -> Handle:
    weak = weakref.WeakMethod(fn)

    def call(*args: Any) -> Any:
        method = weak()
        return None if method is None else method(*args)

    with _installing:
        if not hasattr(torch.autograd.backward, "_gradwire_original"):
            torch.autograd.backward = _around(torch.autograd.backward)
    handle = callbacks.add(call)
    weakref.finalize(fn.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]
    return handle


def _around(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        endings: list[Any] = []
        try:
            if _compiled_autograd_is_on():
                for guard in _guards:
                    guard(tensors)
            if _beginnings and torch._C._current_graph_task_id() == -1 and _is_plain(*args, **kwargs):
                endings += filter(None, [begins(tensors) for begins in _beginnings])
            original(tensors, *args, **kwargs)
        except BaseException as error:
            # Inside another backward, as in a re-entrant checkpoint, the outer one decides whether it fails.
            if torch._C._current_graph_task_id() == -1:
                _report(tensors, error)
            raise
        finally:
            for ended in endings:
                ended()

    backward._gradwire_original = original  # type: ignore[attr-defined]
    return backward


def _is_plain(
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> bool:
    """Whether a `backward` with these arguments accumulates every gradient, and keeps no graph of them."""
    return inputs is None and not create_graph


def _compiled_autograd_is_on() -> bool:
    # Importing it takes seconds; unless it is imported, nothing is compiled.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))


def _report(tensors: Any, error: BaseException) -> None:
    for listener in _listeners:
        try:
            listener(tensors, error)
        except Exception as problem:
            error.add_note(f"While this failure of a backward was reported: {type(problem).__name__}: {problem}")
