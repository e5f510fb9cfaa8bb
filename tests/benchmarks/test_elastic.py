"""What an elastic run adds to a step, measured on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.usefixtures("warm_ranks")
def test_both_variants_take_turns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    argv = ["--size", "tiny", "--tokens", "8", "--steps", "4", "--block", "2", "--hooks", "mean"]
    assert main(["elastic", *argv, "--json", str(file)]) == 0
    assert "of 1 take at most 1.02 x a step" in capsys.readouterr().out
    row = json.loads(file.read_text())["figures"][0]["rows"]["mean"]
    assert [len(row[name]["rounds"]) for name in ("plain", "elastic")] == [2, 2]
