"""`balance`: the ideal step, and one real run."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.balance import Task, Times, row_of


def test_the_ideal_step_is_when_both_ranks_end_at_once():
    task = Task("gloo", total=30, seconds=0.001, steps=2)
    row = row_of([Times((0.4,), (0.03,), (1e-4,), (20, 10)), Times((0.3,), (0.022,), (1e-4,), (20, 10))], task)
    assert row["ideal"] == pytest.approx(0.02)
    assert row["ratio"] == pytest.approx(1.5)
    assert row["shares"] == "20 + 10"


@pytest.mark.usefixtures("warm_ranks")
def test_it_shares_a_batch(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "found.json"
    argv = ["--groups", "shared_memory", "--busy", "0", "--total", "8", "--ms", "1", "--steps", "2"]
    assert main(["balance", *argv, "--json", str(file)]) == 0
    assert "take at most 1.15 x ideal" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["figures"][0]["rows"].values()
    assert len(row["balanced"]["rounds"]) == 2
