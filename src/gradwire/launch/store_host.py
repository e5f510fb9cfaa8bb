"""The process that hosts the store for scripts that call torch's `init_process_group`, so that the launcher need not import torch.

`gw.init()` does not use it: every user of the host can connect to a TCPStore.
The launcher binds the port; connections made before this process is up wait in the backlog. It ends when its stdin is closed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from gradwire.launch.process import Start

LOOPBACK = "127.0.0.1"
_PROGRAM = "import sys; from gradwire.launch.store_host import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


class StoreHost:
    """A store on a free port of the loopback address."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self.port: int = self._listener.getsockname()[1]
        self._process: Any = None
        self.ended = -1
        """A descriptor that becomes readable once the process has ended."""

    def start(self, popen: Start) -> None:
        with self._listener:
            fd = self._listener.fileno()
            self._process = popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(fd), str(self.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                process_group=0,  # Ctrl-C goes to the terminal's whole process group; the launcher decides how to handle it
            )
        self.ended = os.pidfd_open(self._process.pid)

    def close(self) -> None:
        """End the process; the store is no longer needed."""
        self._listener.close()
        if self._process is not None:
            self._process.stdin.close()
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # it may still be importing torch
            self._process.wait()
            os.close(self.ended)


def serve(fd: int, port: int) -> None:
    """The main function of the process: host the store on the listening socket `fd` until standard input is closed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    os.read(0, 1)
    del store
    os._exit(0)
