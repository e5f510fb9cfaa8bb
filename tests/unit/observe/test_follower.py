"""Following a ring while it is written."""

import pytest

from gradwire.observe.rings.run_follower import RingFollower
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import FlightRecorder
from helpers.recorder_put import put

HEADER = {"rank": 0, "clock": "here", "started": 0, "started_wall": 0, "ops": []}


@pytest.fixture
def recorder(tmp_path):
    recorder = FlightRecorder(tmp_path / "rank-0.ring", header=HEADER, capacity=2048)
    yield recorder
    recorder.close()


@pytest.fixture
def follower(recorder):
    follower = RingFollower(recorder.path)
    yield follower
    follower.close()


def write(recorder, start, stop):
    for number in range(start, stop):
        put(recorder, RecordKind.MARK, 0, label=f"mark {number % 5}", seq=number)


@pytest.mark.parametrize(
    "portions", [[0], [1], [3, 4, 0, 5], [1024], [1023, 2], [2048], [2000, 100, 2048, 1], [700] * 9]
)
def test_every_record_is_read_once(recorder, follower, portions):
    done = 0
    for portion in portions:
        write(recorder, done, done + portion)
        assert [(r.seq, r.label) for r in follower.poll()] == [
            (n, f"mark {n % 5}") for n in range(done, done + portion)
        ]
        assert follower.poll() == []
        done += portion


def test_a_reader_that_was_overtaken_goes_on_with_what_is_there(recorder, follower):
    write(recorder, 0, 100)
    follower.poll()
    write(recorder, 100, 10_000)
    found = [record.seq for record in follower.poll()]
    assert found == list(range(found[0], 10_000))
    assert len(found) >= 1024
    write(recorder, 10_000, 10_010)
    assert [record.seq for record in follower.poll()] == list(range(10_000, 10_010))


@pytest.mark.parametrize("before", [0, 1500, 3000])
def test_a_reader_that_wants_the_last_records_only(recorder, follower, before):
    write(recorder, 0, before)
    follower.poll()
    write(recorder, before, before + 60)
    assert [record.seq for record in follower.poll(most=64)] == list(range(before, before + 60))
    write(recorder, before + 60, before + 500)
    found = [record.seq for record in follower.poll(most=64)]
    assert found == list(range(before + 500 - len(found), before + 500))
    assert 30 < len(found) < 64


@pytest.mark.parametrize("at", [0, 5, 1023, 1024, 2047])
@pytest.mark.parametrize("old", [True, False])
def test_a_record_that_is_never_written_is_skipped(recorder, follower, at, old):
    when = 0.0 if old else None
    for number in range(at):
        put(recorder, RecordKind.MARK, 0, seq=number)
    found = [record.seq for record in follower.poll()]
    put(recorder, RecordKind.MARK, 0, nbytes=-1)  # takes a number, and does not fit
    for number in range(at + 1, at + 30):
        put(recorder, RecordKind.MARK, 0, seq=number, at=when)
    later = [record.seq for record in follower.poll()]
    if not old:  # the next one may be about to be written
        write(recorder, at + 30, at + 31)
        later += [record.seq for record in follower.poll()]
    assert [*found, *later] == [*range(at), *range(at + 1, at + 30 + (not old))]
