"""The trace in Perfetto's own format, read back."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import pytest

from gradwire.errors import UsageError
from gradwire.observe.trace.perfetto_trace import write_perfetto
from gradwire.observe.trace.tracks import rank_tracks
from gradwire.recorder.flight_recorder import RecordKind as K
from helpers.made_rings import MS, made_ring, mark


def test_what_is_written_is_read_back(tmp_path):
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    rings = [made_ring(rank, range(3), more=[mark(99, 70 * MS, K.MARK, "epoch 1")]) for rank in range(2)]
    path = tmp_path / "trace.pftrace"
    number = write_perfetto(rings, path)
    trace = protos.Trace.FromString(path.read_bytes())
    assert len(trace.packet) == number
    described = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    events = [p for p in trace.packet if p.HasField("track_event")]
    kinds = events[0].track_event
    assert all(p.track_event.track_uuid in described for p in events)
    begins = [p for p in events if p.track_event.type == kinds.TYPE_SLICE_BEGIN]
    assert len(begins) == len([p for p in events if p.track_event.type == kinds.TYPE_SLICE_END])
    expected = sum(1 + len(s.inner) for rank in rank_tracks(rings) for track in rank.tracks for s in track.slices)
    assert len(begins) == expected
    # Every slice ends after it begins, on its track, and arrows lead from a bucket to a hook to a collective.
    depth: dict[int, list[int]] = {}
    for p in events:
        stack = depth.setdefault(p.track_event.track_uuid, [])
        if p.track_event.type == kinds.TYPE_SLICE_BEGIN:
            stack.append(p.timestamp)
        elif p.track_event.type == kinds.TYPE_SLICE_END:
            assert p.timestamp >= stack.pop()
    assert not any(depth.values())
    leaving = {flow: p.track_event.name for p in begins for flow in p.track_event.flow_ids}
    arriving = {flow: p.track_event.name for p in begins for flow in p.track_event.terminating_flow_ids}
    assert leaving.keys() == arriving.keys()
    pairs = {(leaving[flow].split()[0], arriving[flow]) for flow in leaving}
    assert pairs == {("bucket", "mean()"), ("mean()", "all_reduce")}
    reduced = next(p.track_event for p in begins if p.track_event.name == "all_reduce")
    assert {note.name: note.int_value for note in reduced.debug_annotations}["bytes"] == 1 << 20
    counters = {d.name for d in described.values() if d.HasField("counter")}
    assert counters == {"bytes in flight", "bytes communicated", "exposed communication (ms)"}
    assert [p.track_event.name for p in events if p.track_event.type == kinds.TYPE_INSTANT] == ["epoch 1", "epoch 1"]


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, by number, from its bytes alone: without descriptions of messages."""

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    place = 0
    while place < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        length = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield number, data[place : place + length]
        place += length


PACKET, TIME, SEQUENCE, EVENT, DESCRIPTOR = 1, 8, 10, 11, 60
UUID, NAME, PARENT, COUNTER = 1, 2, 5, 8
TYPE, TRACK, EVENT_NAME, VALUE, LEAVES, ARRIVES = 9, 11, 23, 44, 47, 48
"""Numbers from Perfetto's protos/perfetto/trace: trace.proto, trace_packet.proto, track_event/track_event.proto and
track_event/track_descriptor.proto."""


def test_what_trace_processor_makes_of_the_bytes(tmp_path):
    """Its rules, on what is in the file: packets are sorted by time, whatever their order, and an end closes the slice of its track
    that began last. The package's own reader downloads a program, so it is not run here."""
    rings = [made_ring(rank, range(3), late=rank * MS) for rank in range(2)]
    path = tmp_path / "trace.pftrace"
    pytest.importorskip("perfetto")
    write_perfetto(rings, path)
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    counters: set[int] = set()
    events = []
    for number, packet in fields(path.read_bytes()):
        assert number == PACKET
        top = dict(fields(packet))
        assert top[SEQUENCE] > 0  # without one the packet is dropped
        if DESCRIPTOR in top:
            track = dict(fields(top[DESCRIPTOR]))
            assert track[UUID] not in names
            names[track[UUID]] = track[NAME].decode()
            parents[track[UUID]] = track.get(PARENT, 0)
            counters |= {track[UUID]} if COUNTER in track else set()
        else:
            events.append((top[TIME], list(fields(top[EVENT]))))
    assert all(parent in names for parent in parents.values() if parent)
    open_slices: dict[int, list[tuple[int, str]]] = {}
    found: dict[int, list[tuple[str, str, int, int]]] = {}
    values: dict[int, list[tuple[int, float]]] = {}
    arrows: list[dict[bytes, int]] = [{}, {}]
    for time, event in sorted(events, key=lambda one: one[0]):
        facts = dict(event)
        track = facts[TRACK]
        rank = parents[track] // (1 << 32) - 1
        if facts[TYPE] == 1:
            open_slices.setdefault(track, []).append((time, facts[EVENT_NAME].decode()))
            for side, field in enumerate((LEAVES, ARRIVES)):
                arrows[side] |= {flow: time for number, flow in event if number == field}
        elif facts[TYPE] == 2:
            start, name = open_slices[track].pop()
            found.setdefault(rank, []).append((names[track], name, start, time))
        else:
            assert facts[TYPE] == 4
            assert track in counters
            values.setdefault(rank, []).append((time, struct.unpack("<d", facts[VALUE])[0]))
    assert not any(open_slices.values())
    for one in rank_tracks(rings):
        expected = [
            (track.name, part.name, part.start, part.end)
            for track in one.tracks
            for piece in track.slices
            for part in (piece, *piece.inner)
        ]
        assert sorted(found[one.rank]) == sorted(expected)
        assert sorted(values[one.rank]) == sorted(point for points in one.counters.values() for point in points)
    assert arrows[0].keys() == arrows[1].keys()
    assert all(begin <= arrows[1][flow] for flow, begin in arrows[0].items())
    assert len(arrows[0]) == 2 * 3 * 2 * 2  # ranks, steps, buckets; from bucket to hook, from hook to collective


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(UsageError, match=r"gradwire\[perfetto\]"):
        write_perfetto([made_ring(0, range(1), size=1)], tmp_path / "t")
    assert not (tmp_path / "t").exists()
