"""The threads that wait for sends and receives.

Note [Threads for messages]
Messages with different peers and tags finish in any order, gloo's Work of a message can only be waited on, and a wait that times
out closes all connections of the engine. So each message is waited for once, up to its deadline, by a thread. There are at most
`LIMIT` of them, plus one for each message that a caller waits for: so a caller never waits behind other messages. A message without
a waiting caller is settled when a thread is free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LIMIT = 16


class PendingMessage:
    """A send or receive that was passed to the engine, and what to do when it ends."""

    __slots__ = ("finish", "native")

    def __init__(self, native: Any, finish: Callable[[], None]) -> None:
        self.native = native
        self.finish = finish


class MessageThreads:
    """At most `LIMIT` threads, plus those started by `hurry`. They end when there is nothing to wait for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: deque[PendingMessage] = deque()
        self._running: dict[threading.Thread, PendingMessage] = {}

    def put(self, message: PendingMessage) -> None:
        """Wait for `message` as soon as a thread is free."""
        with self._lock:
            if len(self._running) < LIMIT:
                self._start(message)
            else:
                self._queue.append(message)

    def hurry(self, message: PendingMessage) -> None:
        """Wait for `message` now, because a caller does."""
        with self._lock:
            try:
                self._queue.remove(message)
            except ValueError:
                return
            self._start(message)

    def _start(self, message: PendingMessage) -> None:
        thread = threading.Thread(
            target=self._run, args=(message,), name=f"gradwire-messages-{self._name}", daemon=True
        )
        self._running[thread] = message
        thread.start()

    def _run(self, message: PendingMessage | None) -> None:
        me = threading.current_thread()
        while message is not None:
            message.finish()
            with self._lock:
                message = self._queue.popleft() if self._queue and len(self._running) <= LIMIT else None
                if message is None:
                    del self._running[me]
                else:
                    self._running[me] = message

    def natives(self) -> list[Any]:
        """c10d's Works that threads are waiting for in the engine."""
        with self._lock:
            return [message.native for message in self._running.values()]

    def stop(self, timeout: float) -> bool:
        """Drop what is queued and wait until the threads have left the engine. Whether they have."""
        with self._lock:
            self._queue.clear()
            threads = list(self._running)
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() and thread is not threading.current_thread() for thread in threads)
