"""`gradwire run` records, and `gradwire trace` reads what it has recorded."""

import os

import pytest

from gradwire.cli import main
from gradwire.observe.rings.runs import runs_directory
from helpers.made_rings import made_ring, write_ring


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return runs_directory(os.environ)


def test_both_options_at_once_are_refused(state, capsys):
    assert main(["run", "-n", "1", "--no-record", "--run-dir", "x", __file__]) == 2
    assert "choose one" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_made_is_refused(state, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["run", "-n", "1", "--run-dir", str(tmp_path / "file"), __file__]) == 2
    assert "--run-dir" in capsys.readouterr().err


def test_there_is_no_run_yet(state, capsys):
    assert main(["trace"]) == 2
    assert "run" in capsys.readouterr().err


def test_the_output_has_a_default(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for rank in range(2):
        write_ring(run, made_ring(rank, range(30)))
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(run)]) == 0
    assert capsys.readouterr().out.startswith("trace.json: ")
    assert main(["trace", str(run), "-o", "named"]) == 0
    assert (tmp_path / "trace.json").read_bytes() == (tmp_path / "named").read_bytes()
