"""gradwire in PyTorch Lightning, Transformers' Trainer and under TorchTitan's model: the same losses, hooks, checkpoints."""

import importlib.util
import json
from pathlib import Path

import pytest

from helpers.warm_python import WarmPython
from helpers.warm_ranks import run_script

CHECKS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_lightning(warm_python: WarmPython, tmp_path: Path) -> None:
    example = str(EXAMPLES / "lightning_train.py")
    checks = CHECKS / "lightning_checks.py"
    texts = run_script(warm_python, checks, example, str(tmp_path), imports="lightning.pytorch")
    (*shown, first), (second,) = (text.splitlines() for text in texts)
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


def test_transformers(warm_python: WarmPython, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    checks, example = CHECKS / "transformers_checks.py", str(EXAMPLES / "trainer_train.py")
    texts = run_script(warm_python, checks, example, str(tmp_path), env=env, imports="transformers.trainer")
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


INSTALLED = importlib.util.find_spec("torchtitan") is not None
TITAN = pytest.param("torchtitan", marks=pytest.mark.skipif(not INSTALLED, reason="requirements-torchtitan.txt"))


@pytest.mark.parametrize("model", ["same shape", TITAN])
def test_torchtitan(warm_python: WarmPython, model: str) -> None:
    """`make acceptance` has all meshes, and more steps."""
    args = ("--model", model, "--layers", "1", "--steps", "4", "hsdp:gloo")
    first, second = run_script(warm_python, CHECKS / "torchtitan_checks.py", *args)  # which compares
    assert [json.loads(line)["mesh"] for line in first.splitlines()] == ["hsdp:gloo"]
    assert second == ""


def test_without_torchtitan_its_example_says_so_and_runs(warm_python: WarmPython, tmp_path: Path) -> None:
    args = ("--directory", str(tmp_path), "--steps", "2", "--layers", "1")
    missing = "import sys; sys.modules['torchtitan'] = None"
    first, second = run_script(warm_python, EXAMPLES / "torchtitan_style.py", *args, before=missing)
    why, *steps = first.splitlines()
    assert why.startswith("no TorchTitan (ModuleNotFoundError: ")
    assert [step.partition(": loss 7.")[0] for step in steps] == ["step 0", "step 1"]
    assert "gradients all_to_all_single 0.97 MB" in steps[0]
    assert second == ""
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
