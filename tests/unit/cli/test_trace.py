"""`gradwire run` records, and `gradwire trace` reads what it has recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradwire.cli import main
from gradwire.observe.rings.runs import runs_directory
from helpers.made_rings import made_ring, write_ring
from helpers.warm_python import GRADWIRE_RUN

SCRIPT = """
import torch
import gradwire as gw
group = gw.init()
for _ in range(3):
    group.all_reduce(torch.ones(4), label="loss")
gw.observe.mark("trained")
"""


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return runs_directory(os.environ)


@pytest.fixture
def train(tmp_path, warm_python):
    """`gradwire run` of the script, with options; returns what was written on stderr."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def run(*options):
        done = warm_python.run(GRADWIRE_RUN, *options, str(path), timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def events(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_the_latest_run_is_traced_unless_another_is_named(state, train, tmp_path, capsys):
    train("-n", "2")
    assert sorted(path.name for path in (state / "latest").glob("*.ring")) == ["rank-0.ring", "rank-1.ring"]
    assert main(["trace", "-o", str(tmp_path / "t.json")]) == 0
    assert "of 2 ranks" in capsys.readouterr().out
    found = events(tmp_path / "t.json")
    reduced = [e for e in found if e["name"] == "all_reduce"]
    assert {(e["pid"], e["args"]["label"]) for e in reduced} == {(0, "loss"), (1, "loss")}  # type: ignore[index]
    assert len([e for e in found if e["name"] == "trained"]) == 2

    named = tmp_path / "here"
    train("-n", "1", "--run-dir", str(named))
    assert main(["trace", str(named), "-o", str(tmp_path / "t.json")]) == 0
    assert {e["pid"] for e in events(tmp_path / "t.json")} == {0}


def test_a_run_that_is_not_to_be_recorded(state, train, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADWIRE_RUN_DIR", str(tmp_path / "of a run around this one"))
    train("-n", "1", "--no-record")
    assert not state.exists()
    assert not (tmp_path / "of a run around this one").exists()


def test_both_options_at_once_are_refused(state, capsys):
    assert main(["run", "-n", "1", "--no-record", "--run-dir", "x", __file__]) == 2
    assert "choose one" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_made_is_refused(state, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["run", "-n", "1", "--run-dir", str(tmp_path / "file"), __file__]) == 2
    assert "--run-dir" in capsys.readouterr().err


def test_without_a_state_directory_the_script_runs_all_the_same(train, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "not recorded" in train("-n", "1")


@pytest.mark.parametrize("arguments", [["nowhere"], []])
def test_a_run_that_is_not_there(state, arguments, capsys):
    assert main(["trace", *arguments]) == 2
    assert "run" in capsys.readouterr().err


def test_a_directory_without_rings(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert "no flight recorder has written here" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    write_ring(tmp_path, made_ring(0, range(3), size=1))
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert "gradwire trace -o" in capsys.readouterr().err


def test_the_output_has_a_default(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for rank in range(2):
        write_ring(run, made_ring(rank, range(30)))
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(run), "--format", "chrome"]) == 0
    assert capsys.readouterr().out.startswith("trace.json: ")
    assert main(["trace", str(run), "-o", "named"]) == 0
    assert (tmp_path / "trace.json").read_bytes() == (tmp_path / "named").read_bytes()
