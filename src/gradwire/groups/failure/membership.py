"""Membership: the state of the ranks of a group in different processes, kept in the rendezvous store.

Engines report little: gloo's "connection closed by peer" names no rank, and neither does a timeout. So every rank writes a page
into the store: its host and process, how many collectives it joined, how it left. It reads the others' if an operation is slow.

Note [Dead, or only silent]
A rank counts as dead only on proof: its process, on this host, is gone or a zombie, or it wrote that it left, or another rank wrote
that it is lost. A rank that computes, or is stopped in a debugger, is silent too.

Note [Membership traffic]
A rank writes its count of collectives when one of them is slow, and after a pause between operations. A rank with a slow operation
reads how often any page has changed, at intervals that double up to `_LONGEST_PAUSE`; pages are read, all in one call, only when
that has changed, and once more when an operation times out.

Note [One membership per process group]
Groups over one process group submit their operations to the same engine, so they share a membership, which counts the collectives
of the process group. Ranks need not open and close such groups alike, so the collectives are all that they number consistently; a
rank that has closed its last group and opens another continues its count. A page may therefore be stale: a rank that left when it
had joined no more collectives than this rank when it opened its group may be about to open one as well. Neither that nor a failure
recorded then proves that it is lost; a timeout still names it.

A process group that is destroyed and made again may have the same store and keys. So each rank numbers the process groups over a
store in which it has opened groups, on its page. Nothing is known of a rank with another number: a timeout then names no ranks.

Note [An exchange that outlives its epoch]
Ranks that recover together begin a new epoch, with new keys. A call to the store may be in progress on a thread at that moment.
What it reads is about the old epoch and is written into the old `Peers`, so it cannot hide a failure of the new one or invent one.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore

from gradwire.groups.failure.store_calls import StoreCalls, bounded, innermost
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import MemberProcess, Rendezvous
from gradwire.recorder.source import derived_id
from gradwire.runtime.host import host_identity, is_dead, process_start

_STORE_PATIENCE = timedelta(seconds=3)
_REPORTED_WITHIN = 1.0
"""Seconds by which a store that does not answer may delay a failure."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_LONGEST_QUIET_PAUSE = 1.0


@dataclass(slots=True)
class MemberPage:
    """One rank's page."""

    host: str = ""
    pid: int = 0
    start: str = ""
    joined: int = 0
    left: str = ""
    number: int = 0
    """Which process group over the store the page is about: see Note [One membership per process group]."""


@dataclass(slots=True)
class Peers:
    """What is known of the other ranks since all last recovered together: see Note [An exchange that outlives its epoch]."""

    prefix: str
    members: dict[int, MemberPage]
    """Their pages as last read."""
    number: int = 0
    before: int = -1
    """Pages that ranks wrote when they had joined at most this many collectives may be about an earlier group."""
    here: str = field(default_factory=host_identity)
    failure_record: tuple[int | None, str] | None = None
    """The rank that some rank has reported lost, or None for an aborted group, and why."""
    unreported: list[Any] | None = None
    """The failure that this rank has found, until it is in the store."""
    published: tuple[int, str] | None = None
    seen: int = -1
    """How often pages had changed when they were last read."""

    def in_next_epoch(self, prefix: str) -> Peers:
        """The same processes, none of which has joined a collective yet."""
        members = {rank: MemberPage(m.host, m.pid, m.start, number=self.number) for rank, m in self.members.items()}
        return Peers(prefix, members, self.number, here=self.here)

    def joined(self, place: int) -> tuple[int, ...] | None:
        """Those that have joined at least `place` collectives. None if that is unknown for any of them."""
        if any(member.pid and member.number != self.number for member in self.members.values()):
            return None
        return tuple(rank for rank, member in self.members.items() if member.joined >= place)

    def dead(self) -> int | None:
        """One whose process on this host has ended without leaving. Once a rank was reported lost, no other: they may have ended
        because of it."""
        lost, _ = self.failure_record or (None, "")
        for rank, member in self.members.items():
            on_this_host = bool(member.pid) and member.host == self.here and lost in (None, rank)
            if on_this_host and not self._has_left(member) and is_dead(member.pid, member.start):
                return rank
        return None

    def left_before(self, joined: int) -> int | None:
        """One that left before it had joined `joined` collectives."""
        left = (rank for rank, member in self.members.items() if self._has_left(member) and member.joined < joined)
        return next(left, None)

    def all_left(self) -> int | None:
        """One of them, if all have left."""
        return max(self.members) if self.members and all(map(self._has_left, self.members.values())) else None

    def _has_left(self, member: MemberPage) -> bool:
        return bool(member.left) and self.is_current(member.number, member.joined)

    def is_current(self, number: int, joined: int) -> bool:
        """Whether what a rank wrote is certainly about the current groups."""
        return number == self.number and joined > self.before

    def write(self, store: Any, rank: int, page: MemberPage) -> None:
        """Write this rank's page if it has changed, and a failure that is not reported yet."""
        if self.unreported is not None:
            self._put(store, "lost", self.unreported)
            self.unreported = None
        if self.published != (page.joined, page.left):
            page.number = self.number
            self._put(store, f"{rank}", asdict(page))
            self.published = (page.joined, page.left)

    def _put(self, store: Any, key: str, value: object) -> None:
        store.set(f"{self.prefix}/{key}", json.dumps(value))
        store.add(f"{self.prefix}/changes", 1)

    def read(self, store: Any) -> None:
        """Read the others' pages and the failure record, if any has changed."""
        changes = store.add(f"{self.prefix}/changes", 0)
        if changes == self.seen:
            return
        others = list(self.members)
        keys = [f"{self.prefix}/{r}" for r in others]
        if keys and not store.check(keys):  # some ranks have not made their group yet
            others = [r for r, key in zip(others, keys, strict=True) if store.check([key])]
            keys = [f"{self.prefix}/{r}" for r in others]
        pages = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
        for r, page in zip(others, pages, strict=True):
            self.members[r] = MemberPage(**json.loads(page))
        if self.failure_record is None and (lost := self._lost(store)) is not None:
            rank, reason, number, joined = lost
            if self.is_current(number, joined):
                self.failure_record = (rank, reason)
        self.seen = changes

    def _lost(self, store: Any) -> Any:
        key = f"{self.prefix}/lost"
        return json.loads(store.get(key)) if store.check([key]) else None

    def date_earlier_group(self, store: Any) -> None:
        """Treat everything that ranks wrote when they left or failed as about the earlier group, whatever their counts."""
        self.read(store)
        earlier = [self.before]
        earlier += [m.joined for m in self.members.values() if m.left and m.number == self.number]
        if (lost := self._lost(store)) is not None:
            earlier.append(lost[3])
        self.before, self.failure_record = max(earlier), None


