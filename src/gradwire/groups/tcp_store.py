"""`host_store`: a TCPStore in this process that listens where it is told to, and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def host_store(host: str = LOOPBACK, *, timeout: float = 60.0) -> TCPStore:
    """A store in this process, on a free port of `host` ("" for every address of this machine).

    The port is bound before anybody is told of it, so nobody else can have taken it in between. Left to itself, a TCPStore
    listens on every address of the machine, whatever host it is given.
    """
    listener = socket.create_server((host, 0), backlog=2048)
    port = listener.getsockname()[1]
    return TCPStore(
        host or LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
