"""Threads that a test starts together and waits for."""

import threading
from collections.abc import Iterable


def run_threads(threads: Iterable[threading.Thread]) -> None:
    """Start all and wait for all, with a limit that only ends a hang."""
    threads = list(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), f"{thread.name} hangs"
