"""gradwire in PyTorch Lightning: the same losses, hooks, checkpoints."""

import json
from pathlib import Path

from helpers.warm_python import WarmPython
from helpers.warm_ranks import run_script

CHECKS = Path(__file__).parent / "scripts" / "lightning_checks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_train.py"


def test_training_checkpoints_errors_and_the_example(warm_python: WarmPython, tmp_path: Path) -> None:
    (*shown, first), (second,) = (
        text.splitlines() for text in run_script(warm_python, CHECKS, str(EXAMPLE), str(tmp_path))
    )
    ranks = [json.loads(line) for line in (first, second)]
    for said in ranks:
        for same in ("gradwire", "mean", "backend"):
            assert said[same] == said["stock"], same
        assert said["gradwire, accumulating"] == said["stock, accumulating"] != said["stock"]
        assert said["gradwire, manual"] == said["stock, manual"] == said["stock"]
        assert said["fp16 on the CPU"] != said["stock"]
        assert said["first half"] + said["second half"] == said["compressed"] != said["stock"]
        assert said["forgotten"] != said["second half"]  # without the hook's state
        assert said["states"] == [0, 1]
        assert said["group"] == ["gradwire", "C10dGroup"]
        assert [error.partition(":")[0] for error in said["errors"]] == ["HookTypeError", "UsageError"]
    assert ranks[0]["stock"] != ranks[1]["stock"]
    assert ranks[0]["advice"] == [0, 0]  # Lightning does not advise a static graph, with its strategy or with ours

    lines = [line.split() for line in shown if line.startswith("loss ")]
    assert [len(said["warning"]) for said in ranks] == [1, 0]
    losses, steps = zip(*((float(line[1]), int(line[4])) for line in lines), strict=True)
    assert steps == (16, 24)
    assert losses[1] < losses[0]
    assert "power_sgd(rank=2," in lines[0]
