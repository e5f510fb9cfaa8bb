"""GradHooks: hooks on the gradient accumulators of a model, which report gradients as soon as they have been accumulated.

Note [Hooks on accumulators]
The engine runs a parameter's accumulator (`AccumulateGrad`) in every backward that reaches the parameter, with the sum of all that
flows to it, or with nothing if a function before it has returned None. A hook on that node runs in both cases, after the gradient
has been added to `.grad` and after all hooks that others have put on the parameter. torch's own DDP uses the same hook.
Hooks hold the object of `on_arrival` weakly: a hook that owned the reducer, which owns the parameters, would keep a dropped model
alive. What a call costs: see Note [Who calls] in `reducer/intake/intake.py`.

Note [Tables of a node]
torch shows the hooks of a tensor, and hides those of a node. But all of a node's hooks of one kind are in one table, to which the
handle of a new one leads; so one is registered and removed again, once for each accumulator.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.graph import tensors_in
from gradwire.errors import UsageError
from gradwire.runtime.dynamo import untraced_call
from gradwire.runtime.threads import weakly

_dtype = attrgetter("dtype")
_OWN_HOOK = "gradwire_accumulated"


class GradHooks:
    """Calls the bound method `on_arrival` when a gradient has been accumulated; `pop` returns which ones have been since.

    >>> class Owner:
    ...     def __init__(self, model: torch.nn.Module) -> None:
    ...         self.hooks = GradHooks(list(model.parameters()), self.arrived)
    ...
    ...     def arrived(self) -> None:
    ...         print("arrived:", self.hooks.pop())
    >>> model = torch.nn.Linear(2, 1)
    >>> owner = Owner(model)
    >>> model(torch.ones(1, 2)).sum().backward()
    arrived: [1]
    arrived: [0]
    >>> owner.hooks.select([0])
    >>> model(torch.ones(1, 2)).sum().backward()
    arrived: [1, 0]
    """

    def __init__(self, parameters: Sequence[Tensor], on_arrival: Callable[[], object]) -> None:
        self._parameters = list(parameters)
        assert isinstance(on_arrival, types.MethodType)
        self._on_arrival = weakref.ref(on_arrival.__self__), on_arrival.__func__
        self._arrived: list[int] = []
        self._selected = bytearray(len(self._parameters))
        self._handles: list[Any] = []
        self.accumulators: dict[Any, int] = {}
        """Those that have hooks, each with the index of its parameter."""
        self._tables: dict[Any, Any] = {}
        self.attach()

    def attach(self) -> None:
        """Put hooks on the accumulators that parameters have now, in place of those on earlier ones; all of them call."""
        self.remove()
        # A parameter knows its accumulator only weakly: who holds it keeps the hook on it alive.
        self.accumulators = {_accumulator(p): i for i, p in enumerate(self._parameters)}
        self._handles = [
            node.register_hook(_make_hook(i, self._arrived, self._selected, *self._on_arrival))
            for node, i in self.accumulators.items()
        ]
        self._dtypes = list(map(_dtype, self._parameters))
        self._devices = list(map(Tensor.get_device, self._parameters))
        self.select(range(len(self._parameters)))

    def converted(self) -> bool:
        """Whether parameters have another dtype or device than when they were hooked, and so accumulators without hooks.

        One that was converted and converted back has another accumulator too; this is asked of the first only, for speed.
        """
        return (
            list(map(_dtype, self._parameters)) != self._dtypes
            or list(map(Tensor.get_device, self._parameters)) != self._devices
            or _accumulator(self._parameters[0]) not in self.accumulators
        )

    def displaced(self) -> list[int]:
        """Parameters that have other accumulators than those with hooks: of a part that was converted, and converted back."""
        return [i for i, p in enumerate(self._parameters) if _accumulator(p) not in self.accumulators]

    def select(self, indices: Collection[int]) -> None:
        """Call for the gradients of these parameters only, from now on, also in a backward that is running."""
        self._selected[:] = bytes(len(self._selected))
        for i in indices:
            self._selected[i] = True

    def pop(self) -> list[int]:
        """The parameters whose gradients have been accumulated since the last call, in order."""
        arrived = self._arrived
        taken = arrived[:]
        del arrived[: len(taken)]  # not clear(): another device's thread may append meanwhile
        return taken

    def waiting(self) -> frozenset[int]:
        return frozenset(self._arrived[:])

    def hooked_by_others(self, accumulators: Mapping[int, Any]) -> set[int]:
        """Those of these parameters that have hooks of others, on themselves or on these accumulators of theirs."""
        self._tables = self._tables or {node: _tables(node) for node in self.accumulators}
        found = set()
        for i, node in accumulators.items():
            parameter = self._parameters[i]
            before, after = self._tables.get(node) or _tables(node)
            on_tensor = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            only_ours = (len(after) == 1 and node in self.accumulators) or all(map(_is_own, after.values()))
            if on_tensor or before or not only_ours:
                found.add(i)
        return found

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.accumulators, self._tables = [], {}, {}
        self._arrived.clear()


def _make_hook(
    index: int, arrived: list[int], selected: bytearray, weak: weakref.ref[Any], on_arrival: Callable[[Any], object]
) -> Callable[[Any, Any], None]:
    append = arrived.append

    @untraced_call
    def hook(_: Any, __: Any) -> None:
        append(index)
        if selected[index] and (owner := weak()) is not None:
            on_arrival(owner)

    hook.__name__ = _OWN_HOOK
    return hook


def _accumulator(parameter: Tensor) -> Any:
    frozen = not parameter.requires_grad
    with torch.enable_grad():
        if frozen:
            parameter.requires_grad_()
        if (view := parameter.view_as(parameter)).grad_fn is None:
            raise UsageError(
                "A replicated model inside a transform of torch.func, which computes gradients without backward: they would not be "
                "averaged. Call backward() instead, or transform the module that is not replicated."
            )
        node = view.grad_fn.next_functions[0][0]
        if frozen:
            parameter.requires_grad_(False)
    return node


def on_backward(output: Any, begun: Callable[[], object]) -> bool:
    """Call the bound method `begun` when a backward reaches the model's outputs. Its object is held weakly.

    Returns whether every backward is certain to be noticed: a hook on a leaf, such as a parameter that the model returns, would
    stay on it for good, and there may be tensors in `output` that cannot be found.
    """
    outputs = [t for t in tensors_in(output) if t.requires_grad]
    call = weakly(begun)

    @untraced_call
    def reached(_: Tensor) -> None:
        call()

    hooked = [t.register_hook(reached) for t in outputs if t.grad_fn is not None]
    return 0 < len(hooked) == len(outputs)


def _is_own(hook: object) -> bool:
    return getattr(hook, "__name__", "") == _OWN_HOOK


def _tables(node: Any) -> tuple[dict[int, Any], ...]:
    """The hooks before and after a node. See Note [Tables of a node]."""
    handles = [register(lambda *_: None) for register in (node.register_prehook, node.register_hook)]
    for handle in handles:
        handle.remove()
    return tuple(handle.hooks_dict_ref() for handle in handles)
