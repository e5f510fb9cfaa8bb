"""A rank's side: connects to the parent, then is a worker of the pool like any other."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable

from gradwire.testing.pool import worker
from gradwire.testing.pool.protocol import ABORT_GRACE, START_LIMIT, send
from gradwire.testing.private_socket import connect


def work(folder: str, store: str) -> None:
    """The main function of a rank for a single job, which initializes MPI as it needs."""
    _join(folder, store, int(os.environ["OMPI_COMM_WORLD_RANK"]), worker.work)


def work_warm(folder: str, store: str) -> None:
    """The main function of a rank that is kept for many jobs: what MPI opens for the first message is there before any of them."""
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    world.Barrier()
    _join(folder, store, world.rank, worker.work_warm)


def _join(folder: str, store: str, rank: int, work: Callable[..., None]) -> None:
    """Connect, and be a worker. The process ends as programs do, for MPI must be finalized."""
    control = connect(folder, timeout=START_LIMIT)
    send(control, rank)
    _, (stack, dumped, *streams), _, _ = socket.recv_fds(control, 1, 4)
    for ours, theirs in enumerate(streams, start=1):
        os.dup2(theirs, ours)
        os.close(theirs)
    control.settimeout(None)
    work(control.detach(), stack, dumped, store, 0, notice=ABORT_GRACE)
