"""`init`: find this process's world, meet its other ranks, and return the group. `leave`: close it.

`leave` is called at interpreter exit. After a normal exit the group is closed, so that operations in flight may finish. After an
uncaught exception it is aborted, which reports the reason to the peers. If rank 0 hosts the store it waits for the others a while.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.groups.base import DEFAULT_TIMEOUT, MEETING_TIMEOUT
from gradwire.groups.failure.store_calls import bounded
from gradwire.groups.kinds import AUTO, check_built, default_kind, find_kind, registered_kinds
from gradwire.groups.store.private_store import release
from gradwire.interop.default_group import WORLD
from gradwire.launch.environment import MEMBER, read_checks, shared_memory_options
from gradwire.launch.run_script import start_recorder
from gradwire.launch.store import arrive, open_store, say_goodbye
from gradwire.launch.world import World, find_world
from gradwire.policies import set_default_checks
from gradwire.runtime.cleanup import on_failure

_PATIENCE = 5.0
"""Seconds that the rank that hosts the store waits for the others before it exits."""


def init(
    kind: str = AUTO,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    meeting_timeout: float | None = None,
    name: str = "world",
    directory: str | None = None,
    room: int | None = None,
) -> Group:
    """The group of all ranks of this process's world, under `gradwire run`, torchrun, mpirun, SLURM, or alone.

    Every rank calls it. `kind` is the kind of group, `timeout` the seconds that an operation may take, by default half an hour as
    in torch.distributed. `meeting_timeout` is the seconds within which all ranks must arrive: 300, as for torch's stores, or
    `timeout` if that is less. Called again it returns the same group, until that is closed; then it makes another, on all ranks.
    Models that are built without a group use this one. It is closed when the program ends.

    `directory` is the tmpfs for shared memory, by default /dev/shm, and `room` the maximum size in bytes of a host's segment;
    GRADWIRE_SHM_DIRECTORY and GRADWIRE_SHM_ROOM set them in the environment. The values of the lowest rank of a host are used.

    >>> import gradwire as gw
    >>> group = gw.init()
    >>> group.rank, group.size, gw.init() is group
    (0, 1, True)
    >>> gw.launch.leave()
    """
    timeout = timeout_seconds(f"gw.init(timeout={timeout!r})", timeout)
    meeting = min(MEETING_TIMEOUT, timeout)
    if meeting_timeout is not None:
        meeting = timeout_seconds(f"gw.init(meeting_timeout={meeting_timeout!r})", meeting_timeout)
    memory = _memory(kind, directory, room)
    with WORLD.lock:
        known = WORLD.get()
        if known is None:
            if MEMBER in os.environ:
                raise UsageError(
                    "gw.init() under gradwire run --elastic: ranks come and go, which gw.elastic() alone follows. Call that."
                )
            return _join(find_world(os.environ), kind, name, memory, timeout=timeout, meeting=meeting)
        if kind not in (AUTO, WORLD.kind):
            raise UsageError(
                f"gw.init(kind={kind!r}): this process has already joined its world, with kind {WORLD.kind!r}. Close that group "
                "first, on all ranks, or make an additional group over your own store."
            )
        return known


def _memory(kind: str, directory: str | None, room: int | None) -> dict[str, Any]:
    asked = None if kind == AUTO else find_kind(kind, who=f"gw.init(kind={kind!r})", also=(AUTO,))
    if (directory is not None or room is not None) and asked is not None and not asked.shares_memory:
        raise UsageError(
            f"gw.init(kind={kind!r}, directory={directory!r}, room={room!r}): this kind has no shared memory. Omit directory and "
            f"room, or choose {' or '.join(sorted(other.name for other in registered_kinds() if other.shares_memory))}."
        )
    return shared_memory_options(os.environ, directory=directory, room=room)


def _join(world: World, kind: str, name: str, memory: dict[str, Any], *, timeout: float, meeting: float) -> Group:
    start_recorder(world, "gw.init()")
    set_default_checks(read_checks(os.environ))
    store = open_store(world, timeout=meeting, meeting=WORLD.met)
    with on_failure(release, store):
        ours = PrefixStore(f"gradwire/world/{WORLD.met}", store)
        agreed = _agree(ours, world, kind, meeting)
        found = find_kind(agreed, who=f"gw.init() on {world}, where rank 0 has chosen kind {agreed!r}")
        options = memory if found.shares_memory else {}
        meet = PrefixStore(agreed, ours)
        built = found.build(meet, world.rank, world.size, timeout=meeting, name=name, **options)
        group = check_built(built, found, who=f"gw.init() on {world}")
        group.set_timeout(timeout)
    atexit.unregister(leave)
    atexit.register(leave)  # after the group's finalizers are created, so that it runs before them
    # An earlier group was closed on all ranks, or they would not be here; its store is released only now, because rank 0
    # may host both at one address.
    leaving = functools.partial(_leave, group, world, store)
    WORLD.put(group, kind=agreed, leave=leaving, release=functools.partial(release, store))
    return group


def leave() -> None:
    """Close the group of `init` and release the store, now instead of at program exit. May be called again."""
    with WORLD.lock:
        WORLD.leave()


def _agree(store: Store, world: World, kind: str, timeout: float) -> str:
    """Rank 0's choice, since ranks on hosts of different sizes may choose differently. NCCL if every rank has a GPU."""
    mine = default_kind(world.size, world.local_size) if kind == AUTO else kind
    if world.size == 1:
        return mine
    calls = bounded(store, timeout, f"gw.init() on {world}")
    if world.rank == 0:
        calls.set("kind", mine)
    # Whether this rank's host has NCCL and a CUDA device for each of its ranks; the program chooses which one a rank uses.
    nccl = dist.is_nccl_available() and torch.cuda.is_available() and world.local_size is not None
    calls.add("ranks with a GPU", int(kind == AUTO and nccl and torch.cuda.device_count() >= (world.local_size or 0)))
    arrive(store, world, timeout=timeout)
    WORLD.met += 1  # before anything can fail: every rank counts this meeting, and the next attempt uses other keys
    agreed: str = calls.get("kind").decode()
    if calls.add("ranks with a GPU", 0) == world.size:
        agreed = "nccl"
    if kind not in (AUTO, agreed):
        raise UsageError(
            f"gw.init(kind={kind!r}) on {world}: rank 0 has {agreed!r}. Every rank must pass the same kind, or none."
        )
    return agreed


def _leave(group: Group, world: World, store: Store) -> None:
    error = getattr(sys, "last_value", None)  # set for an exception that ends the program
    if error is not None and group.failure is None and not group.closed:
        group.abort(f"{type(error).__name__}: {error}")
    try:
        group.close()
    finally:
        if group.failure is None:
            say_goodbye(store, world, patience=_PATIENCE)
