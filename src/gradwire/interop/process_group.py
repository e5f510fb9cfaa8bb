"""`as_process_group`: a gradwire group with c10d's API, for everything in torch that takes a ProcessGroup; and as a c10d Backend.

Note [How torch reaches a Python group]
Python code (`dist.*`, FSDP2, ZeRO) calls these methods directly. C++ (the DDP reducer, functional collectives) calls virtual
functions of c10d::ProcessGroup, of which torch forwards only some to Python: docs/interop.md lists both. The rest looks for a
backend, which we have since torch 2.15: see Note [A process group and its backend].

Note [A process group and its backend]
Since torch 2.15 the backend that C++ looks for is one over the same group. Where a process group has other backends for other
devices ("cpu:gradwire,cuda:nccl"), or torch was told to record collectives or to check them for NaN, the process group is torch's
own and has this backend alone. Of a Work that passes through it torch forwards only waits and futures: its `is_completed()` is
never True, and it has no `result()` and no source. So it is not the only form.

Note [The group is its own backend]
torch asks a process group for the C++ backend of a device to query its capabilities. This group has none; it returns itself, and
reports no special capability except allocating tensors.

Note [Why there is no new_group]
torch would call it with neither the requested backend nor whether the ranks outside the new group take part. Without the method it
creates a group over the store, which gets both right.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from gradwire.collectives import Collective
from gradwire.errors import UsageError, UsageRuntimeError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.groups.work import Work
from gradwire.interop.c10d_methods import C10dMethods
from gradwire.interop.operation_hooks import OperationHooks
from gradwire.interop.process_group_base import OverGroup, Settings
from gradwire.interop.work import TorchWork
from gradwire.runtime.dynamo import untraced


def _has_constructor() -> bool:
    try:
        type("Probe", (Backend,), {})(0, 1)
    except TypeError:
        return False
    return True


PYTHON_BACKENDS = _has_constructor()
"""Whether torch lets Python implement backends."""


@untraced
class GradwireBackend(C10dMethods, Backend):
    """A gradwire group in a process group: see Note [A process group and its backend]. `.group` is the gradwire group."""

    supports_splitting = True
    supports_coalescing = True

    def __init__(
        self, group: Group, *, devices: Sequence[str], backend_name: str, coalescing: list[list[Work]] | None = None
    ) -> None:
        Backend.__init__(self, group.rank, group.size)
        OverGroup.__init__(self, group, devices, backend_name, coalescing)
        self._options = Backend.Options(backend_name, timedelta(seconds=group.timeout))

    options = property(lambda self: self._options)
    """torch copies them for the parts of a split."""

    def split(self, store: Store, ranks: Sequence[int], options: Any) -> GradwireBackend:
        """The backend of these ranks. Only they may call it: torch has no result for the others."""
        ranks = [int(rank) for rank in ranks]
        if self.group.rank not in ranks:
            raise UsageError(
                f"split_group of {self.group} into {ranks} on rank {self.group.rank}: torch needs every rank in one of the parts. "
                "Pass split_ranks that contain all ranks, or use dist.new_group."
            )
        subgroup = self.group.subgroup(ranks, name=self._name_part(self.group.name, ranks))
        part = GradwireBackend(subgroup, devices=self._devices, backend_name=self._backend_name)
        if options is not None:
            part.set_timeout(options._timeout)
        return part

    # C++ calls these without a device.
    start_coalescing = OverGroup._start_coalescing
    end_coalescing = OverGroup._end_coalescing

    def __repr__(self) -> str:
        return f"<{self._backend_name} backend over {self.group}>"


@untraced
class GradwireProcessGroup(C10dMethods, OperationHooks, dist.ProcessGroup):  # type: ignore[misc]
    """A gradwire group as torch sees it. Made by `as_process_group`; `.group` is the gradwire group."""

    supports_splitting = PYTHON_BACKENDS  # before, torch asked for a backend in C++
    supports_coalescing = False
    supports_completion_hooks = False  # of C++ only; see _register_on_completion_hook

    def __init__(self, group: Group, *, devices: Sequence[str], backend_name: str, store: Store | None) -> None:
        # torch's other constructor, with a store, cannot make an instance of a Python subclass.
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[call-arg]
        OperationHooks.__init__(self)
        OverGroup.__init__(self, group, devices, backend_name)
        self._store = store
        self._name = group.name
        self._desc = "undefined"
        if PYTHON_BACKENDS:
            kind = dist.ProcessGroup.BackendType.CUSTOM
            backend = GradwireBackend(group, devices=devices, backend_name=backend_name, coalescing=self._coalescing)
            for device in self._device_types:
                self._register_backend(device, kind, backend)
            self._set_default_backend(kind)

    def submit(self, settings: Settings, *ops: Collective) -> TorchWork:
        if not self._pre_hooks and not self._post_hooks:
            return super().submit(settings, *ops)
        return self._between_hooks(ops, settings.async_op, partial(super().submit, settings, *ops))

    def abort(self) -> None:
        try:
            self._fire_abort_hooks()
        finally:
            super().abort()

    def shutdown(self) -> None:
        """Close the group and release the store."""
        self._store = None  # torch may keep the process group: default arguments of torch.distributed.nn.functional do
        super().shutdown()

    # -- names: C++ calls these methods, and torch's Python properties (name, group_name, …) go through C++ ---------------

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        return self._store

    # -- capabilities --------------------------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._devices]

    def _get_backend(self, device: torch.device) -> Any:
        """Itself: see Note [The group is its own backend]."""
        if device.type not in self._devices:
            raise UsageRuntimeError(
                f"{self.group} serves {', '.join(self._devices)}, not {device}. "
                "Pass devices= to as_process_group if the group can move tensors there."
            )
        return self

    get_backend = _get_backend

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """A process group of these `new_ranks` of this one, in this order; None on the other ranks, which need not call it."""
        ranks = [int(rank) for rank in new_ranks]
        if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= rank < self.group.size for rank in ranks):
            raise UsageError(
                f"split_group of {self.group} into {ranks}: pass distinct ranks from 0 to {self.group.size - 1}."
            )
        if self.group.rank not in ranks:
            return None
        name = group_name or self._name_part(self._name, ranks)
        part = type(self)(
            self.group.subgroup(ranks, name=name),
            devices=self._devices if device_types is None else [device.type for device in device_types],
            backend_name=self._backend_name,
            store=None if self._store is None else PrefixStore(f"{name}/", self._store),
        )
        part.setGroupName(name)
        part.setGroupDesc(group_desc or f"{self._desc}:split")
        if timeout is not None:
            part.set_timeout(timeout)
        return part

    def __repr__(self) -> str:
        return f"<{self._backend_name} process group {self._name!r} over {self.group}>"


def as_process_group(
    group: Group, *, devices: Sequence[str] | None = None, backend_name: str = "gradwire", store: Store | None = None
) -> GradwireProcessGroup:
    """A torch.distributed.ProcessGroup that communicates through `group`. Keep it as long as torch uses it.

    `devices` are the device types it serves, by default the CPU and, if available, CUDA. `get_group_store()` returns `store`.

    >>> from gradwire.groups import ThreadGroup
    >>> (group,) = ThreadGroup.world(1)
    >>> pg = as_process_group(group)
    >>> pg.allreduce([torch.ones(2)]).wait(), pg.size(), pg.name()
    (True, 1, 'gradwire')
    >>> pg.shutdown()
    """
    if not isinstance(group, Group):
        raise UsageTypeError(
            f"as_process_group({group!r}): not a gradwire Group. Derive from gradwire.Group and implement submit(op)."
        )
    if not backend_name or backend_name.lower() in {"gloo", "nccl", "mpi", "ucc", "xccl", "fake", "undefined"}:
        raise UsageError(
            f"as_process_group of {group}: the name {backend_name!r} belongs to one of torch's backends, whose C++ part torch "
            "would look for. Choose another."
        )
    if devices is None:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return GradwireProcessGroup(group, devices=devices, backend_name=backend_name, store=store)


def from_process_group(
    pg: dist.ProcessGroup | Backend | None = None,
    *,
    name: str | None = None,
    timeout: float | None = None,
    store: Store | None = None,
) -> Group:
    """The gradwire group of a process group: the one inside, if `as_process_group` made it, else a new one over `pg`.

    A plain backend such as ProcessGroupGloo is accepted too. None means `dist.group.WORLD`. `name`, `timeout` and `store` are
    for a new group, which does not own `pg`.
    """
    if pg is None:
        pg = dist.group.WORLD
    if not isinstance(pg, (dist.ProcessGroup, Backend)):
        raise UsageTypeError(
            f"from_process_group({pg!r}): not a process group. Call dist.init_process_group first, and only on ranks that "
            "are members of the group."
        )
    inside = _inside(pg)
    if inside is not None:
        if name is not None or timeout is not None or store is not None:
            raise UsageError(
                f"from_process_group({pg!r}) with name, timeout or store: the group inside has its own. Omit them."
            )
        return inside
    return C10dGroup(pg, name=name, timeout=timeout, store=store)


def _inside(pg: dist.ProcessGroup | Backend) -> Group | None:
    """The gradwire group that serves all devices of a process group, if one does."""
    if isinstance(pg, (GradwireProcessGroup, GradwireBackend)):
        return pg.group
    if not PYTHON_BACKENDS or not isinstance(pg, dist.ProcessGroup):
        return None
    backends = {pg._get_backend(device) for device in pg._device_types}
    first = next(iter(backends), None)
    return first.group if isinstance(first, GradwireBackend) and len(backends) == 1 else None
