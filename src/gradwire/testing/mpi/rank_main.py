"""A rank's side: connects to the parent, then is a worker of the pool like any other."""

from __future__ import annotations

import importlib
import os
import socket

from gradwire.testing.pool.messages import send
from gradwire.testing.pool.outcome import ABORT_GRACE, START_LIMIT
from gradwire.testing.pool.worker import work
from gradwire.testing.private_socket import connect


def main(folder: str, store: str) -> None:
    """The life of a rank. It ends as programs do, for MPI must be finalized."""
    control = connect(folder, timeout=START_LIMIT)
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    world.Barrier()  # what MPI opens for the first message is there before any snapshot
    send(control, world.rank)
    _, (stack, dumped, *streams), _, _ = socket.recv_fds(control, 1, 4)
    for ours, theirs in enumerate(streams, start=1):
        os.dup2(theirs, ours)
        os.close(theirs)
    control.settimeout(None)
    work(control.detach(), stack, dumped, store, 0, notice=ABORT_GRACE)
