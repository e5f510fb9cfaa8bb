"""A rank that is kept for many jobs: what MPI opens for the first message is there before any of them."""

from __future__ import annotations

import importlib

from gradwire.testing.mpi.rank_main import join
from gradwire.testing.pool import warm_worker


def work(folder: str, store: str) -> None:
    """The main function of the process."""
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    world.Barrier()
    join(folder, store, world.rank, warm_worker.work)
