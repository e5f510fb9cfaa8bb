"""Pre-, post- and abort hooks of torch 2.15's ProcessGroup, on every version of torch.

torch calls its own in the C++ dispatcher, which a process group written in Python bypasses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gradwire.collectives import Collective, OpKind
from gradwire.errors import UsageTypeError
from gradwire.events import CollectiveFailed, Handle
from gradwire.groups.base import Group
from gradwire.interop.work import NAMES, TorchWork
from gradwire.runtime.dynamo import untraced

_SEVERAL = {
    OpKind.ALL_REDUCE: "ALLREDUCE_COALESCED",
    OpKind.ALL_GATHER: "ALLGATHER_COALESCED",
    OpKind.ALL_GATHER_INTO_TENSOR: "ALLGATHER_INTO_TENSOR_COALESCED",
    OpKind.REDUCE_SCATTER_TENSOR: "REDUCE_SCATTER_TENSOR_COALESCED",
}


@dataclass(frozen=True, slots=True)
class PreHookArgs:
    """An operation that is about to be submitted, under the names of c10d's PreHookArgs."""

    name: Any
    """c10d's HookOpName; before torch 2.15 its name as a string."""
    async_op: bool
    input_tensors: list[Tensor]
    output_tensors: list[Tensor]
    root: int
    op_id: int


@dataclass(frozen=True, slots=True)
class PostHookArgs:
    """An operation that has been submitted, under the names of c10d's PostHookArgs."""

    name: Any
    async_op: bool
    work: Any
    op_id: int


@untraced
class OperationHooks:
    """Registered hooks by id; they are called in the order of their ids."""

    supports_abort_hooks = True
    group: Group

    def __init__(self) -> None:
        self._pre_hooks: dict[int, Callable[[PreHookArgs], None]] = {}
        self._post_hooks: dict[int, Callable[[PostHookArgs], None]] = {}
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        self._operations = 0
        self._failures: Handle | None = None

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
        """Call `hook(args)` before each operation is submitted. What it raises is raised to the operation's caller."""
        self._register(self._pre_hooks, hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._pre_hooks.pop(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
        """Call `hook(args)` after each operation was submitted; `args.work` is its Work."""
        self._register(self._post_hooks, hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        self._post_hooks.pop(hook_id, None)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call `hook()` when an operation has failed and before the group is aborted: possibly more than once per failure."""
        self._register(self._abort_hooks, hook_id, hook)
        if self._failures is None:
            self._failures = self.group.events.listen(lambda _: self._fire_abort_hooks(), only=CollectiveFailed)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._abort_hooks.pop(hook_id, None)
        if not self._abort_hooks and self._failures is not None:
            self._failures.remove()
            self._failures = None

    def _register(self, hooks: dict[int, Any], hook_id: int, hook: object) -> None:
        if not callable(hook):
            raise UsageTypeError(f"hook {hook_id} of {self.group}: {hook!r} is not callable. Pass a function.")
        hooks[hook_id] = hook

    def _fire_abort_hooks(self) -> None:
        """Call all of them even if one raises, then raise that error."""
        with ExitStack() as calls:
            for _, hook in sorted(self._abort_hooks.items(), reverse=True):  # the stack calls the last one first
                calls.callback(hook)

    def _between_hooks(self, ops: Sequence[Collective], async_op: bool, submit: Callable[[], TorchWork]) -> TorchWork:
        name, op_id, root = _name(ops), self._operations, -1 if ops[0].root is None else ops[0].root
        self._operations += 1
        inputs, outputs = [t for op in ops for t in op.inputs], [t for op in ops for t in op.outputs]
        for _, before in sorted(self._pre_hooks.items()):
            before(PreHookArgs(name, async_op, inputs, outputs, root, op_id))
        work = submit()
        for _, after in sorted(self._post_hooks.items()):
            after(PostHookArgs(name, async_op, work, op_id))
        return work


def _name(ops: Sequence[Collective]) -> Any:
    kind = ops[0].kind
    several = len(ops) > 1 or (len(ops[0].inputs) > 1 and kind is not OpKind.ALL_GATHER)
    name = _SEVERAL.get(kind, NAMES[kind]) if several else NAMES[kind]
    names = getattr(c10d, "HookOpName", None)
    return name if names is None else getattr(names, name)
