"""Membership: what ranks in different processes know of each other apart from the data, over the rendezvous store.

Engines report little: gloo's "connection closed by peer" names no rank, and a time-out names nobody. So every rank writes a page
into the store: who it is (host, process), how many collectives it has joined, and how it left. It reads the others' pages when an
operation has been in flight for a while.

Note [Dead, or only silent]
A rank is called dead only on proof: its process, on this host, is gone or a zombie, or it wrote that it left, or another
rank wrote that it is lost. Silence is no proof: a rank that computes, or is stopped in a debugger, is silent too. Nor is a process
that cannot be looked at, because this one has no file descriptor left.

Note [Membership traffic]
Nothing is written or read for operations that finish at once. A rank writes its count of collectives when one of them is slow, and
after a pause between operations, at first a short one, later `_LONGEST_QUIET_PAUSE` seconds. A rank with a slow operation reads one
number, the count of all pages' changes, at pauses that double up to `_LONGEST_PAUSE`; pages are read, all in one call, only when it
has changed. When an operation times out they are read once more, so that the missing ranks are named as of then.

Note [One membership per process group]
Groups over one process group hand their operations to the same engine, so they share a membership: its count is that of the
process group. Nothing makes ranks open and close such groups alike: one rank may open a group alone to look at it, and close it
again. So there is nothing to number that ranks would agree on but the collectives themselves. A rank that has closed its last group
and opens another goes on counting where it was.

Then a page may be of before: a rank that left when it had joined no more collectives than this rank at the time it opened its group
may be about to open one as well. That is no proof that it is lost, and neither is a failure that was recorded then. A time-out
names such a rank all the same: it has not joined. Collectives that bypass gradwire (`dist.all_reduce`) are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore

from gradwire.errors import UNEVEN, ClosedError
from gradwire.groups.bounded_store import StoreCalls, bounded, innermost
from gradwire.groups.host import host_identity, is_dead, process_start
from gradwire.groups.private_store import PrivateStore
from gradwire.groups.rendezvous import Rendezvous

_STORE_PATIENCE = timedelta(seconds=3)
_REPORTED_WITHIN = 1.0
"""Seconds that a failure is held up by a store that does not answer."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_LONGEST_QUIET_PAUSE = 1.0
"""Less than the watchdog ticks after the last operation."""


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
        return bool(self.pid) and self.host == here and is_dead(self.pid, self.start)


class _PartOfStore(PrefixStore):
    """The keys of a sub-group, and the connection to them that memberships share."""

    def __init__(self, prefix: str, store: Any, connection: Any) -> None:
        super().__init__(prefix, store)
        self.connection = PrefixStore(prefix, connection)


class Progress:
    """Counts the collectives that this rank has joined."""

    joined = 0


