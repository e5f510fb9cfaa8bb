"""Calls back around every outermost backward: before it, when it has returned, and when it has raised, with the exception.

Knows the function through which torch's Python enters the autograd engine. It must not know what is done about a failure.

Note [Why a function of torch's is replaced]
The engine reports nothing about a backward that raises: it drops the callbacks queued for its end, and only of those that
were queued, so nothing at all is known of a backward that fails in the loss, before it reaches the model. Nor can an object
that notices its own deletion tell which exception it was. The only place that every failure passes, with its exception, is
`_engine_run_backward`, which `torch.autograd.backward` looks up in its module at each call, however a program has
imported `backward`. So that name is bound to a function around the original one, once per process, when the first callback is
registered; without callbacks, and for backwards that succeed, it only passes the call on. Backwards that accumulate nothing, as
`torch.autograd.grad`, are left alone. Errors in the arguments of `backward` are raised before the engine is entered, and not seen.
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
from gradwire.runtime.dynamo import untraced_call, untraced_frame

_ENTRY = "_engine_run_backward"

_failed: Callbacks[Callable[..., Any]] = Callbacks()
_returned: Callbacks[Callable[..., Any]] = Callbacks()
_guards: Callbacks[Callable[..., Any]] = Callbacks()
_beginnings: Callbacks[Callable[..., Any]] = Callbacks()
_installing = threading.Lock()


def on_failed_backward(fn: Callable[[Any, BaseException], object]) -> Handle:
    """Call the bound method `fn(tensors, error)` in the thread in which an outermost `backward()` has raised, before it returns.

    The object of `fn` is held weakly. What `fn` raises is added to `error` as a note.

    >>> class Listener:
    ...     def failed(self, tensors: object, error: BaseException) -> None:
    ...         print("failed with", type(error).__name__)
    >>> listener = Listener()
    >>> handle = on_failed_backward(listener.failed)
    >>> weight = torch.ones(2, requires_grad=True)
    >>> loss = (weight * weight).sum()
    >>> loss.backward()
    >>> try:
    ...     loss.backward()  # its graph has been freed
    ... except RuntimeError:
    ...     pass
    failed with RuntimeError
    >>> handle.remove()
    """
    return _register(_failed, fn)


def on_returned_backward(fn: Callable[[Any], object]) -> Handle:
    """Call the bound method `fn(tensors)` when an outermost `backward()` that accumulates all gradients has returned; it may raise.

    The object of `fn` is held weakly.
    """
    return _register(_returned, fn)


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

    @untraced_call
    def call(*args: Any) -> Any:
        method = weak()
        return None if method is None else method(*args)

    with _installing:
        entry = getattr(torch.autograd, _ENTRY)
        if not hasattr(entry, "_gradwire_original"):
            setattr(torch.autograd, _ENTRY, _around(entry))
    handle = callbacks.add(call)
    weakref.finalize(fn.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]
    return handle


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    @untraced_frame
    @functools.wraps(original)
    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad") or torch._C._current_graph_task_id() != -1:
            # Inside another backward, as in a re-entrant checkpoint, the outer one decides whether it fails.
            return original(tensors, *args, **kwargs)
        endings: list[Any] = []
        try:
            if _compiled_autograd_is_on():
                for guard in _guards:
                    guard(tensors)
            all_gradients = _accumulates_all(*args)
            if all_gradients and _beginnings:
                endings += filter(None, [begins(tensors) for begins in _beginnings])
            result = original(tensors, *args, **kwargs)
            if all_gradients:
                for returned in _returned:
                    returned(tensors)
            return result
        except BaseException as error:
            _report(tensors, error)
            raise
        finally:
            for ended in endings:
                ended()

    run_backward._gradwire_original = original  # type: ignore[attr-defined]
    return run_backward


@untraced_call
def _accumulates_all(grad_tensors: Any, retain_graph: Any, create_graph: bool, inputs: Any) -> bool:
    """Whether a backward with these arguments accumulates every gradient, and keeps no graph of them."""
    return not inputs and not create_graph


@untraced_call
def _compiled_autograd_is_on() -> bool:
    # Importing it takes seconds; unless it is imported, nothing is compiled.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))


@untraced_call
def _report(tensors: Any, error: BaseException) -> None:
    for listener in _failed:
        try:
            listener(tensors, error)
        except Exception as problem:
            error.add_note(f"While this failure of a backward was reported: {type(problem).__name__}: {problem}")
