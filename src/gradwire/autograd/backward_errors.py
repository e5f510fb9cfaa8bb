"""Calls back around every outermost backward: before it, when it has returned, and when it has raised, with the exception.

Knows the functions through which torch's Python enters the autograd engine. It must not know what is done about a failure.

Note [Why functions of torch's are replaced]
The engine reports nothing about a backward that raises: it drops the callbacks queued for its end, and has none of a backward that
fails in the loss, before it reaches the model. The only place that every failure passes, with its exception, is
`_engine_run_backward`, which `torch.autograd.backward` looks up in its module at each call, however a program has imported
`backward`. So that name is bound to a function around the original one, once per process, when the first callback is registered.
Backwards that accumulate nothing, as `torch.autograd.grad`, are left alone. Errors in the arguments of `backward`, as a loss that
is not a scalar, are raised before the engine is entered, by `_make_grads`, which is replaced in the same way.
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
from gradwire.runtime.threads import weakly

Callback = Callable[..., Any]

FAILED: Callbacks[Callback] = Callbacks()
"""`fn(tensors, error)`, in the thread in which an outermost `backward()` has raised. What `fn` raises becomes a note of `error`."""
RETURNED: Callbacks[Callback] = Callbacks()
"""`fn(tensors)`, when an outermost `backward()` that accumulates all gradients has returned; it may raise."""
COMPILED: Callbacks[Callback] = Callbacks()
"""`fn(tensors)`, before an outermost `backward()` that compiled autograd is to run; it may raise."""
BEGINS: Callbacks[Callback] = Callbacks()
"""`fn(tensors)`, before an outermost `backward()` that accumulates all gradients: not one with `inputs` or `create_graph`. What it
returns, unless None, is called when that backward has ended or failed."""

_installing = threading.Lock()
_BACKWARD = torch.autograd.backward.__code__


def around_backward(event: Callbacks[Callback], fn: Callback) -> Handle:
    """Call the bound method `fn` at one of the events above. Its object is held weakly.

    >>> class Listener:
    ...     def failed(self, tensors: object, error: BaseException) -> None:
    ...         print("failed with", type(error).__name__)
    >>> listener = Listener()
    >>> handle = around_backward(FAILED, listener.failed)
    >>> weight = torch.ones(2, requires_grad=True)
    >>> try:
    ...     (weight * weight).backward()  # not a scalar
    ... except RuntimeError:
    ...     pass
    failed with RuntimeError
    >>> handle.remove()
    """
    with _installing:
        for name, around in (("_engine_run_backward", _around), ("_make_grads", _around_arguments)):
            original = getattr(torch.autograd, name)
            if not hasattr(original, "_gradwire_original"):
                setattr(torch.autograd, name, around(original))
    # This marks the code of all functions that `weakly` makes: none of them is to be traced.
    handle = event.add(untraced_call(weakly(fn)))
    weakref.finalize(fn.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]
    return handle


def _around_arguments(original: Callback) -> Callback:
    @untraced_frame
    @functools.wraps(original)
    def make_grads(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(outputs, *args, **kwargs)
        except BaseException as error:
            if sys._getframe(1).f_code is _BACKWARD and torch._C._current_graph_task_id() == -1:
                _report(outputs, error)
            raise

    make_grads._gradwire_original = original  # type: ignore[attr-defined]
    return make_grads


def _around(original: Callback) -> Callback:
    @untraced_frame
    @functools.wraps(original)
    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad") or torch._C._current_graph_task_id() != -1:
            # Inside another backward, as in a re-entrant checkpoint, the outer one decides whether it fails.
            return original(tensors, *args, **kwargs)
        endings: list[Any] = []
        try:
            if _compiled_autograd_is_on():
                for refuse in COMPILED:
                    refuse(tensors)
            _, _, create_graph, inputs = args  # grad_tensors, retain_graph, ...
            all_gradients = not inputs and not create_graph
            if all_gradients and BEGINS:
                endings += filter(None, [begins(tensors) for begins in BEGINS])
            result = original(tensors, *args, **kwargs)
            if all_gradients:
                for returned in RETURNED:
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
def _compiled_autograd_is_on() -> bool:
    # Importing it takes seconds; unless it is imported, nothing is compiled.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))


@untraced_call
def _report(tensors: Any, error: BaseException) -> None:
    for listener in FAILED:
        try:
            listener(tensors, error)
        except Exception as problem:
            error.add_note(f"While this failure of a backward was reported: {type(problem).__name__}: {problem}")
