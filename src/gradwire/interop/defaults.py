"""What torch.distributed knows by itself: the default process group, its name, its peers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire.errors import UsageError


class NoDefaultGroup(UsageError, RuntimeError):
    """torch.distributed has not been initialised."""


def default_process_group() -> Any:
    """The process group of `dist.init_process_group`."""
    if not dist.is_initialized():
        raise NoDefaultGroup(
            "Default process group has not been initialized, please make sure to call init_process_group. "
            "Or pass a group of your own: DistributedDataParallel(model, process_group=group)."
        )
    return c10d._get_default_group()


def is_default(pg: Any) -> bool:
    """Whether `pg` is the default process group."""
    return dist.is_initialized() and pg is c10d._get_default_group()


def backend_name(pg: Any) -> str:
    """The back end's name as torch reports it."""
    try:
        return str(dist.get_backend(pg))
    except (ValueError, RuntimeError, TypeError):
        return str(getattr(pg, "name", lambda: type(pg).__name__)())


def mesh_group(mesh: Any) -> Any:
    """The process group of a one-dimensional device mesh."""
    if mesh.ndim != 1:
        raise MeshError(f"Only 1D device mesh is supported, but got {mesh}.")
    return mesh.get_group(mesh_dim=0)


class MeshError(UsageError, RuntimeError):
    """A device mesh that data parallelism cannot run on."""
