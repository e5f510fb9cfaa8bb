"""How processes that know each other by a rendezvous store find each other in MPI."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from torch._C._distributed_c10d import Store

from gradwire.errors import CollectiveTimeout, UsageError


def members(
    store: Store, rank: int, size: int, world_rank: int, world_size: int, *, timeout: float, what: str
) -> tuple[list[int], int]:
    """The MPI ranks of the group's ranks, in order, and which group over this store it is, counted from 1."""
    number = store.add(f"gradwire/mpi/groups/{rank}", 1)  # every rank makes the groups over one store in the same order
    keys = [f"gradwire/mpi/{number}/{r}" for r in range(size)]
    store.set(keys[rank], f"{world_rank} {world_size}")
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as problem:  # c10d's DistStoreError is one
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeout(
            f"{what}: ranks {missing} did not come to the store within {timeout:.3g} s. Look at their output for the cause.",
            missing=missing,
            joined=[r for r in range(size) if r not in missing],
        ) from problem
    ranks = [int(store.get(key).decode().split()[0]) for key in keys]
    twice = [r for r, times in Counter(ranks).items() if times > 1]
    if twice:
        raise UsageError(
            f"{what}: its ranks are processes {ranks} of MPI's world of {world_size}, so {twice} stand for several. "
            f"Start all {size} processes with one mpirun (mpirun -n {size} python ...), not by torchrun or by hand."
        )
    return ranks, number