class Membership:
    """One rank's page in the store, and its view of the others' pages."""

    def __init__(
        self, connection: Any, rank: int, size: int, *, key: str = "", resumes: Membership | None = None
    ) -> None:
        """`connection` is a store in which no call blocks for long: `over` makes one. All ranks pass the same `key`, or none, and
        then make their memberships in the same order. `resumes` is this process's previous one with that key, which has left."""
        self.rank = rank
        self.size = size
        self.joined: int = 0 if resumes is None else resumes.joined
        """How many collectives this rank has joined."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """The groups that share it. One that is garbage-collected without being closed no longer counts."""
        self._left = ""
        self._start = process_start(os.getpid()) or ""
        self._next_look, self._look_pause = 0.0, _SHORTEST_PAUSE
        self._counted, self._quiet_since, self._quiet_pause = self.joined, 0.0, _SHORTEST_PAUSE
        self._connection = connection
        self._calls = StoreCalls(connection, patience=_STORE_PATIENCE.total_seconds())
        who = f"the membership of rank {rank} of {size}"
        rendezvous = Rendezvous(connection, rank, size, timeout=_STORE_PATIENCE.total_seconds(), who=who)
        self._base = f"gradwire/{key}" if key else rendezvous.next_key("gradwire")
        self._recoveries: int = 0 if resumes is None else resumes._recoveries
        """How often the ranks have recovered together."""
        self.group_ids: Iterator[int]
        """The identities, for records, of the groups over this membership. Ranks make them in the same order."""
        unread = {r: MemberPage() for r in range(size) if r != rank}
        if resumes is None:
            number = rendezvous.store.add(f"{self._base}/{rank}/number", 1) if key else 0
            shared = rendezvous.shared_id(f"{self._base}/{number}/id")
            self.group_ids = (derived_id(shared, n) for n in itertools.count(1))
            self.peers = Peers(self._prefix(), unread, number)
        else:
            self.group_ids = resumes.group_ids
            self.peers = Peers(self._prefix(), unread, resumes.peers.number, before=self.joined)
            # This rank may have called recover() in the earlier group without success.
            rendezvous.store.set(self._recovery_keys()[rank], "")
            date = partial(self.peers.date_earlier_group, connection)
            self._calls.run(date, within=_STORE_PATIENCE.total_seconds())
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

    def learn(self, processes: Mapping[int, MemberProcess]) -> None:
        """Take over what is known of ranks that have not written a page yet: one may die before it does."""
        for rank, member in self.peers.members.items():
            if not member.pid and (known := processes.get(rank)) is not None:
                page = MemberPage(known.host, known.pid, known.start, number=self.peers.number)
                self.peers.members[rank] = page

    def _prefix(self) -> str:
        return f"{self._base}/{self._recoveries}"

    def _recovery_keys(self) -> list[str]:
        """The keys that ranks set when they reach the next recovery; empty: not yet."""
        return [f"{self._base}/recover/{self.peers.number}/{self._recoveries + 1}/{r}" for r in range(self.size)]

    def start_over(self, in_flight: int, timeout: float) -> tuple[str, bool]:
        """Meet all ranks after a failure and begin a new epoch: (its prefix in the store, whether all had joined the same number of
        collectives and none was in flight). Raises TimeoutError naming the missing ranks."""
        if self.peers.unreported is not None:
            self.publish()  # the others may be waiting in an operation, and recover once they know of the failure
        store = bounded(self._connection, timeout, f"recovery on rank {self.rank} of {self.size}")
        keys = self._recovery_keys()
        store.set(keys[self.rank], json.dumps([self.joined, in_flight]))
        deadline, pause = time.monotonic() + timeout, 0.005
        while not all(values := [store.get(key) for key in keys] if store.check(keys) else [b""]):
            if time.monotonic() > deadline:
                raise TimeoutError(self._not_recovered(store, keys))
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        states = [json.loads(value) for value in values]
        self._recoveries += 1
        self.joined = 0
        self.peers = self.peers.in_next_epoch(self._prefix())
        self.publish()
        in_step = len({joined for joined, _ in states}) == 1 and not any(pending for _, pending in states)
        return f"{self._base}/recovered/{self.peers.number}/{self._recoveries}", in_step

    def _not_recovered(self, store: Any, keys: list[str]) -> str:
        self.refresh()
        if self.peers.joined(0) is None:
            return "not all ranks have called recover(); the missing ones are not known"
        missing = [r for r, key in enumerate(keys) if not (store.check([key]) and store.get(key))]
        return f"ranks {missing} have not called recover()"

    @property
    def store_lost(self) -> bool:
        return self._calls.lost

    def tick(self, *, slow: bool) -> None:
        """Publish and refresh when due, without waiting for the store. `slow`: an operation has been in flight for long."""
        now = time.monotonic()
        if slow:
            self._quiet_pause = _SHORTEST_PAUSE
            if now >= self._next_look and not self._calls.busy:
                self._next_look = now + self._look_pause
                self._look_pause = min(2 * self._look_pause, _LONGEST_PAUSE)
                self._calls.run(partial(self._write, read=True), within=0.0)
            return
        self._look_pause, self._next_look = _SHORTEST_PAUSE, 0.0
        if self.peers.unreported is None and self.peers.published == (self.joined, self._left):
            return
        if self._counted != self.joined:
            self._counted, self._quiet_since = self.joined, now
        elif now - self._quiet_since >= self._quiet_pause and not self._calls.busy:
            self._quiet_pause = min(2 * self._quiet_pause, _LONGEST_QUIET_PAUSE)
            self._calls.run(self._write, within=0.0)

    def publish(self) -> None:
        """Write this rank's page if it has changed, and its failure; waits briefly for the store."""
        self._calls.run(self._write, within=_STORE_PATIENCE.total_seconds())

    def refresh(self, within: float | None = None) -> None:
        """Publish, and read the others' pages and the failure record; waits briefly for the store."""
        within = _STORE_PATIENCE.total_seconds() if within is None else within
        self._calls.run(partial(self._write, read=True), within=within)

    def record_failure(self, rank: int | None, reason: str) -> None:
        """Report to all ranks that `rank` is lost, or, if it is None, that the group is aborted."""
        peers = self.peers
        if peers.failure_record is None:
            peers.failure_record = (rank, reason)
            peers.unreported = [rank, reason, peers.number, self.joined]
            self._calls.run(self._write, within=_REPORTED_WITHIN)  # if the store is busy for longer, `tick` tries again

    def leave(self, how: str, group: object = None) -> None:
        """Unless a group other than `group` still uses it: write that this rank has left, and `how`, and drop the connection."""
        if group is not None:
            self.users.discard(group)
        if self.users:
            return
        self._left = how
        self.publish()
        self._calls.closed = True
        self._connection = None

    def _write(self, *, read: bool = False) -> None:
        store, peers = self._connection, self.peers
        if store is not None:
            here, pid = peers.here, os.getpid()
            peers.write(store, self.rank, MemberPage(here, pid, self._start, self.joined, self._left))
            if read:
                peers.read(store)

    def have_joined(self, place: int) -> tuple[int, ...] | None:
        """The ranks that have joined at least `place` collectives, up to date if the store answers soon; None if unknown."""
        self.refresh(_REPORTED_WITHIN)
        others = None if self.store_lost else self.peers.joined(place)
        return None if others is None else tuple(sorted((self.rank, *others)))


def _connection(store: Any) -> Any:
    """A separate connection to `store`: the caller's may be inside a blocking wait."""
    if not isinstance(innermost(store), HashStore | FileStore | PrivateStore):  # which have no connection to share
        try:
            store = store.clone()
            store.set_timeout(_STORE_PATIENCE)
        except (RuntimeError, NotImplementedError):
            pass  # a user's store that cannot be cloned
    return store


_LOCK = threading.Lock()
_OF_PROCESS_GROUP: weakref.WeakKeyDictionary[Any, Membership] = weakref.WeakKeyDictionary()
"""See Note [One membership per process group]."""
