"""Where runs are kept."""

import os

import pytest

from gradwire.errors import UsageError
from gradwire.observe.recording import _header
from gradwire.observe.rings import runs
from gradwire.recorder.writer import FlightRecorder


def test_the_last_runs_are_kept_and_nothing_else_is_touched(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    numbers = iter(range(100))
    monkeypatch.setattr(runs.time, "strftime", lambda _: f"20260101-{next(numbers):06}")
    monkeypatch.setattr(runs, "process_start", lambda _: "1")  # their launchers have ended
    made = [runs.new_run(tmp_path, "train.py") for _ in range(25)]
    assert [path for path in made if path.exists()] == made[-20:]
    assert (tmp_path / "notes").exists()
    assert (tmp_path / "latest").resolve() == made[-1].resolve()


def test_only_the_owner_can_look_into_a_run(tmp_path):
    assert runs.new_run(tmp_path, "x/my script.py").stat().st_mode & 0o077 == 0


def test_the_latest_run_is_found(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match="no run"):
        runs.find_run(None, environ)
    path = runs.new_run(runs.runs_directory(environ), "train.py")
    assert runs.find_run(None, environ) == path.resolve()
    assert runs.find_run(str(tmp_path), environ) == tmp_path


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no directory"):
        runs.find_run(str(tmp_path / "nothing"), {})
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory"):
        runs.find_run(str(tmp_path / "file"), {})


def test_a_relative_state_directory_is_not_used():
    assert (
        str(runs.runs_directory({"XDG_STATE_HOME": "here", "HOME": "/home/me"}))
        == "/home/me/.local/state/gradwire/runs"
    )


def test_a_run_that_still_runs_is_not_removed(tmp_path, monkeypatch):
    numbers = iter(range(100))
    monkeypatch.setattr(runs.time, "strftime", lambda _: f"20260101-{next(numbers):06}")
    monkeypatch.setattr(runs, "process_start", lambda _: "1")  # their launchers have ended
    made = [runs.new_run(tmp_path, "train.py") for _ in range(3)]
    elsewhere = {**_header(0, 1), "clock": "of another host"}
    recorders = [
        FlightRecorder(made[0] / "rank-0.ring", header=_header(0, 1)),
        FlightRecorder(
            made[1] / "rank-0.ring", header={**_header(0, 1), "process_start": "1"}
        ),  # its process has ended
        FlightRecorder(made[2] / "rank-0.ring", header=elsewhere),
    ]
    later = [runs.new_run(tmp_path, "train.py") for _ in range(20)]
    assert [path.exists() for path in made] == [True, False, True]
    assert all(path.exists() for path in later)
    os.utime(made[2] / "rank-0.ring", (0, 0))
    runs.new_run(tmp_path, "train.py")
    assert [path.exists() for path in made] == [True, False, False]
    for recorder in recorders:
        recorder.close()


def test_a_run_whose_ranks_have_not_written_yet_is_not_removed(tmp_path, monkeypatch):
    numbers = iter(range(100))
    monkeypatch.setattr(runs.time, "strftime", lambda _: f"20260101-{next(numbers):06}")
    first = runs.new_run(tmp_path, "train.py")
    monkeypatch.setattr(runs, "process_start", lambda _: "1")
    second = runs.new_run(tmp_path, "train.py")
    for _ in range(25):
        runs.new_run(tmp_path, "train.py")
    assert (first.exists(), second.exists()) == (True, False)


def test_what_an_earlier_run_has_left_is_removed(tmp_path):
    ended = {**_header(0, 1), "process_start": "1"}
    FlightRecorder(tmp_path / "rank-0.ring", header=ended).close()
    (tmp_path / "rank-0.log").touch()
    (tmp_path / "hang-1.json").touch()
    (tmp_path / "outcome.json").touch()
    runs.clear_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.log"]
    with_one_that_runs = FlightRecorder(tmp_path / "rank-1.ring", header=_header(1, 2))
    (tmp_path / "outcome.json").touch()
    runs.clear_run(tmp_path)
    assert (tmp_path / "rank-1.ring").exists()
    assert not (tmp_path / "outcome.json").exists()
    with_one_that_runs.close()
