"""Which collectives and steps of a run have failed, and what of it belongs together. Pure.

Note [One failure]
A collective fails on several ranks, each of which words it for itself; it lets the step fail, other collectives that were under
way in the group, and with them those of other ranks, whose errors quote the first. All of that is one failure. A script that
catches an error may go on, in the same group or in a new one of the same name: what was submitted later has failed on its own.
So has every send and receive, since each has its own peer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gradwire.observe.report.rank_summary import RankSummary
from gradwire.observe.rings.ring import Record
from gradwire.observe.units import ranks as ranks_text
from gradwire.recorder.format import RecordKind

_OF_RANK = re.compile(r" on rank \d+ of \d+(?=:)")
"""What is different on each rank in the texts of one failure."""
_COLLECTIVE = re.compile(r"(?!send\(|recv\()\b[a-z]\w*\(.*?\) \(operation #\d+ of [^)]*\)")
"""A collective in the text of an error."""
_ABORTED = "GroupAborted: "
"""What has failed because something else has."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something has failed."""

    rank: int
    record: Record
    time: float
    """In seconds since 1970."""


@dataclass(slots=True)
class Failure:
    """Something that has failed, once or several times, on one rank or on several."""

    texts: dict[str, list[Place]] = field(default_factory=dict)
    """By error text: where it was raised."""
    others: int = 0
    """How many other operations have failed with it."""

    @property
    def places(self) -> list[Place]:
        """Everywhere."""
        return [place for places in self.texts.values() for place in places]

    @property
    def text(self) -> str:
        """That of the first rank whose error is not just about an abort by another."""
        return min(self.texts, key=lambda text: (text.startswith(_ABORTED), self.texts[text][0].time))

    @property
    def ranks(self) -> list[int]:
        """On which ranks."""
        return sorted({place.rank for place in self.places})

    @property
    def steps(self) -> list[int]:
        """In which steps, as far as it is known."""
        return sorted({place.record.step for place in self.places if place.record.step >= 0})

    @property
    def collectives(self) -> int:
        """How many collectives these were, counted on each rank."""
        return sum(place.record.kind is RecordKind.COLLECTIVE_FAILED for place in self.places)

    @property
    def detail(self) -> str:
        """The text, and what else belongs to it."""
        said = {place.rank for place in self.texts[self.text]}
        rest = [rank for rank in self.ranks if rank not in said]
        more = [f"{ranks_text(rest).capitalize()} reported it in other words."] if rest else []
        if self.others:
            several = self.others > 1
            more.append(
                f"{self.others} other operation{'s' * several} that {'were' if several else 'was'} under way failed with it."
            )
        return " ".join([self.text, *more])


def find_failures(ranks: Iterable[RankSummary], *, left_out: re.Pattern[str] | None = None) -> list[Failure]:
    """What has failed, in the order of time, except errors whose text matches `left_out`. See Note [One failure]."""
    found: dict[str, Failure] = {}
    for rank in ranks:
        kept = [one for one in rank.failures if left_out is None or not left_out.match(one.label)]
        for record, others in _first_of_each(kept):
            text = _OF_RANK.sub("", record.label)
            failure = found.setdefault(_identity(text), Failure())
            failure.texts.setdefault(text, []).append(Place(rank.rank, record, rank.wall_time(record.time)))
            failure.others += others
    return sorted(found.values(), key=lambda failure: min(place.time for place in failure.places))


def _identity(text: str) -> str:
    """What the texts of one failure have in common: the collective that failed first, which is the last that they quote."""
    collectives = _COLLECTIVE.findall(text)
    return collectives[-1] if collectives else text


def _first_of_each(records: Iterable[Record]) -> Iterator[tuple[Record, int]]:
    """Those of a rank that have failed by themselves, each with the number of operations that have failed with it."""
    firsts: dict[tuple[int, int], int] = {}
    kept: list[list[Record]] = []
    for record in records:
        if record.kind is RecordKind.COLLECTIVE_FAILED:
            member = record.group_id, record.rank
            number = firsts.get(member)
            if number is not None and _has_failed_with(record, kept[number][0]):
                kept[number].append(record)
                continue
            firsts[member] = len(kept)
        kept.append([record])
    return ((group[0], len(group) - 1) for group in kept)


def _has_failed_with(record: Record, first: Record) -> bool:
    """Whether it was under way when the first failed."""
    alone = not record.ordinal and not record.label.startswith(_ABORTED)  # a send or a receive
    return not alone and record.time - record.duration < first.time
