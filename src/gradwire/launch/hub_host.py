"""The hub of an elastic run in a process of its own, and the launcher's calls of a hub.

The launcher listens, and hands the socket on: while no hub runs, connections wait, and the next one has the same address and file.
It imports no torch. It ends when its stdin, which only the launcher can write to, is closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from gradwire.elasticity.hub import Address, Hub, HubClient
from gradwire.elasticity.leases import BEAT
from gradwire.elasticity.run_records import RunRecords
from gradwire.launch.store_host import LOOPBACK

T = TypeVar("T")
_PROGRAM = "import sys; from gradwire.launch.hub_host import serve; serve(int(sys.argv[1]), sys.argv[2])"
_CALL, _PAUSE = 2.0, 0.1
"""Seconds after which a call is repeated, and between two attempts."""


class HubHost:
    """A hub on a free port of the loopback address, with the records in the file `path`."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._path, self._key = path, key
        self._listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self.address: Address = self._listener.getsockname()[:2]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Start the process, for the first time or after its end, and return its id."""
        self._end()
        fd = self._listener.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(fd), str(self._path)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=[fd],
            process_group=0,  # Ctrl-C goes to the terminal's whole process group
        )
        with contextlib.suppress(BrokenPipeError):  # it was killed
            cast(IO[bytes], self.process.stdin).write(self._key.hex().encode() + b"\n")
        return self.process.pid

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def close(self) -> None:
        self._listener.close()
        self._end()


def serve(fd: int, path: str) -> None:
    """The main function of the process: a hub on the listening socket `fd`, until standard input is closed."""
    Hub(path, key=bytes.fromhex(sys.stdin.readline()), address=socket.socket(fileno=fd))  # its threads serve
    sys.stdin.read()
    os._exit(0)


class HubCalls:
    """Calls of a hub, in order, on a thread, each repeated until the hub answers; and, in between, the beats of `launcher`."""

    def __init__(self, address: Address, key: bytes, launcher: str) -> None:
        self._client = HubClient(address, key=key, timeout=_CALL)
        self._launcher = launcher
        self._calls = queue.SimpleQueue[tuple[Callable[[RunRecords], Any], Callable[[Any], object]] | None]()
        self._answers: deque[Callable[[], object]] = deque()
        self.answered = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A descriptor that is readable when `take` has something to do."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="gradwire-hub-calls", daemon=True)
        self._thread.start()

    def add(self, call: Callable[[RunRecords], T], then: Callable[[T], object] = lambda answer: None) -> None:
        """Make a call; `take` passes its answer to `then`."""
        self._calls.put((call, then))

    def take(self) -> None:
        """Handle the answers that have arrived, on the caller's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.answered)
        while self._answers:
            self._answers.popleft()()

    def _run(self) -> None:
        records = RunRecords(self._client)
        while not self._closing:
            with contextlib.suppress(Exception):  # the next one tries again
                for _ in range(2):  # see Note [Leases]
                    self._client.call("beat", self._launcher)
            try:
                one = self._calls.get(timeout=BEAT)
            except queue.Empty:
                continue
            if one is None:
                break
            call, then = one
            while not self._closing:
                try:
                    answer = call(records)
                except Exception:  # whatever it is, only this thread records which processes have ended
                    time.sleep(_PAUSE)
                    continue
                self._answers.append(functools.partial(then, answer))
                os.eventfd_write(self.answered, 1)
                break
        self._client.close()

    def close(self, within: float = 1.0) -> None:
        """End the thread when all calls are made, or after so many seconds."""
        self.add(lambda run: self._client.call("beat", self._launcher, "here", "ended"))
        self._calls.put(None)
        self._thread.join(within)
        self._closing = True
        self._thread.join(2 * _CALL + 1.0)
        os.close(self.answered)


def host_and_port(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
