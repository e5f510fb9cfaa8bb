"""The hang report in the text of an error."""

import os
import time
import warnings

import pytest
import torch

from gradwire import observe
from gradwire.errors import CollectiveTimeout, PeerLost
from gradwire.observe.recording import _header
from gradwire.observe.rings.ring import RingFile
from gradwire.observe.rings.run_follower import RingFollower
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import FlightRecorder
from gradwire.testing import run_ranks
from helpers.recorder_put import put


def notes(error):
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
def test_a_timeout_names_what_the_missing_rank_does(tmp_path, kind):
    def rank_main(group):
        observe.start(tmp_path, rank=group.rank, size=group.size)
        try:
            group.barrier()
            if group.rank == 1:
                read_a_slow_file(tmp_path)
                return ""
            group.set_timeout(0.5)
            began = time.monotonic()
            with pytest.raises(CollectiveTimeout) as raised:
                group.all_reduce(torch.ones(3), label="loss")
            assert time.monotonic() - began < 30
            (tmp_path / "over").touch()
            return notes(raised.value)
        finally:
            observe.stop()

    def read_a_slow_file(directory):
        while not (directory / "over").exists():
            time.sleep(0.01)

    text, _ = run_ranks(rank_main, 2, kind=kind)
    assert text.startswith("From the flight recorders:\nrank 0 has waited for")
    assert "in all_reduce 'loss'" in text
    assert "rank 1 (process" in text
    assert "read_a_slow_file() at" in text


@pytest.fixture
def waiting(recorded):
    """A rank 0 that waits in a collective which rank 1, whose process has ended, has not submitted."""
    other = FlightRecorder(recorded / "rank-1.ring", header={**_header(1, 2), "process_start": "1"}, capacity=16)
    put(other, RecordKind.GROUP, 1, group="world", nbytes=2)
    recorder = writer.active
    assert recorder is not None
    put(recorder, RecordKind.GROUP, 0, group="world", nbytes=2)
    for kind in (RecordKind.COLLECTIVE_SUBMITTED, RecordKind.COLLECTIVE_WAITED, RecordKind.COLLECTIVE_FAILED):
        put(recorder, kind, 0, group="world", ordinal=1)
    yield other
    other.close()


def test_a_lost_peer_is_explained_once(waiting):
    error = PeerLost("rank 1 is lost", rank=1)
    for _ in range(2):
        writer.add_report(error)
    [note] = error.__notes__
    assert "rank 1 (process" in note
    assert "its process has ended" in note


@pytest.mark.parametrize("filters", ["always", "error"])
def test_what_cannot_be_read_is_shown_once_and_does_not_hide_the_error(waiting, recorded, monkeypatch, filters):
    def fail():
        raise OSError("stale file handle")

    monkeypatch.setattr(writer, "reporter", fail)
    monkeypatch.setattr(writer, "_has_warned", False)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(filters)
        for _ in range(2):
            error = PeerLost("rank 1 is lost", rank=1)
            writer.add_report(error)
            assert notes(error) == ""
    texts = [str(one.message) for one in shown]
    assert len(texts) == (filters == "always")
    assert all("could not be read for an error: OSError: stale file handle" in text for text in texts)
    kept = [one.text for one in observe.read_warnings(observe.read_rings(recorded))]
    assert kept == ["the flight recorders of other ranks could not be read for an error: OSError: stale file handle"]


def test_without_a_recorder_nothing_is_added():
    error = PeerLost("rank 1 is lost", rank=1)
    writer.add_report(error)
    assert notes(error) == ""


@pytest.mark.parametrize("written", [0, 1, 5, 16, 17, 31, 32, 40])
def test_the_newest_record_is_found_in_a_ring_that_wraps(tmp_path, written):
    recorder = FlightRecorder(tmp_path / "rank-0.ring", header=_header(0, 1), capacity=16)
    for number in range(written):
        put(recorder, RecordKind.MARK, 0, label=str(number))
    recorder.close()
    with RingFile(recorder.path) as ring:
        assert ring.newest() == written - 1
    follower = RingFollower(recorder.path, tail=3)
    assert [r.label for r in follower.poll()] == [str(n) for n in range(max(0, written - 4), written)]
    follower.close()


def test_a_forked_child_has_no_reporter(recorded):
    pid = os.fork()
    if pid == 0:
        os._exit(int(writer.reporter is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert writer.reporter is not None
