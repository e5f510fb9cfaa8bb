"""A rank's side: connects to the parent, then is a worker of the pool like any other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from gradwire.testing.pool import worker
from gradwire.testing.pool.messages import send
from gradwire.testing.pool.outcome import ABORT_GRACE, START_LIMIT
from gradwire.testing.private_socket import connect


def work(folder: str, store: str) -> None:
    """The main function of a rank for a single job, which initializes MPI as it needs."""
    join(folder, store, int(os.environ["OMPI_COMM_WORLD_RANK"]), worker.work)


def join(folder: str, store: str, rank: int, work: Callable[..., None]) -> None:
    """Connect and call `work`. The process ends as programs do, for MPI must be finalized."""
    control = connect(folder, timeout=START_LIMIT)
    send(control, rank)
    _, (stack, dumped, *streams), _, _ = socket.recv_fds(control, 1, 4)
    for ours, theirs in enumerate(streams, start=1):
        os.dup2(theirs, ours)
        os.close(theirs)
    control.settimeout(None)
    work(control.detach(), stack, dumped, store, 0, notice=ABORT_GRACE)
