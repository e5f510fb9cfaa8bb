"""The tracks of all ranks in Perfetto's own format. Needs the package perfetto: `pip install 'gradwire[perfetto]'`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.rings.ring import Ring
from gradwire.observe.trace.tracks import RankTracks, Slice, Track, rank_tracks

_SEQUENCE = 1
_PER_RANK = 1 << 32
"""Identifiers of tracks and arrows of a rank begin at this times its number plus one."""


def write_perfetto(rings: Sequence[Ring], path: Path) -> int:
    """Write the trace of `rings` to `path`; returns how many packets it has."""
    try:
        protos = import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")  # which have no types
        builders = import_module("perfetto.trace_builder.proto_builder")
    except ImportError:
        raise UsageError(
            "gradwire trace --format pftrace needs the package perfetto: pip install 'gradwire[perfetto]'. Perfetto opens the "
            "default format too."
        ) from None
    number = 0
    with path.open("wb") as file:
        builder = builders.StreamingTraceProtoBuilder(file)
        for rank in rank_tracks(rings):
            for packet in _Packets(protos.TracePacket, rank).packets():
                packet.trusted_packet_sequence_id = _SEQUENCE
                builder.write_packet(packet)
                number += 1
    return number


class _Packets:
    """The packets of one rank."""

    def __init__(self, packet_type: Any, rank: RankTracks) -> None:
        self._packet_type = packet_type
        self._event = packet_type().track_event
        self._rank = rank
        self._root = (rank.rank + 1) * _PER_RANK
        self._ids = itertools.count(self._root + 1)
        self._arrows = {
            id(piece): next(self._ids) for track in rank.tracks for piece in track.slices if piece.cause is not None
        }
        self._leaving: dict[int, list[int]] = {}
        for track in rank.tracks:
            for piece in track.slices:
                if piece.cause is not None:
                    self._leaving.setdefault(id(piece.cause), []).append(self._arrows[id(piece)])

    def packets(self) -> Iterator[Any]:
        yield self._track(self._root, self._rank.name)
        for order, track in enumerate(self._rank.tracks):
            uuid = next(self._ids)
            packet = self._track(uuid, track.name, parent=self._root)
            packet.track_descriptor.sibling_order_rank = order
            yield packet
            yield from self._slices(uuid, track)
            if order == 0:
                yield from self._notes(uuid)
        for name, points in self._rank.counters.items():
            uuid = next(self._ids)
            packet = self._track(uuid, name, parent=self._root)
            packet.track_descriptor.counter.SetInParent()
            packet.track_descriptor.sibling_order_rank = len(self._rank.tracks)
            yield packet
            for time, value in points:
                packet = self._packet(time, uuid, self._event.TYPE_COUNTER)
                packet.track_event.double_counter_value = value
                yield packet

    def _slices(self, uuid: int, track: Track) -> Iterator[Any]:
        for piece in track.slices:
            yield self._begin(uuid, piece)
            for part in piece.inner:
                yield self._begin(uuid, part)
                yield self._packet(part.end, uuid, self._event.TYPE_SLICE_END)
            yield self._packet(piece.end, uuid, self._event.TYPE_SLICE_END)

    def _begin(self, uuid: int, piece: Slice) -> Any:
        packet = self._packet(piece.start, uuid, self._event.TYPE_SLICE_BEGIN)
        event = packet.track_event
        event.name = piece.name
        event.flow_ids.extend(self._leaving.get(id(piece), []))
        if id(piece) in self._arrows:
            event.terminating_flow_ids.append(self._arrows[id(piece)])
        for name, value in piece.arguments.items():
            note = event.debug_annotations.add()
            note.name = name
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = str(value)
        return packet

    def _notes(self, uuid: int) -> Iterator[Any]:
        for note in self._rank.notes:
            packet = self._packet(max(0, note.time), uuid, self._event.TYPE_INSTANT)
            packet.track_event.name = note.name
            packet.track_event.categories.append(note.category)
            yield packet

    def _packet(self, time: int, uuid: int, kind: int) -> Any:
        packet = self._packet_type()
        packet.timestamp = time
        packet.track_event.type = kind
        packet.track_event.track_uuid = uuid
        return packet

    def _track(self, uuid: int, name: str, *, parent: int | None = None) -> Any:
        packet = self._packet_type()
        packet.track_descriptor.uuid = uuid
        packet.track_descriptor.name = name
        if parent is not None:
            packet.track_descriptor.parent_uuid = parent
        else:
            packet.track_descriptor.child_ordering = packet.track_descriptor.EXPLICIT
        return packet
