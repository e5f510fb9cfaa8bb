"""GradReady: tells when the gradient of a parameter has been accumulated, and when the backward that did it has ended.

Responsible for turning the engine's hooks and callbacks into two events for the reducer, cheaply: the hook runs once per
parameter and step. It must not know buckets or gradients, holds no parameter, and remembers nothing about a parameter.

Note [When a backward ends]
    A callback queued on the engine runs when the *current graph task* ends, and not at all if it fails. A re-entrant
    backward (a checkpoint with use_reentrant=True, or a backward inside a hook) is a graph task of its own, inside a node
    of an outer one, and all parameters may get their gradients there. So the first gradient queues a callback, and when
    that runs inside a node, the outer graph task goes on: we hook that node's end, and queue again there, level by level,
    until no node is running. Not seen: an outer backward without a parameter of its own whose inner backward was started
    by a hook that runs after a node (torch has taken its snapshot of that node's hooks by then; it shows as an
    interruption), and re-entrance deeper than 60 levels or over several devices, where torch finishes the inner backward
    on another thread and it looks like an outermost one.

Note [When a backward fails]
    The engine drops the callbacks of a graph task that failed. What we queue is an object that notices its own deletion,
    so an interruption is known as soon as the failed backward has returned, at no cost to those that succeed.

Note [What the hot path costs]
    Calling any Python hook costs the engine about 3.5 µs per parameter on a slow core, and the frames below add 1.1 µs.
    `fire` is the user's function itself while a backward runs, and None before: no check of the graph task's number
    (0.8 µs), no weak reference to follow (0.25 µs). Hooks after the accumulator node would cost 2 µs more than these.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradwire.errors import UsageError

_current_node: Callable[[], Any] = torch._C._current_autograd_node


class GradReady:
    """Calls `on_ready(index)` when `params[index].grad` has been updated, and `on_backward_end()` when that backward ended.

    - `on_ready` runs in the thread of the engine that accumulated the gradient, with gradients recorded only if the
      backward itself is (`create_graph=True`). It runs once per parameter and graph task, so twice for a parameter that is
      used in two re-entrant checkpoints. `torch.autograd.grad` accumulates nothing and calls nothing.
    - `on_backward_end` runs once for the outermost backward in which something became ready, before `backward()` returns;
      what it raises comes out of `backward()`.
    - `on_interrupted` runs before the first `on_ready` after a backward that raised. `interrupted` says so earlier.

    The object of a bound method is held weakly, so it may own this. Hooks are removed by `close()`, or when this is dropped.

    >>> model = torch.nn.Linear(2, 1)
    >>> ready = GradReady(
    ...     list(model.parameters()), lambda index: print("ready", index), on_backward_end=lambda: print("end")
    ... )
    >>> model(torch.ones(1, 2)).sum().backward()
    ready 1
    ready 0
    end
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        on_ready: Callable[[int], object],
        *,
        on_backward_end: Callable[[], object],
        on_interrupted: Callable[[], object] | None = None,
    ) -> None:
        _require_leaves(params)
        self.interrupted = False
        self._on_ready = _held_weakly(on_ready)
        self._on_backward_end = _held_weakly(on_backward_end)
        self._on_interrupted = _held_weakly(on_interrupted or _do_nothing)
        self._serial = 0  # of the token that speaks for the backward now running; all others are stale
        self._switch = _Switch(weakref.ref(self))
        hooks = (_make_hook(self._switch, index) for index in range(len(params)))
        self._handles = [param.register_post_accumulate_grad_hook(hook) for param, hook in zip(params, hooks)]
        weakref.finalize(self, _remove_all, self._handles).atexit = False

    @property
    def running(self) -> bool:
        """Whether a gradient has become ready in a backward that has not ended."""
        return self._switch.fire is not None

    def close(self) -> None:
        """Remove the hooks. A backward that is running ends without `on_backward_end`."""
        self._serial += 1
        self._switch.fire = None
        _remove_all(self._handles)

    def run_last(self) -> None:
        """Put the hooks behind those registered on the parameters since, which then act on a gradient before it is ready.

        torch runs the hooks on one tensor in the order in which they were registered.
        """
        for handle in self._handles:
            table = handle.hooks_dict_ref()
            if table is not None and handle.id in table and next(reversed(table)) != handle.id:
                table[handle.id] = table.pop(handle.id)  # torch does not see what move_to_end does

    def _begin(self, index: int) -> None:
        """The first gradient of a backward, or the first one after an inner backward ended."""
        on_ready = self._on_ready()
        if on_ready is None:
            return
        self._queue()
        if self.interrupted:
            self.interrupted = False
            _call(self._on_interrupted)
        self._switch.fire = on_ready
        on_ready(index)

    def _queue(self) -> None:
        if _current_node() is None:
            raise UsageError(
                "GradReady under compiled autograd: it runs no callbacks at the end of a backward, so nothing would ever "
                "be finished. Set torch._dynamo.config.compiled_autograd = False; torch.compile of the model may stay."
            )
        self._serial += 1
        torch.autograd.Variable._execution_engine.queue_callback(_Token(self, self._serial))

    def _task_ended(self, serial: int) -> None:
        if serial != self._serial:
            return
        self._serial += 1
        self._switch.fire = None
        node = _current_node()
        if node is None:
            _call(self._on_backward_end)
        else:
            token = _Token(self, self._serial)
            token.on_node = node.register_hook(token.node_ended)

    def _node_ended(self, serial: int) -> None:
        if serial == self._serial:
            self._queue()
            self._switch.fire = self._on_ready()

    def _lost(self, serial: int) -> None:
        if serial == self._serial:
            self._serial += 1
            self._switch.fire = None
            self.interrupted = True


