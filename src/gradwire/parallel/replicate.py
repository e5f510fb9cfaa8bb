"""`replicate`: the function form. It adds hooks to the module: no wrapper around it, and no `module.` in its parameter names.

Note [A class of its own]
Dynamo does not check whether a module without hooks has some now (`skip_nnmodule_hook_guards`): it would use what it has compiled
for this module before, or for another of its class, without our hooks. But it does check a module's class. So a replicated module
gets a subclass of its class, of the same name, until it is detached; its copies and pickles are of the class it had.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from gradwire.errors import UsageError
from gradwire.events import Handle
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.parallel.replica import Replica, ReplicaPolicies
from gradwire.parallel.trainable import check_module
from gradwire.policies import Buckets, Buffers, Gradients, Graph, NonFinite, ScaleCheck

_MARK = "_gradwire_replica"


def replicate(
    module: nn.Module,
    *,
    group: Group,
    hook: CommHook | None = None,
    buckets: Buckets | None = None,
    graph: Graph = Graph.ALL_USED,
    gradients: Gradients = Gradients.VIEWS,
    buffers: Buffers = Buffers.EVERY_FORWARD,
    ignore: Collection[str] = (),
    scale_check: ScaleCheck | None = None,
    nonfinite: NonFinite | None = None,
) -> Replica:
    """Average the gradients of `module` over `group` in every backward from now on.

    Returns the Replica, which offers `no_sync()`, `set_hook()`, `weight` and `detach()`; the module owns it.

    >>> import torch
    >>> from gradwire.groups import ThreadGroup
    >>> (group,) = ThreadGroup.world(1)
    >>> model = nn.Linear(2, 1)
    >>> replica = replicate(model, group=group)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> replica.reducer.steps
    1
    >>> replica.detach()
    >>> group.close()
    """
    check_module("replicate", module)
    if getattr(module, _MARK, None) is not None:
        raise UsageError(f"replicate({type(module).__name__}): the module is already replicated. detach() it first.")
    policies = ReplicaPolicies(
        buckets=Buckets() if buckets is None else buckets,
        graph=graph,
        gradients=gradients,
        buffers=buffers,
        ignore=ignore,
        scale_check=scale_check,
        nonfinite=nonfinite,
    )
    replica = Replica(module, group, hook=hook, policies=policies)
    around, weak = _Around(replica), weakref.ref(module)
    replica.handles += [
        module.register_forward_pre_hook(around.before),
        module.register_forward_hook(around.after),
        module.register_forward_hook(around.at_exit, always_call=True),
        Handle(lambda: _unmark(weak)),
    ]
    object.__setattr__(module, _MARK, replica)
    own: Any = type(module)
    object.__setattr__(module, "__class__", _replicated(own))
    return replica


class _Around:
    """The replica's part in the module's forward. A copy or a pickle of the module is an ordinary module, without this part."""

    def __init__(self, replica: Replica | None = None) -> None:
        self._replica = replica
        self._running = False

    def before(self, _: nn.Module, inputs: Any) -> None:
        if self._replica is not None:
            self._replica.before_forward()
            self._running = True

    def after(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        self._running = False
        return output if self._replica is None else self._replica.after_forward(output)

    def at_exit(self, _: nn.Module, inputs: Any, output: Any) -> None:
        """Called last, also if forward has raised an Exception; for other BaseExceptions torch does not call its hooks."""
        error = sys.exc_info()[1]
        if self._running and self._replica is not None and error is not None:
            self._replica.forward_failed(error)
        self._running = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Around, ()


class _Replicated:
    """Before the class of a replicated module. See Note [A class of its own]."""

    def __init_subclass__(cls) -> None:
        """The module's class need not know that it has another subclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = made
        arguments = tuple(map(_before, arguments))
        make = arguments[0].__new__ if make is copyreg.__newobj__ else _before(make)  # type: ignore[attr-defined]
        return make, arguments, *rest


@functools.cache
def _replicated(cls: type) -> type:
    about = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (_Replicated, cls), about)


def _before(part: Any) -> Any:
    return part.__bases__[1] if isinstance(part, type) and _Replicated in part.__bases__ else part


def _unmark(weak: weakref.ref[nn.Module]) -> None:
    module = weak()
    if module is not None:
        object.__setattr__(module, _MARK, None)
        object.__setattr__(module, "__class__", _before(type(module)))
