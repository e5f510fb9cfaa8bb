"""The roll call: what ranks in different processes know of each other beside the data, over the rendezvous store.

Engines tell little: gloo's "connection closed by peer" names no rank, and a time-out names nobody. So every rank writes into
the store who it is (host, process), how many collectives it has joined, and how it left; and reads the others' entries when
an operation has been in flight for a while. Nothing is written or read for operations that finish at once.

Note [Dead, or only silent]
A rank is called dead only on proof: its process, on this host, is gone or a zombie, or it wrote that it left, or another
rank wrote its obituary. Silence is no proof: a rank that computes, or is stopped in a debugger, is silent too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore

from gradwire.errors import ClosedError, CollectiveTimeout
from gradwire.groups.file_store import bounded, innermost
from gradwire.groups.host import host_identity, process_start

_STORE_PATIENCE = timedelta(seconds=3)
_GIVE_UP_AFTER = 3


@dataclass(slots=True)
class Member:
    """What is known of one rank."""

    host: str = ""
    pid: int = 0
    start: str = ""
    joined: int = 0
    left: str = ""

    def is_dead(self, here: str) -> bool:
        """Whether its process, if it is on this host, has ended."""
        return bool(self.pid) and self.host == here and process_start(self.pid) != self.start


class RollCall:
    """One rank's page in the store, and its view of the others' pages."""

    def __init__(self, connection: Any, rank: int, size: int) -> None:
        """`connection` is a store that nobody waits in for long: `over` makes one."""
        self.rank = rank
        self.size = size
        self.joined = 0
        self.members = {r: Member() for r in range(size)}
        self.obituary: tuple[int | None, str] | None = None
        self._left = ""
        self._here = host_identity()
        self._published: tuple[int, str] | None = None
        self._failures = 0
        self._lock = threading.RLock()  # abort() in a signal handler may interrupt a call of this thread's
        self._connection = connection
        self._store = bounded(connection, _STORE_PATIENCE.total_seconds(), f"the roll call of rank {rank} of {size}")
        # Groups over one store are made in the same order on every rank, so they have the same number.
        self._base = f"gradwire/{self._store.add(f'gradwire/{rank}/groups', 1)}"
        self._epoch = 0
        self.publish()

    @classmethod
    def over(cls, store: Any, rank: int, size: int) -> RollCall:
        """A roll call over a connection of its own to `store`: the caller's may be inside a blocking wait."""
        if not isinstance(innermost(store), HashStore | FileStore):  # which have no connection to share
            try:
                store = store.clone()
                store.set_timeout(_STORE_PATIENCE)
            except (RuntimeError, NotImplementedError):
                pass  # one of the user's, that cannot
        return cls(store, rank, size)

    def within(self, name: str, rank: int, size: int) -> RollCall:
        """The roll call of a sub-group, over the same connection: roll calls only exchange short messages over it."""
        with self._lock:
            connection = self._connection
        if connection is None:
            raise ClosedError(f"sub-group {name!r}: the group that it is part of is closed. Split one that is open.")
        return RollCall(PrefixStore(name, connection), rank, size)

    @property
    def _prefix(self) -> str:
        return f"{self._base}/{self._epoch}"

    def start_over(self, in_flight: int, timeout: float) -> tuple[int, bool]:
        """Meet all ranks after a failure and begin a new epoch: (its number, whether all were in step).

        In step means that every rank has joined as many collectives and none is in flight: then the engine is as good as
        new. Raises TimeoutError naming who did not come.
        """
        keys = [f"{self._base}/recover/{self._epoch + 1}/{r}" for r in range(self.size)]
        self._store.set(keys[self.rank], json.dumps([self.joined, in_flight]))
        deadline = time.monotonic() + timeout
        while missing := [r for r, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not called recover()")
            time.sleep(0.01)
        states = [json.loads(self._store.get(key)) for key in keys]
        self._epoch += 1
        self.joined = 0
        self.members = {r: Member() for r in range(self.size)}
        self.obituary = None
        self._published = None
        self.publish()
        return self._epoch, len({joined for joined, _ in states}) == 1 and not any(pending for _, pending in states)

    @property
    def store_lost(self) -> bool:
        """Whether the store has stopped answering."""
        return self._failures >= _GIVE_UP_AFTER

    def publish(self) -> None:
        """Write this rank's page if it has changed."""
        page = (self.joined, self._left)
        if page == self._published:
            return
        me = {
            "host": self._here,
            "pid": os.getpid(),
            "start": process_start(os.getpid()),
            "joined": page[0],
            "left": page[1],
        }
        if self._talk(lambda: self._store.set(f"{self._prefix}/{self.rank}", json.dumps(me))):
            self._published = page

    def refresh(self) -> None:
        """Read the others' pages and the obituary, if one was written."""
        keys = [f"{self._prefix}/{r}" for r in range(self.size)]

        def read() -> None:
            for r, key in enumerate(keys):
                if r != self.rank and self._store.check([key]):
                    self.members[r] = Member(**json.loads(self._store.get(key)))
            if self._store.check([f"{self._prefix}/obituary"]):
                rank, reason = json.loads(self._store.get(f"{self._prefix}/obituary"))
                self.obituary = (rank, reason)

        self._talk(read)

    def bury(self, rank: int | None, reason: str) -> None:
        """Tell everybody that `rank` is lost, or, if it is None, that the group is."""
        if self.obituary is None:
            self.obituary = (rank, reason)
            self._talk(lambda: self._store.set(f"{self._prefix}/obituary", json.dumps([rank, reason])))

    def _talk(self, exchange: Callable[[], Any]) -> bool:
        with self._lock:
            if self.store_lost:
                return False
            try:
                exchange()
            except CollectiveTimeout:  # see Note [A record cut short]: no later call would come back
                self._failures = _GIVE_UP_AFTER
                return False
            except (RuntimeError, ValueError):  # c10d's store errors are RuntimeErrors; a torn page is a ValueError
                self._failures += 1
                return False
            self._failures = 0
        return True

    def leave(self, how: str) -> None:
        """Write that this rank has left, and `how`; then let go of the store's connection."""
        self._left = how
        self.publish()
        with self._lock:
            self._failures = _GIVE_UP_AFTER
            self._store = self._connection = None

    def dead(self) -> int | None:
        """A rank whose process on this host has ended without leaving."""
        for rank, member in self.members.items():
            if rank != self.rank and not member.left and member.is_dead(self._here):
                return rank
        return None

    def left_before(self, joined: int) -> int | None:
        """A rank that left before it had joined `joined` collectives."""
        for rank, member in self.members.items():
            if rank != self.rank and member.left and member.joined < joined:
                return rank
        return None

    def left_alone(self) -> int | None:
        """One of the other ranks, if all of them have left."""
        others = [rank for rank in self.members if rank != self.rank]
        return others[-1] if others and all(self.members[rank].left for rank in others) else None

    def find_culprit(self, joined: int, patience: float = 1.0) -> tuple[int | None, str]:
        """Who is to blame for a broken connection: looks for at most `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            self.refresh()
            dead = self.dead()
            if dead is not None:
                return dead, f"rank {dead} (process {self.members[dead].pid}) has died"
            if self.obituary is not None:
                return self.obituary
            over = time.monotonic() >= deadline or self.store_lost
            # A rank that gave this operation up has joined it; but one that finished it may leave too, and others are to blame.
            gone = self.left_before(sys.maxsize if over else joined)
            if gone is not None:
                return gone, f"rank {gone} has left ({self.members[gone].left})"
            if over:
                return None, "a peer has died or closed its connections; which one is not known"
            time.sleep(0.02)
