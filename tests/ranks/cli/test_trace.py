"""`gradwire trace` of runs of `gradwire run`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradwire.cli import main
from gradwire.observe.rings.runs import runs_directory
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


def test_without_a_state_directory_the_script_runs_all_the_same(train, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "not recorded" in train("-n", "1")
