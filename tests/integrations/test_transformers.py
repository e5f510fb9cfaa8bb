"""gradwire in Transformers' Trainer: the same losses, hooks, checkpoints."""

import json
from pathlib import Path

from helpers.warm_python import WarmPython
from helpers.warm_ranks import run_script

CHECKS = Path(__file__).parent / "scripts" / "transformers_checks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_train.py"


def test_training_checkpoints_errors_and_the_example(warm_python: WarmPython, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    texts = run_script(warm_python, CHECKS, str(EXAMPLE), str(tmp_path), env=env)
    (*shown, first), (*_, second) = (text.splitlines() for text in texts)
    for said in map(json.loads, (first, second)):
        assert said["wrappers"]["stock"] == "torch.nn.parallel.distributed"
        assert said["wrappers"]["gradwire"] == said["wrappers"]["mean"] == "gradwire.parallel.ddp"
        stage, another = said["errors"]
        assert "is a stage, which communicates nothing" in stage
        assert "the state was saved under the hook error_feedback()" in another
        assert len(said["warning"]) == 1
        missing, not_called = said["versions"]
        assert "its Trainer has no _prepare_for_training, which gradwire overrides" in missing
        assert (
            "it does not call the methods that gradwire overrides, so the model would train on torch's DDP"
            in not_called
        )
        assert said["files"] == ["gradwire-hook-0.pt", "gradwire-hook-1.pt"]
    said = json.loads(first)  # rank 0 logs
    assert len(said["stock"]) == 6
    assert said["gradwire"] == said["mean"] == said["stock"]
    assert said["gradwire, accumulating"] == said["stock, accumulating"]
    assert said["compressed"] != said["stock"]
    assert said["resumed"] == said["compressed"][3:]
    assert said["from stock"][0] == said["stock"][3]
    assert said["from stock"] != said["stock"][3:]

    lines = [line.split() for line in shown if line.startswith("loss ")]
    assert [int(line[4]) for line in lines] == [8, 16]
    assert float(lines[1][1]) < float(lines[0][1])
