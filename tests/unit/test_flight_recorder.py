"""The ring: what is written is read again, whatever the writer does next."""

import os
import threading
from pathlib import Path

import pytest

from gradwire.errors import UsageError
from gradwire.observe.rings.ring import read_ring
from gradwire.recorder import writer
from gradwire.recorder.format import HEADER as HEADER_FIELDS, MAGIC, PAGE, RECORD, VERSION, RecordKind, names_path
from gradwire.recorder.writer import FlightRecorder, Place, RankInGroup, within
from helpers.recorder_put import put
from helpers.threads import run_threads

HEADER = {
    "rank": 3,
    "size": 4,
    "pid": 1,
    "host": "h",
    "clock": "c",
    "started": 0,
    "started_wall": 0,
    "ops": ["all_reduce"],
}


@pytest.fixture
def recorder(tmp_path):
    recorder = FlightRecorder(tmp_path / "rank-3.ring", header=HEADER, capacity=16)
    yield recorder
    recorder.close()


@pytest.fixture
def active(recorder, monkeypatch):
    monkeypatch.setattr(writer, "active", recorder)
    return recorder


def test_every_field_is_read_as_it_was_written(recorder):
    facts = {
        "group": "world",
        "label": "loss ß",
        "seq": 7,
        "ordinal": 9 << 40,
        "nbytes": 1 << 40,
        "step": 5,
        "bucket": 2,
    }
    facts |= {"group_id": (1 << 64) - 1, "model": 3}
    put(recorder, RecordKind.COLLECTIVE_FINISHED, 3, at=1.5, op=0, duration=0.25, **facts)
    [read] = read_ring(recorder.path).records
    assert read._asdict() == {
        **facts,
        "number": 0,
        "kind": RecordKind.COLLECTIVE_FINISHED,
        "time": 1_500_000_000,
        "op": "all_reduce",
        "rank": 3,
        "thread": threading.get_native_id(),
        "duration": 250_000_000,
        "peer": -1,
        "message": -1,
        "on_device": False,
    }


@pytest.mark.parametrize("written", [0, 1, 15, 16, 17, 40])
def test_the_last_records_stay(recorder, written):
    for number in range(written):
        put(recorder, RecordKind.MARK, 3, seq=number)
    ring = read_ring(recorder.path)
    assert [record.seq for record in ring.records] == list(range(written))[-16:]
    assert ring.lost == max(0, written - 16)


def test_threads_lose_nothing(tmp_path):
    recorder = FlightRecorder(tmp_path / "rank-0.ring", header=HEADER)
    each = 2000

    def write(name):
        for number in range(each):
            put(recorder, RecordKind.MARK, 0, label=name, seq=number)

    run_threads(threading.Thread(target=write, args=(f"thread {i}",)) for i in range(4))
    recorder.close()
    records = read_ring(recorder.path).records
    assert len(records) == 4 * each
    for i in range(4):
        mine = [record for record in records if record.label == f"thread {i}"]
        assert [record.seq for record in mine] == list(range(each))
        assert len({record.thread for record in mine}) == 1


def test_records_belong_to_the_bucket_in_which_they_are_written(active):
    with within(Place(4, 1, 6)):
        put(active, RecordKind.MARK, 0)
        with within(Place(4, 2)):
            put(active, RecordKind.MARK, 0)
        put(active, RecordKind.MARK, 0, step=4, bucket=7, model=1)
        other = threading.Thread(target=lambda: put(active, RecordKind.MARK, 0))
        other.start()
        other.join()
    put(active, RecordKind.MARK, 0)
    places = [(r.step, r.bucket, r.model) for r in read_ring(active.path).records]
    assert places == [(4, 1, 6), (4, 2, 0), (4, 7, 1), (-1, -1, 0), (-1, -1, 0)]


def test_without_a_recorder_there_is_no_place():
    assert writer.active is None
    with within(Place(4, 1)):
        assert writer.current_place() == (-1, -1, 0)


def test_different_labels_without_end_do_not_fill_the_disk(recorder, monkeypatch):
    monkeypatch.setattr(writer, "_MOST_NAMES", 5)
    for number in range(10):
        put(recorder, RecordKind.MARK, 3, label=f"step {number}")
    labels = [record.label for record in read_ring(recorder.path).records]
    assert labels == [f"step {n}" for n in range(4)] + ["(too many different names)"] * 6
    assert len(names_path(recorder.path).read_text().splitlines()) == 6


def test_a_full_disk_costs_a_name_and_nothing_else(recorder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    put(recorder, RecordKind.MARK, 3, label="new")
    monkeypatch.undo()
    [record] = read_ring(recorder.path).records
    assert record.label == ""


def test_no_room_for_the_ring_is_an_error_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        FlightRecorder(tmp_path / "rank-0.ring", header=HEADER)
    assert list(tmp_path.iterdir()) == []


def test_writing_after_close_does_nothing(recorder):
    put(recorder, RecordKind.MARK, 3)
    recorder.close()
    put(recorder, RecordKind.MARK, 3, label="late")
    recorder.close()
    assert len(read_ring(recorder.path).records) == 1


@pytest.mark.parametrize("capacity", [0, 3, -4])
def test_the_capacity_is_a_power_of_two(tmp_path, capacity):
    with pytest.raises(ValueError, match="power of two"):
        FlightRecorder(tmp_path / "x.ring", header=HEADER, capacity=capacity)


def test_a_header_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match="header"):
        FlightRecorder(tmp_path / "x.ring", header={"command": "x" * 5000})


@pytest.mark.parametrize("content", [b"", b"GWFLIGHT", b"x" * 10000, b"GWFLIGHT" + bytes(9000)])
def test_what_is_not_a_ring_is_refused(tmp_path, content):
    path = tmp_path / "rank-0.ring"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=str(path)):
        read_ring(path)


