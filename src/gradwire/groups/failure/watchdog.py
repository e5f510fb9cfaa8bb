"""The watchdog: fails operations whose deadline has passed even if no thread waits for them.

Note [A ticking thread instead of a timer per operation]
A timer per operation, or a condition notified by each submit, would wake a second thread for every operation and pass the
interpreter lock back and forth, which costs more than a small operation. Instead, the watchdog checks what is in flight every
`interval` seconds, and submit only tests a flag. Waiters do not depend on it: they enforce the deadline themselves.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from gradwire.groups.ledger import Ledger


class Watchdog:
    """Watches the ledgers of one or several ranks in one process."""

    def __init__(self, name: str, *, interval: float = 0.1, owners: int = 1) -> None:
        """It ends when the last of its `owners` stops it."""
        self.name = name
        self.interval = interval
        self._owners = owners
        self.running = False
        self._check_failed = False
        self.on_tick: list[Callable[[], None]] = []
        self._ledgers: list[Ledger] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, ledger: Ledger) -> None:
        with self._lock:
            self._ledgers.append(ledger)

    def wake(self) -> None:
        """Make sure that the thread runs; cheap if it does."""
        if self.running or self._stopping.is_set():
            return
        with self._lock:
            if not self.running:
                self.running = True
                self._thread = threading.Thread(target=self._run, name=f"gradwire-watchdog-{self.name}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self.interval):
            self.tick(time.perf_counter())

    def tick(self, now: float) -> None:
        """Fail what is overdue at `now`, then run the owners' own checks."""
        for ledger in list(self._ledgers):
            for work in list(ledger.pending.values()):
                if now >= work.deadline:
                    ledger.expire(work)
        for check in self.on_tick:
            try:
                check()
            except Exception:  # deadlines are enforced all the same
                if not self._check_failed:
                    self._check_failed = True
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))

    def stop(self) -> None:
        with self._lock:
            self._owners -= 1
            if self._owners > 0:
                return
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
