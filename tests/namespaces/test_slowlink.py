"""`slowlink` on real hosts: the link is as slow as requested, and its bytes are counted."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from gradwire.lab import why_not

WHY_NOT = why_not(mbit=1)
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


@pytest.mark.usefixtures("warm_ranks")
def test_a_small_run_on_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ways.json"
    argv = ["slowlink", "--size", "tiny", "--mbit", "1", "--steps", "6", "--exam-every", "3"]
    assert main([*argv, "--hooks", "mean,bf16", "--json", str(file)]) == 0
    assert "2 network namespaces as hosts, one rank on each, 1 Mbit/s" in capsys.readouterr().out
    ways = json.loads(file.read_text())["figures"][0]["rows"]
    gradients = 6736 * 4
    for name in ("torch", "mean"):
        assert gradients < ways[name]["bytes_per_step"] < 1.5 * gradients  # with headers
        # 6 steps of 27 kB at 125 kB a second, less the 32 kB that the limiter lets through at once.
        assert 6 * ways[name]["seconds_per_step"] > (6 * gradients - 40_000) / 125_000
    assert ways["bf16"]["bytes_per_step"] < 0.75 * ways["mean"]["bytes_per_step"]
