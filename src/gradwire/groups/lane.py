"""A lane: one thread that does jobs in the order they came, for what needs several steps and must not block the caller.

A collective that an engine lacks is a program of several collectives. All ranks must submit those in the same order, so the
programs of one group run one after another, in submission order, on its lane.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Lane:
    """An ordered worker thread, started with the first job. Holds no reference to its owner but through its jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unfinished = 0
        self.stopping = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether every job put so far is done. Exact only for the thread that puts them."""
        return self._unfinished == 0

    def put(self, job: Job) -> None:
        """Do `job()` after those put before it. A job handles its own errors."""
        with self._lock:
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"gradwire-lane-{self._name}", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job
                with self._lock:
                    self._unfinished -= 1

    def stop(self, timeout: float = 5.0) -> bool:
        """Finish the jobs put so far and end the thread. False if it has not ended after `timeout` seconds."""
        self.stopping.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._jobs.put(None)
        if thread is threading.current_thread():  # the last job held the last reference to the lane's owner
            return True
        thread.join(timeout)
        return not thread.is_alive()