def test_a_half_written_name_and_a_missing_file_of_names_are_survived(recorder):
    put(recorder, RecordKind.MARK, 3, label="first")
    put(recorder, RecordKind.MARK, 3, label="second")
    path = names_path(recorder.path)
    path.write_bytes(path.read_bytes()[:-4])
    assert [record.label for record in read_ring(recorder.path).records] == ["first", "?"]
    path.unlink()
    assert [record.label for record in read_ring(recorder.path).records] == ["?", "?"]


def test_a_torn_record_is_left_out(recorder):
    for number in range(3):
        put(recorder, RecordKind.MARK, 3, seq=number)
    data = bytearray(Path(recorder.path).read_bytes())
    data[PAGE + RECORD.size] = 9  # slot 1 says that it holds record 9
    copy = recorder.path.with_name("rank-4.ring")
    copy.write_bytes(data)
    assert [record.seq for record in read_ring(copy).records] == [0, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 70_000},
        {"nbytes": -1},
        {"step": 1 << 40},
        {"label": ["unhashable"]},
        {"label": b"bytes"},
        {"duration": float("nan")},
        {"duration": float("inf")},
    ],
)
def test_what_does_not_fit_is_left_out_and_raises_nothing(recorder, fields):
    put(recorder, RecordKind.MARK, **{"rank": 3, **fields})
    put(recorder, RecordKind.MARK, 3, label="after")
    assert [record.label for record in read_ring(recorder.path).records] == ["after"]


@pytest.mark.parametrize("label", ["\ud800", "a\nb\u2028c", "x" * 100_000])
def test_labels_of_all_kinds_are_read_again(recorder, label):
    put(recorder, RecordKind.MARK, 3, label=label)
    put(recorder, RecordKind.MARK, 3, label="next")
    assert [record.label for record in read_ring(recorder.path).records] == [label[:1000], "next"]


def test_a_signal_handler_may_write_while_a_name_is_being_written(recorder, monkeypatch):
    """It would wait forever for a lock that the interrupted code holds."""
    write = os.write

    def interrupted(fd, data):
        if b"outer" in data:
            put(recorder, RecordKind.MARK, 3, label="inner")
        return write(fd, data)

    monkeypatch.setattr(os, "write", interrupted)
    put(recorder, RecordKind.MARK, 3, label="outer")
    put(recorder, RecordKind.MARK, 3, label="later")
    assert [record.label for record in read_ring(recorder.path).records] == ["inner", "outer", "later"]


def test_a_name_whose_writing_was_interrupted_does_not_shift_the_others(recorder, monkeypatch):
    write = os.write

    def interrupted(fd, data):
        write(fd, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(recorder, RecordKind.MARK, 3, label="lost")
    monkeypatch.undo()
    put(recorder, RecordKind.MARK, 3, label="later")
    assert [record.label for record in read_ring(recorder.path).records] == ["later"]


def test_a_record_is_valid_once_its_kind_is_written(recorder, monkeypatch):
    """Readers are other processes: nothing but the order of writes keeps them from half a record."""
    seen = []

    class Struct:
        def pack_into(self, *args):
            RECORD.pack_into(*args)
            seen.append(read_ring(recorder.path).records)

    monkeypatch.setattr(writer, "RECORD", Struct())
    put(recorder, RecordKind.MARK, 3)
    assert seen == [[]]
    monkeypatch.undo()
    assert len(read_ring(recorder.path).records) == 1


def test_links_in_the_directory_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "rank-0.names").symlink_to(victim)
    (tmp_path / "rank-0.ring").symlink_to(victim)
    FlightRecorder(tmp_path / "rank-0.ring", header=HEADER).close()
    (tmp_path / f".rank-1.ring.{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        FlightRecorder(tmp_path / "rank-1.ring", header=HEADER)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("text", [b"{", b"[1]", b"7", b"{}", b"[]"])
def test_a_damaged_header_is_refused(recorder, text):
    data = bytearray(Path(recorder.path).read_bytes())
    HEADER_FIELDS.pack_into(data, 0, MAGIC, VERSION, RECORD.size, 16, len(text))
    data[HEADER_FIELDS.size : HEADER_FIELDS.size + len(text)] = text
    copy = recorder.path.with_name("rank-4.ring")
    copy.write_bytes(data)
    with pytest.raises(UsageError, match="its header cannot be read"):
        read_ring(copy)


def test_a_warning_in_every_step_leaves_names_for_the_rest(recorder, monkeypatch):
    monkeypatch.setattr(writer, "_MOST_NAMES", 40)
    monkeypatch.setattr(writer, "active", recorder)
    for step in range(100):
        recorder.warn(f"NaN in step {step}", RankInGroup(rank=3), step=step)
    put(recorder, RecordKind.MARK, 3, group="a new group", label="after")
    records = read_ring(recorder.path).records
    assert (records[-1].group, records[-1].label) == ("a new group", "after")
    assert {r.label for r in records[:-1]} == {"(too many different names)"}


def test_descriptions_are_written_once_and_survive_any_number_of_records(tmp_path):
    recorder = FlightRecorder(tmp_path / "rank-0.ring", header=HEADER, capacity=4)
    for size in (2, 2, 3):
        recorder.describe("system", {"name": "world", "size": size})
    recorder.describe("system", {"name": object()})  # cannot be written
    for _ in range(10):
        put(recorder, RecordKind.MARK, 0, label="x")
    recorder.close()
    recorder.describe("system", {"name": "late"})
    ring = read_ring(tmp_path / "rank-0.ring")
    assert ring.descriptions == {"system": [{"name": "world", "size": 2}, {"name": "world", "size": 3}]}
    assert {record.label for record in ring.records} == {"x"}
