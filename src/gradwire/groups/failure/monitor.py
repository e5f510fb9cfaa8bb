"""`Monitor`: watches the other ranks of a group through its membership.

It reports this rank's progress and failures, fails the group when a peer has died, left or aborted, and finds which ranks have
joined an operation. It is for groups whose engine cannot do so itself. Without a membership, which needs a store, it does nothing.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Sequence

from gradwire.collectives import OpKind
from gradwire.errors import UNEVEN, CollectiveTimeout, GradwireError, GroupAborted, GroupError, PeerLost
from gradwire.groups.base import Group
from gradwire.groups.failure.membership import Membership
from gradwire.groups.ledger import Arrivals, chained
from gradwire.groups.work import Work

_SLOW = 0.3
"""An operation that is in flight for so many seconds is a reason to check the peers."""


# c10d's errors are told apart by their messages.
_TIMED_OUT = re.compile(r"timed? ?out waiting|operation timed out|watchdog.*timeout|connect timeout", re.IGNORECASE)
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|broken pipe|socket (closed|error)|"
    r"pair closure|remote process|nccl.*(remote|system) error|connection.*lost",
    re.IGNORECASE,
)


class Monitor:
    """The failure detector of one group on one rank. Does not keep the group alive."""

    def __init__(self, group: Group, membership: Membership | None) -> None:
        self.membership = membership
        self._group = weakref.ref(group)
        self._ledger = group.ledger
        if membership is not None:
            self._ledger.identify(next(membership.group_ids))

    def join(self, collectives: int = 1) -> int:
        """Count `collectives` that this rank joins, and return how many it has joined by then: 0 if nobody asks."""
        if self.membership is None:
            return 0
        self.membership.joined += collectives
        return self.membership.joined

    def tick(self) -> None:
        """On the watchdog's thread: publish this rank's progress, and look for failed peers if an operation is slow."""
        group, membership = self._group(), self.membership
        if group is None or membership is None or group.closed:
            return
        now = time.perf_counter()
        pending = [work for work in list(self._ledger.pending.values()) if now - work.started > _SLOW]
        slow = bool(pending) and group.failure is None
        membership.tick(slow=slow)
        if slow and (error := self._peer_failure(membership, pending)) is not None:
            group.fail(error)

    def check_peers(self) -> None:
        """Read the membership now, and fail the group if a peer is lost or has aborted."""
        group, membership = self._group(), self.membership
        if group is not None and membership is not None:
            membership.refresh()
            if (error := self._peer_failure(membership, [])) is not None:
                group.fail(error)

    def _peer_failure(self, membership: Membership, pending: Sequence[Work]) -> GroupError | None:
        """The failure of a peer that the membership, as last read, proves; `pending` are the slow operations."""
        first = next(iter(pending), None)
        rank, why = membership.peers.dead(), "its process has died"
        if rank is None and membership.peers.failure_record is not None:
            rank, why = membership.peers.failure_record
            if rank is None:
                return self._ledger.aborted(why, first)
        if rank is None:
            rank = membership.peers.left_before(max((work.place for work in pending), default=0))
            why = f"it has left the group. {UNEVEN}"
        if rank is None and any(work.op.kind is OpKind.RECV and work.op.peer is None for work in pending):
            rank, why = membership.peers.all_left(), "it has left the group, as have all the others"
        return None if rank is None else self._ledger.lost(rank, why, first)

    def report(self, error: BaseException) -> None:
        if self.membership is None:
            return
        mine = self._ledger.rank
        if isinstance(error, PeerLost):
            self.membership.record_failure(error.rank, f"rank {mine} has reported it")
        else:
            reason = error.reason if isinstance(error, GroupAborted) else str(error)
            self.membership.record_failure(None, f"rank {mine} aborted: {reason}")

    def translate(self, error: BaseException, work: Work, engine: str) -> BaseException:
        """The gradwire error for what `engine` raised during `work`, with the original as its cause."""
        if isinstance(error, GradwireError) and not isinstance(error, CollectiveTimeout):
            return error
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where, op = self._ledger.where(work), work.op.signature
        translated: GroupError
        if isinstance(error, CollectiveTimeout):
            # Of a gradwire group behind torch's API, which has another label for it.
            text = f"{where}: {engine} timed out: {error}"
            translated = CollectiveTimeout(text, op=op, joined=error.joined, missing=error.missing)
        elif _PEER_GONE.search(text):
            rank, why = None, "a peer is gone"
            if self.membership is not None:
                rank, why = find_culprit(self.membership, self.membership.joined)
            text = f"{where}: {why}. Look at that rank's output; make a new group. Error of {engine}: {text}"
            translated = PeerLost(text, rank=rank, op=op)
        elif _TIMED_OUT.search(text):
            known = self._ledger.timed_out(work, work.timeout)
            text = f"{known} Error of {engine}: {text}"
            translated = CollectiveTimeout(text, op=op, joined=known.joined, missing=known.missing)
        else:
            translated = GroupError(f"{where}: {engine} failed: {text}")
        error.__context__ = None
        return chained(translated, error)

    def recover(self, timeout: float, *, stuck: int = 0) -> tuple[str, bool]:
        """Meet all ranks: (a new prefix in the store, whether the engine, in which `stuck` operations are, may be kept)."""
        if self.membership is None:
            return "", True
        try:
            return self.membership.start_over(stuck, timeout)
        except TimeoutError as error:
            raise CollectiveTimeout(f"recovery of {self._group()}: {error} within {timeout:.3g} s.") from None

    def arrivals(self, work: Work) -> Arrivals | None:
        """Which ranks have joined a collective."""
        joined = None if self.membership is None else self.membership.have_joined(work.place)
        return None if joined is None else Arrivals.of(joined, self._ledger.size)

    def leave(self, failure: BaseException | None) -> None:
        """Publish that this rank has left, and whether because of a failure."""
        if self.membership is not None:
            how = "closed" if failure is None else f"failed: {type(failure).__name__}"
            self.membership.leave(how, self._group())


def find_culprit(membership: Membership, joined: int, patience: float = 1.0) -> tuple[int | None, str]:
    """(rank, reason) for a broken connection; searches for at most `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        membership.refresh(max(0.1, deadline - time.monotonic()))
        dead = membership.peers.dead()
        if dead is not None:
            return dead, f"rank {dead} (process {membership.peers.members[dead].pid}) has died"
        if membership.peers.failure_record is not None:
            return membership.peers.failure_record
        over = time.monotonic() >= deadline or membership.store_lost
        # A rank that gave up on this operation has joined it; so has one that finished it and left, which is not the culprit.
        gone = membership.peers.left_before(sys.maxsize if over else joined)
        if gone is not None:
            how = membership.peers.members[gone].left
            return gone, f"rank {gone} has left ({how})" + (f". {UNEVEN}" if how == "closed" else "")
        if over:
            return None, "a peer has died or closed its connections; which one is not known"
        time.sleep(0.02)
