"""Which rank is to blame for a broken connection, which the engine does not name."""

from __future__ import annotations

import sys
import time

from gradwire.errors import UNEVEN
from gradwire.groups.failure.membership import Membership


def find_culprit(membership: Membership, joined: int, patience: float = 1.0) -> tuple[int | None, str]:
    """(rank, reason) for a broken connection; searches for at most `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        membership.refresh(max(0.1, deadline - time.monotonic()))
        dead = membership.peers.dead()
        if dead is not None:
            return dead, f"rank {dead} (process {membership.peers.members[dead].pid}) has died"
        if membership.failure_record is not None:
            return membership.failure_record
        over = time.monotonic() >= deadline or membership.store_lost
        # A rank that gave up on this operation has joined it; so has one that finished it and left, which is not the culprit.
        gone = membership.peers.left_before(sys.maxsize if over else joined)
        if gone is not None:
            how = membership.peers.members[gone].left
            return gone, f"rank {gone} has left ({how})" + (f". {UNEVEN}" if how == "closed" else "")
        if over:
            return None, "a peer has died or closed its connections; which one is not known"
        time.sleep(0.02)
