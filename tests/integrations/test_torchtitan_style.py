"""The TorchTitan-style example: the same losses as torch's DDP, a compressed run, and one that is resumed."""

import json
from pathlib import Path

from helpers.warm_python import WarmPython
from helpers.warm_ranks import run_script

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "torchtitan_style.py"


def test_training_and_checkpoints(warm_python: WarmPython, tmp_path: Path) -> None:
    texts = run_script(warm_python, HERE / "scripts/torchtitan_checks.py", str(EXAMPLE), str(tmp_path))
    ranks = [json.loads(text) for text in texts]
    for said in ranks:
        assert said["mean"] == said["stock"]
        assert said["resumed"] == said["compressed"] != said["stock"]
    assert ranks[0]["step"] == 6
    assert ranks[0]["stock"] != ranks[1]["stock"]


def test_the_example_runs_as_printed(warm_python: WarmPython, tmp_path: Path) -> None:
    first, second = run_script(warm_python, EXAMPLE, "--directory", str(tmp_path))
    assert first.startswith("loss 0.")
    assert "error_feedback() > quantize" in first
    assert second == ""
    assert sorted(path.name for path in tmp_path.glob("hook-*")) == ["hook-0.pt", "hook-1.pt"]
