"""`EventSource`: where a layer reports what happens. The ring of the process gets a record, listeners get a typed event.

Both are fed by one call. With a recorder alone no object is made for an event; with neither, nothing happens.
"""

from __future__ import annotations

import hashlib
import secrets

from gradwire.events import Emitter
from gradwire.recorder import writer
from gradwire.recorder.writer import FlightRecorder, RankInGroup


def new_id() -> int:
    """A random identity, for rank 0 to give to the others."""
    return secrets.randbits(64) or 1


def derived_id(*facts: object) -> int:
    """An identity made of facts that all ranks of a group share and no other group has.

    >>> derived_id(5, "split", 0) == derived_id(5, "split", 0), derived_id(5, "split", 0) == derived_id(5, "split", 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class EventSource(Emitter):
    """The events of one group on one rank, or of one model: an emitter that also writes to the recorder."""

    __slots__ = ("_children", "_known", "_member", "group_id", "name", "rank")

    def __init__(self, name: str, rank: int, group_id: int) -> None:
        super().__init__()
        self.name, self.rank, self.group_id = name, rank, group_id
        self._known: FlightRecorder | None = None
        self._member = RankInGroup()
        self._children = 0

    def member(self, recorder: FlightRecorder) -> RankInGroup:
        """This rank of this group, as the records of `recorder` name it."""
        if recorder is not self._known:
            self._member = RankInGroup(self.group_id, recorder.number_of(self.name), self.rank)
            self._known = recorder
        return self._member

    def identify(self, group_id: int) -> None:
        """Name the group by this identity from the next record on."""
        self.group_id, self._known = group_id, None

    def child_id(self, what: str) -> int:
        """The identity of another group of the same ranks that is made of this one. Ranks make them in the same order."""
        self._children += 1
        return derived_id(self.group_id, what, self._children)

    def warn(self, text: str, *, step: int = -1) -> None:
        """Record what a check has found. Ranks that find the same thing together write the same text, which is shown once."""
        recorder = writer.active
        if recorder is not None:
            recorder.warn(text, self.member(recorder), step=step)
