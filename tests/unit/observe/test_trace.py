"""The trace: events that Perfetto draws."""

import json

import pytest

from gradwire.observe.trace import trace_events, write_trace
from gradwire.recorder.format import RecordKind as K
from helpers.made_rings import made_ring, step_records


@pytest.fixture
def step(record):
    """A step with two buckets whose reductions overlap."""

    def make(rank: int, at: int = 0):
        world = {"group": "world", "rank": rank}
        return [
            record(K.FORWARD_BEGAN, at + 0, step=0, **world),
            record(K.FORWARD_ENDED, at + 1000, step=0, **world),
            record(K.BUCKET_FULL, at + 2000, step=0, bucket=0, nbytes=8, **world),
            record(K.COLLECTIVE_SUBMITTED, at + 2100, op="all_reduce", seq=0, step=0, bucket=0, nbytes=8, **world),
            record(K.BUCKET_FULL, at + 3000, step=0, bucket=1, nbytes=8, **world),
            record(K.COLLECTIVE_SUBMITTED, at + 3100, op="all_reduce", seq=1, step=0, bucket=1, nbytes=8, **world),
            record(K.BACKWARD_ENDED, at + 4000, step=0, **world),
            record(K.COLLECTIVE_FINISHED, at + 4100, op="all_reduce", seq=0, duration=2000, nbytes=8, **world),
            record(K.COLLECTIVE_FINISHED, at + 4100, op="all_reduce", seq=1, duration=1000, nbytes=8, **world),
            record(K.BUCKET_REDUCED, at + 4200, step=0, bucket=0, nbytes=8, **world),
            record(K.BUCKET_REDUCED, at + 4300, step=0, bucket=1, nbytes=8, **world),
            record(K.STEP_ENDED, at + 4400, step=0, **world),
        ]

    return make


def of(events, phase, **facts):
    return [e for e in events if e["ph"] == phase and all(e.get(k) == v for k, v in facts.items())]


def test_slices_of_a_step(step, ring):
    events = list(trace_events([ring(0, *step(0, at=7000))]))
    slices = {e["name"]: (e["ts"], e["dur"]) for e in of(events, "X", pid=0)}
    assert slices["forward"] == (0.0, 1.0)
    assert slices["backward"] == (1.0, 3.0)
    assert slices["exposed communication"] == (4.0, 0.4)
    assert slices["bucket 0"] == (2.0, 2.2)
    assert slices["bucket 1"] == (3.0, 1.3)


def test_slices_on_one_track_do_not_overlap(step, ring):
    events = list(trace_events([ring(0, *step(0))]))
    tracks = {}
    whole = [e for e in of(events, "X") if not e["name"].startswith("stage")]  # these are parts of others
    for e in sorted(whole, key=lambda e: e["ts"]):
        assert e["ts"] >= tracks.get(e["tid"], 0.0)
        tracks[e["tid"]] = e["ts"] + e["dur"]
    assert len(tracks) == 1 + 2 + 2 + 2


def test_arrows_lead_from_a_bucket_to_its_hook_and_to_its_collectives(step, ring):
    events = list(trace_events([ring(0, *step(0))]))
    slices = of(events, "X")
    starts, ends = of(events, "s"), of(events, "f")
    assert len(starts) == len(ends) == 4
    arrows = []
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        sources = [e for e in slices if e["tid"] == start["tid"] and e["ts"] <= start["ts"] <= e["ts"] + e["dur"]]
        targets = [e for e in slices if e["tid"] == end["tid"] and e["ts"] == end["ts"]]
        assert sources[0]["args"]["bucket"] == targets[0]["args"]["bucket"]
        arrows.append((sources[0]["name"], targets[0]["name"]))
    assert sorted(arrows) == [
        ("bucket 0", "hook"),
        ("bucket 1", "hook"),
        ("hook", "all_reduce"),
        ("hook", "all_reduce"),
    ]


