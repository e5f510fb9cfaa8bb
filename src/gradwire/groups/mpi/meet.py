"""How processes that know each other by a rendezvous store find each other in MPI."""

from __future__ import annotations

from collections import Counter

from gradwire.errors import UsageError
from gradwire.groups.rendezvous import Rendezvous


def members(meeting: Rendezvous, world_rank: int, world_size: int, *, what: str) -> tuple[list[int], str]:
    """The MPI ranks of the group's ranks, in order, and the group's key in the store."""
    key, size = meeting.next_key("gradwire/mpi"), meeting.size
    ranks = [int(told) for told in meeting.exchange(f"{key}/", str(world_rank))]
    twice = [r for r, times in Counter(ranks).items() if times > 1]
    if twice:
        raise UsageError(
            f"{what}: its ranks are processes {ranks} of MPI's world of {world_size}, so {twice} stand for several. "
            f"Start all {size} processes with one mpirun (mpirun -n {size} python ...), not by torchrun or by hand."
        )
    return ranks, key
