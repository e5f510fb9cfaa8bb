"""The pages that the ranks of a group write into the rendezvous store, and what they prove of a rank: see `membership.py`.

Note [An exchange that outlives its epoch]
Ranks that recover together begin a new epoch, with new keys. A call to the store may be in progress on a thread at that moment.
What it reads is about the old epoch and is written into the old `Epoch`, so it cannot hide a failure of the new one or invent one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.runtime.host import host_identity, is_dead


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
    """The other ranks, by their pages as last read."""

    members: dict[int, MemberPage]
    number: int = 0
    before: int = -1
    """Pages that ranks wrote when they had joined at most this many collectives may be about an earlier group."""
    here: str = field(default_factory=host_identity)

    @classmethod
    def of(cls, rank: int, size: int, *, number: int = 0, before: int = -1) -> Peers:
        """The peers of `rank`, before any page was read."""
        return cls({r: MemberPage() for r in range(size) if r != rank}, number, before)

    def in_next_epoch(self) -> Peers:
        """The same processes, none of which has joined a collective yet."""
        members = {rank: MemberPage(m.host, m.pid, m.start, number=self.number) for rank, m in self.members.items()}
        return Peers(members, self.number, here=self.here)

    def joined(self, place: int) -> tuple[int, ...] | None:
        """Those that have joined at least `place` collectives. None if that is unknown for any of them."""
        if any(member.pid and member.number != self.number for member in self.members.values()):
            return None
        return tuple(rank for rank, member in self.members.items() if member.joined >= place)

    def dead(self) -> int | None:
        """One whose process on this host has ended without leaving."""
        for rank, member in self.members.items():
            on_this_host = bool(member.pid) and member.host == self.here
            if on_this_host and not self._has_left(member) and is_dead(member.pid, member.start):
                return rank
        return None

    def left_before(self, joined: int) -> int | None:
        """One that left before it had joined `joined` collectives."""
        for rank, member in self.members.items():
            if self._has_left(member) and member.joined < joined:
                return rank
        return None

    def all_left(self) -> int | None:
        """One of them, if all have left."""
        return max(self.members) if self.members and all(map(self._has_left, self.members.values())) else None

    def _has_left(self, member: MemberPage) -> bool:
        return bool(member.left) and self.is_current(member.number, member.joined)

    def is_current(self, number: int, joined: int) -> bool:
        """Whether what a rank wrote is certainly about the current groups."""
        return number == self.number and joined > self.before


@dataclass(slots=True)
class Epoch:
    """What is known since the ranks last recovered together: see Note [An exchange that outlives its epoch]."""

    prefix: str
    peers: Peers
    failure_record: tuple[int | None, str] | None = None
    unreported: list[Any] | None = None
    """The failure that this rank has found, until it is in the store."""
    published: tuple[int, str] | None = None
    seen: int = -1
    """How often pages had changed when they were last read."""

    def write(self, store: Any, rank: int, page: MemberPage) -> None:
        """Write this rank's page if it has changed, and a failure that is not reported yet."""
        if self.unreported is not None:
            self._put(store, "lost", self.unreported)
            self.unreported = None
        if self.published != (page.joined, page.left):
            page.number = self.peers.number
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
        others = list(self.peers.members)
        keys = [f"{self.prefix}/{r}" for r in others]
        if keys and not store.check(keys):  # some ranks have not made their group yet
            others = [r for r, key in zip(others, keys, strict=True) if store.check([key])]
            keys = [f"{self.prefix}/{r}" for r in others]
        pages = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
        for r, page in zip(others, pages, strict=True):
            self.peers.members[r] = MemberPage(**json.loads(page))
        if self.failure_record is None and (lost := self._lost(store)) is not None:
            rank, reason, number, joined = lost
            if self.peers.is_current(number, joined):
                self.failure_record = (rank, reason)
        self.seen = changes

    def _lost(self, store: Any) -> Any:
        key = f"{self.prefix}/lost"
        return json.loads(store.get(key)) if store.check([key]) else None

    def date_earlier_group(self, store: Any) -> None:
        """Treat everything that ranks wrote when they left or failed as about the earlier group, whatever their counts."""
        self.read(store)
        earlier = [self.peers.before]
        earlier += [m.joined for m in self.peers.members.values() if m.left and m.number == self.peers.number]
        if (lost := self._lost(store)) is not None:
            earlier.append(lost[3])
        self.peers.before, self.failure_record = max(earlier), None
