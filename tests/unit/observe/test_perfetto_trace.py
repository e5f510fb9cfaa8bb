"""The trace in Perfetto's own format, read back."""

from __future__ import annotations

import sys

import pytest

from gradwire.errors import UsageError
from gradwire.flight_recorder import RecordKind as K
from gradwire.observe.perfetto_trace import write_perfetto
from gradwire.observe.tracks import rank_tracks
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


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(UsageError, match=r"gradwire\[perfetto\]"):
        write_perfetto([made_ring(0, range(1), size=1)], tmp_path / "t")
    assert not (tmp_path / "t").exists()
