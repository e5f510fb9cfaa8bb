"""What carries the bytes of a world: one table from the kind's name to how its group is made, and which kind is the default.

A kind of group that is new adds one builder and one line to the table. `choose` says when it is taken without being asked for;
it only ever takes what is in the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradwire.errors import UsageError
from gradwire.groups import C10dGroup, Group, HierarchicalGroup, MPIGroup, SharedMemoryGroup, ThreadGroup
from gradwire.launch.memory import SharedMemory
from gradwire.launch.world import World

AUTO = "auto"
SHARES_MEMORY = frozenset({"shared_memory", "hierarchical"})
"""Kinds that take the options of shared memory."""
DEFAULTS = SharedMemory()


class Builder(Protocol):
    """Makes one rank's group; all ranks meet in `store`, which is theirs alone."""

    def __call__(
        self, store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS
    ) -> Group:
        """The group of this process."""


def _threads(store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS) -> Group:
    if world.size > 1:
        raise UsageError(
            f"gw.init(kind='threads') on {world}: ranks that are processes cannot be threads of one. Choose another kind: "
            f"{', '.join(kind for kind in BUILDERS if kind != 'threads')}."
        )
    return ThreadGroup.world(1, timeout=timeout, name=name)[0]


def _gloo(store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS) -> Group:
    return C10dGroup.gloo(store, world.rank, world.size, timeout=timeout, name=name)


def _nccl(store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS) -> Group:
    return C10dGroup.nccl(store, world.rank, world.size, timeout=timeout, name=name)


def _shared_memory(store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS) -> Group:
    return SharedMemoryGroup(store, world.rank, world.size, timeout=timeout, name=name, **memory.options)


def _hierarchical(store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS) -> Group:
    inside = partial(SharedMemoryGroup, **memory.options)
    return HierarchicalGroup.discover(store, world.rank, world.size, timeout=timeout, name=name, inside=inside)


def _mpi(store: Store, world: World, *, timeout: float, name: str, memory: SharedMemory = DEFAULTS) -> Group:
    return MPIGroup.over_store(store, world.rank, world.size, timeout=timeout, name=name)


BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "threads": _threads,
        "shared_memory": _shared_memory,
        "hierarchical": _hierarchical,
        "gloo": _gloo,
        "nccl": _nccl,
        "mpi": _mpi,
    }
)


def has_own_gpu(world: World) -> bool:
    """Whether this rank's host has a CUDA device for each of its ranks, and NCCL. Which one a rank uses is the program's choice."""
    available = dist.is_nccl_available() and torch.cuda.is_available()
    return available and world.local_size is not None and torch.cuda.device_count() >= world.local_size


def choose(kind: str, world: World, known: Collection[str] = tuple(BUILDERS)) -> str:
    """The kind to build. "auto" is the fastest for tensors on the CPU; `gw.init` takes "nccl" if every rank `has_own_gpu`.

    >>> from gradwire.launch.world import Launcher
    >>> choose("auto", World(0, 1, Launcher.NONE))
    'threads'
    """
    if kind != AUTO:
        if kind not in known:
            raise UsageError(
                f"gw.init(kind={kind!r}): there is no such kind. Known kinds: {', '.join((AUTO, *known))}."
            )
        return kind
    if world.size == 1:
        return "threads"
    if world.on_one_host:
        wishes = ["shared_memory"]
    elif world.local_size is not None and world.local_size > 1:
        wishes = ["hierarchical"]
    else:
        wishes = []
    return next((wish for wish in wishes if wish in known), "gloo")
