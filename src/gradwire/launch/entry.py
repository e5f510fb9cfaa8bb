"""`init`: find this process's world, meet its other ranks, and return the group. `leave`: the end of it.

Note [How a rank leaves]
A program that ends has left its world, whether it said so or not, so `leave` is called at interpreter exit. The group is closed
politely after a normal end, so that what is in flight may finish; after an exception that nobody caught it is aborted, which
tells the peers why, since what is in flight then waits for operations that will not come. Where rank 0 hosts the store it stays a
moment longer, until the others are done with it.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.groups.base import DEFAULT_TIMEOUT, MEETING_TIMEOUT
from gradwire.groups.bounded_store import bounded
from gradwire.groups.kinds import AUTO, check_built, default_kind, find_kind, registered_kinds
from gradwire.groups.private_meeting import release
from gradwire.interop.defaults import WORLD
from gradwire.launch.memory import SharedMemory
from gradwire.launch.store import arrive, open_store, say_goodbye
from gradwire.launch.world import World, find_world

_PATIENCE = 5.0
"""Seconds that the host of the store waits for the others at its own end."""


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

    Every rank calls it. `kind` is what carries the bytes, `timeout` how many seconds an operation may take, half an hour by default
    as in torch.distributed. `meeting_timeout` is how many ranks may take to come: 300, as torch's stores give them, or `timeout` if
    that is less. Called again it returns the same group, until that is closed; then it makes another, on all ranks.
    Models that are built without a group use this one. It is closed when the program ends.

    `directory` is the tmpfs for shared memory, /dev/shm unless given, and `room` how many bytes the segment of a host may become;
    GRADWIRE_SHM_DIRECTORY and GRADWIRE_SHM_ROOM say the same in the environment. Those of the lowest rank of a host count.

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
    asked = None if kind == AUTO else find_kind(kind, who=f"gw.init(kind={kind!r})", also=(AUTO,))
    if (directory is not None or room is not None) and asked is not None and not asked.shares_memory:
        raise UsageError(
            f"gw.init(kind={kind!r}, directory={directory!r}, room={room!r}): this kind shares no memory. Leave directory and room "
            f"out, or choose {' or '.join(sorted(other.name for other in registered_kinds() if other.shares_memory))}."
        )
    memory = SharedMemory.read(os.environ, directory=directory, room=room)
    with WORLD.lock:
        known = WORLD.get()
        if known is not None:
            _check_same(kind)
            return known
        world = find_world(os.environ)
        store = open_store(world, timeout=meeting, meeting=WORLD.met)
        try:
            ours = PrefixStore(f"gradwire/world/{WORLD.met}", store)
            agreed = _agree(ours, world, kind, meeting)
            found = find_kind(agreed, who=f"gw.init() on {world}, where rank 0 has chosen kind {agreed!r}")
            options = memory.options if found.shares_memory else {}
            meet = PrefixStore(agreed, ours)
            built = found.build(meet, world.rank, world.size, timeout=meeting, name=name, **options)
            group = check_built(built, found, who=f"gw.init() on {world}")
            group.set_timeout(timeout)
        except BaseException:
            release(store)
            raise
        atexit.unregister(leave)
        atexit.register(leave)  # after the group has made its finalizers, so that it runs before them
        # An earlier group was closed on all ranks, or they would not have come; its store is let go only now, because rank 0
        # may host both at one address.
        leaving = functools.partial(_leave, group, world, store)
        WORLD.put(group, kind=agreed, leave=leaving, release=functools.partial(release, store))
        return group


def leave() -> None:
    """Close the group of `init` and let go of the store, now instead of when the program ends. May be called again."""
    with WORLD.lock:
        WORLD.leave()


def _check_same(kind: str) -> None:
    if kind not in (AUTO, WORLD.kind):
        raise UsageError(
            f"gw.init(kind={kind!r}): this process has joined its world already, with kind {WORLD.kind!r}. Close that group "
            "first, on all ranks, or make one of another kind beside it from a store of your own."
        )


def _agree(store: Store, world: World, kind: str, timeout: float) -> str:
    """Rank 0's choice: hosts may have different numbers of ranks, and so ranks choose differently. NCCL if every rank has a GPU."""
    mine = default_kind(world.size, world.local_size) if kind == AUTO else kind
    if world.size == 1:
        return mine
    calls = bounded(store, timeout, f"gw.init() on {world}")
    if world.rank == 0:
        calls.set("kind", mine)
    calls.add("ranks with a GPU", int(kind == AUTO and has_own_gpu(world)))
    arrive(store, world, timeout=timeout)
    WORLD.met += 1  # before anything can fail: every rank counts this meeting, and the next attempt has keys of its own
    agreed: str = calls.get("kind").decode()
    if calls.add("ranks with a GPU", 0) == world.size:
        agreed = "nccl"
    if kind not in (AUTO, agreed):
        raise UsageError(
            f"gw.init(kind={kind!r}) on {world}: rank 0 has {agreed!r}. Every rank must ask for the same kind, or for none."
        )
    return agreed


def has_own_gpu(world: World) -> bool:
    """Whether this rank's host has a CUDA device for each of its ranks, and NCCL. Which one a rank uses is the program's choice."""
    available = dist.is_nccl_available() and torch.cuda.is_available()
    return available and world.local_size is not None and torch.cuda.device_count() >= world.local_size


def _leave(group: Group, world: World, store: Store) -> None:
    """See Note [How a rank leaves]."""
    error = getattr(sys, "last_value", None)  # set for an exception that ends the program
    if error is not None and group.failure is None and not group.closed:
        group.abort(f"{type(error).__name__}: {error}")
    try:
        group.close()
    finally:
        if group.failure is None:
            say_goodbye(store, world, patience=_PATIENCE)