class _Switch:
    """What the hooks share: `fire` is the user's `on_ready` while a backward is running, so strong only then."""

    __slots__ = ("fire", "ready")

    def __init__(self, ready: weakref.ref[GradReady]) -> None:
        self.fire: Callable[[int], object] | None = None
        self.ready = ready


class _Token:
    """Stands for a running backward with the engine, which calls it or drops it. See [When a backward fails]."""

    __slots__ = ("on_node", "ready", "serial")

    def __init__(self, ready: GradReady, serial: int) -> None:
        self.ready = weakref.ref(ready)
        self.serial = serial
        self.on_node: RemovableHandle | None = None

    def __call__(self) -> None:
        ready = self.ready()
        if ready is not None:
            ready._task_ended(self.serial)

    def node_ended(self, grad_inputs: object, grad_outputs: object) -> None:
        if self.on_node is not None:
            self.on_node.remove()
        ready = self.ready()
        if ready is not None:
            ready._node_ended(self.serial)

    def __del__(self) -> None:
        ready = self.ready()
        if ready is not None:
            ready._lost(self.serial)


def _make_hook(switch: _Switch, index: int) -> Callable[[torch.Tensor], None]:
    def gradwire_ready(_param: torch.Tensor) -> None:
        fire = switch.fire
        if fire is not None:
            fire(index)
        else:
            ready = switch.ready()
            if ready is not None:
                ready._begin(index)

    return gradwire_ready


def _held_weakly(fn: Callable[..., object]) -> Callable[[], Callable[..., object] | None]:
    """A function that returns `fn`: None once the object that `fn` is a method of has died."""
    return weakref.WeakMethod(fn) if isinstance(fn, types.MethodType) else lambda: fn


def _call(held: Callable[[], Callable[[], object] | None]) -> None:
    fn = held()
    if fn is not None:
        fn()


def _do_nothing() -> None:
    pass


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _require_leaves(params: Sequence[torch.Tensor]) -> None:
    seen: dict[int, int] = {}
    for index, param in enumerate(params):
        if not param.requires_grad or param.grad_fn is not None:
            raise UsageError(
                f"GradReady: params[{index}] of shape {tuple(param.shape)} never gets a `.grad`. "
                f"Pass only leaves that require grad."
            )
        if id(param) in seen:
            raise UsageError(
                f"GradReady: params[{index}] is the same tensor as params[{seen[id(param)]}]. Its gradient becomes ready "
                f"once, so it has one index. Pass each parameter once, as `named_parameters()` does."
            )
        seen[id(param)] = index