def test_stages_of_a_hook_are_what_lies_between_its_collectives():
    records = step_records(0, 1, buckets=1, hook="power_sgd(rank=2)")
    [full, first] = [r.time for r in records if r.kind in (K.BUCKET_FULL, K.COLLECTIVE_SUBMITTED)]
    end = next(r for r in records if r.kind is K.COLLECTIVE_FINISHED)
    second = end._replace(number=end.number + 1, time=end.time + 500_000, seq=99, step=1, bucket=0, duration=100_000)
    ring = made_ring(0, range(0))
    ring.records[:] = records + [second]
    events = list(trace_events([ring]))
    [hook] = of(events, "X", name="power_sgd(rank=2)")
    stages = [(e["name"], e["dur"]) for e in events if e["name"].startswith("stage")]
    assert stages == [("stage 1", (first - full) / 1e3), ("stage 2", 400.0)]
    assert hook["ts"] + hook["dur"] == (second.time - min(r.time for r in records)) / 1e3


def test_any_number_of_overlapping_buckets_have_tracks_of_their_own():
    ring = made_ring(0, range(0))
    ring.records[:] = step_records(0, 0, buckets=150)
    events = list(trace_events([ring]))
    names = {e["tid"]: e["args"]["name"] for e in of(events, "M", name="thread_name")}
    assert len(names) == 1 + 3 * 150
    for e in of(events, "X"):
        kind = names[e["tid"]]
        assert kind == {"bucket": "buckets", "all_re": "wire: world", "mean()": "hook", "stage ": "hook"}.get(
            e["name"][:6], "step"
        )


def test_counters(step, ring):
    events = list(trace_events([ring(0, *step(0))]))
    assert [e["args"]["value"] for e in of(events, "C", name="bytes communicated")] == [8, 16]
    assert [e["args"]["value"] for e in of(events, "C", name="exposed communication (ms)")] == [400 / 1e6]


def test_bytes_in_flight_come_back_to_nothing(step, ring):
    values = [e["args"]["value"] for e in of(list(trace_events([ring(0, *step(0))])), "C", name="bytes in flight")]
    assert values == [8, 16, 8, 0]


def test_what_has_not_finished_is_drawn_to_the_end(record, ring):
    records = [
        record(K.COLLECTIVE_SUBMITTED, 100, op="all_reduce", group="world", seq=4),
        record(K.MARK, 9100, label="still here"),
    ]
    events = list(trace_events([ring(0, *records)]))
    [stuck] = of(events, "X")
    assert (stuck["name"], stuck["dur"]) == ("all_reduce (not finished)", 9.0)
    [mark] = of(events, "i")
    assert mark["name"] == "still here"


def test_a_file_of_two_ranks_is_json(step, ring, tmp_path):
    path = tmp_path / "trace.json"
    number = write_trace([ring(0, *step(0)), ring(1, *step(1, at=500))], path)
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == number
    assert {e["pid"] for e in events} == {0, 1}
    assert min(e["ts"] for e in events if "ts" in e) == 0.0


def test_no_records_give_an_empty_trace(ring, tmp_path):
    write_trace([ring(0)], tmp_path / "t.json")
    assert [e["ph"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]] == ["M", "M", "M", "M"]


def test_ranks_of_one_process_are_told_apart(record, ring):
    facts = {"op": "all_reduce", "group": "world", "seq": 0, "ordinal": 1}
    events = trace_events(
        [
            ring(
                0,
                record(K.COLLECTIVE_SUBMITTED, 0, rank=0, **facts),
                record(K.COLLECTIVE_SUBMITTED, 0, rank=1, **facts),
                record(K.COLLECTIVE_FINISHED, 10, rank=0, duration=10, **facts),
            )
        ]
    )
    assert sorted(e["name"] for e in of(events, "X")) == ["all_reduce", "all_reduce (not finished)"]


def test_what_is_not_over_has_no_negative_duration(record, ring):
    """The last record may be of an earlier time: threads write theirs when they come to it."""
    events = trace_events(
        [ring(0, record(K.COLLECTIVE_SUBMITTED, 500, op="all_reduce", group="world"), record(K.MARK, 100))]
    )
    assert [e["dur"] for e in of(events, "X")] == [0.0]
