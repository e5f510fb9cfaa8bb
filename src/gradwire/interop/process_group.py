"""`as_process_group`: a gradwire group with c10d's API, for everything in torch that takes a ProcessGroup.

Note [How torch reaches a Python group]
Python code (`dist.*`, FSDP2, ZeRO) calls these methods directly. C++ (the DDP reducer, functional collectives) calls virtual
functions of c10d::ProcessGroup, of which torch forwards only some to Python: docs/interop.md lists both. The rest looks for a
backend, which we have since torch 2.15: see Note [A process group and its backend] in `torch_backend.py`.

Note [Why there is no new_group]
torch would call it with neither the requested backend nor whether the ranks outside the new group take part. Without the method it
creates a group over the store, which gets both right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.interop.c10d_methods import C10dMethods
from gradwire.interop.process_group_base import ProcessGroupBase
from gradwire.interop.torch_backend import PYTHON_BACKENDS, GradwireBackend
from gradwire.runtime.dynamo import untraced


@untraced
class GradwireProcessGroup(C10dMethods, ProcessGroupBase):  # type: ignore[misc]
    """A gradwire group as torch sees it. Made by `as_process_group`; `.group` is the gradwire group."""

    supports_splitting = PYTHON_BACKENDS  # before, torch asked for a backend in C++

    def __init__(self, group: Group, *, devices: Sequence[str], backend_name: str, store: Store | None) -> None:
        super().__init__(group, devices=devices, backend_name=backend_name, store=store)
        if PYTHON_BACKENDS:
            kind = dist.ProcessGroup.BackendType.CUSTOM
            how: Any = {"devices": devices, "backend_name": backend_name, "coalescing": self._coalescing}
            backend = GradwireBackend(group, **how)
            for device in self._devices:
                self._register_backend(device, kind, backend)
            self._set_default_backend(kind)


def as_process_group(
    group: Group, *, devices: Sequence[str] | None = None, backend_name: str = "gradwire", store: Store | None = None
) -> GradwireProcessGroup:
    """A torch.distributed.ProcessGroup that communicates through `group`. Keep it as long as torch uses it.

    `devices` are the device types the group serves, by default the CPU and, if available, CUDA. `store` is what
    `get_group_store()` returns.

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