class Membership(Progress):
    """One rank's page in the store, and its view of the others' pages."""

    def __init__(
        self, connection: Any, rank: int, size: int, *, key: str = "", resumes: Membership | None = None
    ) -> None:
        """`connection` is a store that nobody waits in for long: `over` makes one.

        All ranks pass the same `key`, or none and make their memberships over a store in the same order. `resumes` is the
        membership of this process with that key which was left.
        """
        self.rank = rank
        self.size = size
        self.joined = 0 if resumes is None else resumes.joined
        self._before = -1 if resumes is None else resumes.joined
        """What ranks wrote when they had joined no more than so many collectives may be of an earlier group."""
        self.members = {r: Member() for r in range(size)}
        self.failure_record: tuple[int | None, str] | None = None
        """The rank that another rank has reported lost, or None for an aborted group, and why."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """The groups that share it. One that is dropped without being closed does not count any more."""
        self._left = ""
        self._here = host_identity()
        self._start = process_start(os.getpid()) or ""
        self._published: tuple[int, str] | None = None
        self._seen = -1
        self._next_look, self._look_pause = 0.0, _SHORTEST_PAUSE
        self._counted, self._quiet_since, self._quiet_pause = self.joined, 0.0, _SHORTEST_PAUSE
        self._connection = connection
        self._calls = StoreCalls(connection, patience=_STORE_PATIENCE.total_seconds())
        who = f"the membership of rank {rank} of {size}"
        meeting = Rendezvous(connection, rank, size, timeout=_STORE_PATIENCE.total_seconds(), who=who)
        self._base = f"gradwire/{key}" if key else meeting.next_key("gradwire")
        self._epoch: int = 0 if resumes is None else resumes._epoch
        self.publish()

    @classmethod
    def over(cls, store: Any, rank: int, size: int) -> Membership:
        """The membership of a group that all ranks make, over a connection of its own to `store`."""
        return cls(_connection(store), rank, size)

    @classmethod
    def of(cls, pg: Any, store: Any, group: Any) -> Membership:
        """The membership of the process group that `group` is made over: see Note [One membership per process group]."""
        with _LOCK:
            known = _OF_PROCESS_GROUP.get(pg)
            if known is None or not known.users:
                key = "process group"
                known = cls(_connection(store), group.rank, group.size, key=key, resumes=known)
                _OF_PROCESS_GROUP[pg] = known
            known.users.add(group)
            return known

    def part_of(self, store: Any, name: str) -> PrefixStore:
        """The part of `store` for a sub-group, whose membership uses the same connection: its messages are short."""
        if self._connection is None:
            raise ClosedError(f"sub-group {name!r}: the group that it is part of is closed. Split one that is open.")
        return _PartOfStore(name, store, self._connection)

    @property
    def _prefix(self) -> str:
        return f"{self._base}/{self._epoch}"

    def start_over(self, in_flight: int, timeout: float) -> tuple[int, bool]:
        """Meet all ranks after a failure and begin a new epoch: (its number, whether all were in step).

        In step means that every rank has joined as many collectives and none is in flight: then the engine is as good as
        new. Raises TimeoutError naming who did not come.
        """
        store = bounded(self._connection, timeout, f"recovery on rank {self.rank} of {self.size}")
        keys = [f"{self._base}/recover/{self._epoch + 1}/{r}" for r in range(self.size)]
        store.set(keys[self.rank], json.dumps([self.joined, in_flight]))
        deadline, pause = time.monotonic() + timeout, 0.005
        while missing := [] if store.check(keys) else [r for r, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not called recover()")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        states = [json.loads(store.get(key)) for key in keys]
        self._epoch += 1
        self.joined, self._before = 0, -1
        self.members = {r: Member() for r in range(self.size)}
        self.failure_record = None
        self._published, self._seen = None, -1
        self.publish()
        return self._epoch, len({joined for joined, _ in states}) == 1 and not any(pending for _, pending in states)

    @property
    def store_lost(self) -> bool:
        """Whether the store has stopped answering."""
        return self._calls.lost

    def tick(self, *, slow: bool) -> None:
        """Publish and refresh if it is time, without waiting for the store. `slow`: an operation has been in flight for long."""
        now = time.monotonic()
        if slow:
            self._quiet_pause = _SHORTEST_PAUSE
            if now >= self._next_look and not self._calls.busy:
                self._next_look = now + self._look_pause
                self._look_pause = min(2 * self._look_pause, _LONGEST_PAUSE)
                self._calls.run(self._write_and_read, within=0.0)
            return
        self._look_pause, self._next_look = _SHORTEST_PAUSE, 0.0
        if self._published == (self.joined, self._left):
            return
        if self._counted != self.joined:
            self._counted, self._quiet_since = self.joined, now
        elif now - self._quiet_since >= self._quiet_pause and not self._calls.busy:
            self._quiet_pause = min(2 * self._quiet_pause, _LONGEST_QUIET_PAUSE)
            self._calls.run(self._write, within=0.0)

    def publish(self) -> None:
        """Write this rank's page if it has changed; waits for the store for a moment."""
        self._calls.run(self._write, within=_STORE_PATIENCE.total_seconds())

    def refresh(self, within: float | None = None) -> None:
        """Read the others' pages, and who was reported lost; waits for the store for a moment."""
        self._calls.run(self._read, within=_STORE_PATIENCE.total_seconds() if within is None else within)

    def record_failure(self, rank: int | None, reason: str) -> None:
        """Tell everybody that `rank` is lost, or, if it is None, that the group is."""
        if self.failure_record is None:
            self.failure_record = (rank, reason)
            self._calls.run(lambda: self._put("lost", [rank, reason, self.joined]), within=_REPORTED_WITHIN)

    def leave(self, how: str, group: object = None) -> None:
        """Write that this rank has left, and `how`, then let go of the store's connection; if no group but `group` shares it."""
        if group is not None:
            self.users.discard(group)
        if self.users:
            return
        self._left = how
        self.publish()
        self._calls.close()
        self._connection = None

    # -- on the thread of a store call ---------------------------------------------------------------------------------

    def _put(self, key: str, value: object) -> None:
        store = self._connection
        if store is not None:
            store.set(f"{self._prefix}/{key}", json.dumps(value))
            store.add(f"{self._prefix}/changes", 1)

    def _write(self) -> None:
        page = (self.joined, self._left)
        if page == self._published:
            return
        me = {"host": self._here, "pid": os.getpid(), "start": self._start, "joined": page[0], "left": page[1]}
        self._put(f"{self.rank}", me)
        self._published = page

    def _read(self) -> None:
        store = self._connection
        if store is None:
            return
        changes = store.add(f"{self._prefix}/changes", 0)
        if changes == self._seen:
            return
        others = [r for r in range(self.size) if r != self.rank]
        keys = [f"{self._prefix}/{r}" for r in others]
        if keys and not store.check(keys):  # some ranks have not made their group yet
            others = [r for r, key in zip(others, keys, strict=True) if store.check([key])]
            keys = [f"{self._prefix}/{r}" for r in others]
        pages = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
        for r, page in zip(others, pages, strict=True):
            self.members[r] = Member(**json.loads(page))
        if self.failure_record is None and store.check([f"{self._prefix}/lost"]):
            rank, reason, joined = json.loads(store.get(f"{self._prefix}/lost"))
            if joined > self._before:
                self.failure_record = (rank, reason)
        self._seen = changes

    def _write_and_read(self) -> None:
        self._write()
        self._read()

    # -- who is missing ------------------------------------------------------------------------------------------------

    def have_joined(self, place: int) -> tuple[int, ...] | None:
        """The ranks that have joined at least `place` collectives, as of now if the store answers soon; None if it is lost."""
        self.refresh(_REPORTED_WITHIN)
        if self.store_lost:
            return None
        return tuple(r for r, m in self.members.items() if r == self.rank or m.joined >= place)

    def _has_left(self, member: Member) -> bool:
        """Whether it has left for good, as far as can be told: see Note [One membership per process group]."""
        return bool(member.left) and member.joined > self._before

    def dead(self) -> int | None:
        """A rank whose process on this host has ended without leaving."""
        for rank, member in self.members.items():
            if rank != self.rank and not self._has_left(member) and member.is_dead(self._here):
                return rank
        return None

    def left_before(self, joined: int) -> int | None:
        """A rank that left before it had joined `joined` collectives."""
        for rank, member in self.members.items():
            if rank != self.rank and self._has_left(member) and member.joined < joined:
                return rank
        return None

    def left_alone(self) -> int | None:
        """One of the other ranks, if all of them have left."""
        others = [rank for rank in self.members if rank != self.rank]
        return others[-1] if others and all(self._has_left(self.members[rank]) for rank in others) else None

    def find_culprit(self, joined: int, patience: float = 1.0) -> tuple[int | None, str]:
        """Who is to blame for a broken connection: looks for at most `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            self.refresh(max(0.1, deadline - time.monotonic()))
            dead = self.dead()
            if dead is not None:
                return dead, f"rank {dead} (process {self.members[dead].pid}) has died"
            if self.failure_record is not None:
                return self.failure_record
            over = time.monotonic() >= deadline or self.store_lost
            # A rank that gave this operation up has joined it; but one that finished it may leave too, and others are to blame.
            gone = self.left_before(sys.maxsize if over else joined)
            if gone is not None:
                how = self.members[gone].left
                return gone, f"rank {gone} has left ({how})" + (f". {UNEVEN}" if how == "closed" else "")
            if over:
                return None, "a peer has died or closed its connections; which one is not known"
            time.sleep(0.02)


def _connection(store: Any) -> Any:
    """A connection of its own to `store`: the caller's may be inside a blocking wait."""
    if isinstance(store, _PartOfStore):
        return store.connection
    if not isinstance(innermost(store), HashStore | FileStore | PrivateStore):  # which have no connection to share
        try:
            store = store.clone()
            store.set_timeout(_STORE_PATIENCE)
        except (RuntimeError, NotImplementedError):
            pass  # one of the user's, that cannot
    return store


_LOCK = threading.Lock()
_OF_PROCESS_GROUP: weakref.WeakKeyDictionary[Any, Membership] = weakref.WeakKeyDictionary()
"""See Note [One membership per process group]."""
