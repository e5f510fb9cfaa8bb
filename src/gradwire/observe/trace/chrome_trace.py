"""One picture of a run: the tracks of all ranks in Chrome's JSON format, which Perfetto opens. A rank is a process of the trace."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradwire.observe.rings.ring import Ring
from gradwire.observe.trace.tracks import RankTracks, Slice, rank_tracks

_STEP = 1
"""The number of the first track. Those of a rank are numbered, whatever is on them."""
Event = dict[str, Any]


def write_trace(rings: Sequence[Ring], path: Path, more: Iterable[Event] = ()) -> int:
    """Write the trace of `rings`, with the events `more`, to `path`; returns how many events it has."""
    number = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(itertools.chain(trace_events(rings), more), 1):
            file.write((",\n" if number > 1 else "") + json.dumps(event))
        file.write("\n]}\n")
    return number


def trace_events(rings: Sequence[Ring]) -> Iterator[Event]:
    """The events of the trace, on the clock of the first rank's host."""
    for rank in rank_tracks(rings):
        yield from _rank_events(rank)


def _rank_events(rank: RankTracks) -> Iterator[Event]:
    def event(phase: str, track: int, time: int, **more: Any) -> Event:
        return {"ph": phase, "pid": rank.rank, "tid": track, "ts": time / 1e3, **more}

    def meta(what: str, track: int, **arguments: Any) -> Event:
        return {"ph": "M", "pid": rank.rank, "tid": track, "name": what, "args": arguments}

    def drawn(piece: Slice, track: int) -> Event:
        duration = (piece.end - piece.start) / 1e3
        return event("X", track, piece.start, name=piece.name, dur=duration, args=piece.arguments)

    yield meta("process_name", 0, name=rank.name)
    yield meta("process_sort_index", 0, sort_index=rank.rank)
    place: dict[int, int] = {}  # by slice: its track
    flows = itertools.count(1)
    for number, track in enumerate(rank.tracks, _STEP):
        yield meta("thread_name", number, name=track.name)
        yield meta("thread_sort_index", number, sort_index=number)
        for piece in track.slices:
            place[id(piece)] = number
            yield drawn(piece, number)
            for part in piece.inner:
                yield drawn(part, number)
            if (cause := piece.cause) is not None:
                flow = {"name": "hook", "cat": "hook", "id": f"{rank.rank}.{next(flows)}"}
                start = max(cause.start, min(piece.start, cause.end))
                yield event("s", place[id(cause)], start, **flow)
                yield event("f", number, piece.start, bp="e", **flow)
    for name, points in rank.counters.items():
        for time, value in points:
            yield event("C", 0, time, name=name, args={"value": value})
    for note in rank.notes:
        yield event("i", _STEP, note.time, name=note.name, s="p", cat=note.category)
