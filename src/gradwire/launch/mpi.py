"""One message over MPI: rank 0 sends the store's address to all others. Needs mpi4py, built for the MPI whose mpirun is used."""

from __future__ import annotations

import time
from typing import Any

from gradwire.errors import CollectiveTimeout, UsageError
from gradwire.launch.world import World

_LENGTH = 512
_PAUSE = 0.005


def broadcast_text(text: str, world: World, *, timeout: float) -> str:
    """Rank 0's `text`, on every rank."""
    comm = _comm_world(world)
    if (comm.rank, comm.size) != (world.rank, world.size):
        raise UsageError(
            f"gw.init() on {world}: in mpi4py this is rank {comm.rank} of {comm.size}. It was built for another MPI than that of "
            "this mpirun: use that MPI's mpirun, or set MASTER_ADDR and MASTER_PORT."
        )
    message = bytearray(text.encode().ljust(_LENGTH))
    request = comm.Ibcast(message, root=0)
    deadline = time.monotonic() + timeout
    while not request.Test():  # not Wait: it has no deadline
        if time.monotonic() >= deadline:
            raise CollectiveTimeout(
                f"gw.init() on {world}: rank 0 has not sent the store's address over MPI within {timeout:.3g} s. "
                "Check that every rank calls gw.init()."
            )
        time.sleep(_PAUSE)
    return bytes(message).decode().strip()


def _comm_world(world: World) -> Any:
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"gw.init() on {world}: ranks started by mpirun get the store's address over MPI, but mpi4py cannot be imported: "
            f"{error}. Install gradwire[mpi], or set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there: "
            "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
        ) from error
    return MPI.COMM_WORLD
