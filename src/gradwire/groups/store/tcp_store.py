"""`host_store`: a TCPStore in this process that listens on the given address only."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def host_store(host: str = LOOPBACK, *, timeout: float = 60.0) -> TCPStore:
    """A store in this process, on a free port of `host` ("" for every address of this machine).

    The port is bound before it is announced, so no other process can take it in between. By itself, a TCPStore listens on
    every address of the machine, whatever host it is given.
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
