"""Waits with a deadline, for what no event reports: files, other processes' states, what an engine has got to."""

import os
import select
import time
from collections.abc import Callable

LIMIT = 60.0
"""Seconds: only ends a hang, on however busy a machine."""
_LOOK = 0.002


def wait_until(condition: Callable[[], object], what: str, *, limit: float = LIMIT) -> None:
    """Return when `condition()` holds. Fails after `limit` seconds, saying `what` did not happen."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(_LOOK)


def wait_for_exit(pid: int, *, limit: float = LIMIT) -> None:
    """Return when the process has ended, whether or not it is our child and its parent has waited for it."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], limit)[0], f"process {pid} still runs after {limit:.0f} s"
    finally:
        os.close(ended)
