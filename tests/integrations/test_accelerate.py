"""gradwire in Hugging Face Accelerate: the same losses, hooks, checkpoints. Two ranks, which `accelerate launch` starts."""

import json
import os
import sys
from pathlib import Path

from helpers.sessions import run_session

CHECKS = Path(__file__).parent / "scripts" / "accelerate_checks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_train.py"
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
]
SETTINGS = ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]


def test_training_checkpoints_errors_and_the_example(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": str(tmp_path / "home")}
    command = [*LAUNCH, *SETTINGS, str(CHECKS), str(EXAMPLE), str(tmp_path)]
    out, _ = run_session(command, env=environ, timeout=300)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for said in ranks:
        assert said["world"] == 2
        for same in ("mean on stock", "flags", "no hook", "gradwire", "gradwire, mean"):
            assert said[same] == said["stock"], same
        assert said["gradwire, accumulating"] == said["stock, accumulating"]
        assert said["fp16 on gradwire"] == said["fp16 on stock"] != said["stock"]
        for name in "ab":
            assert said[f"compressed {name}"] != said["stock"]
            assert said[f"resumed {name}"] == said[f"compressed {name}"][3:]
            assert said[f"forgotten {name}"] != said[f"resumed {name}"]  # without the hook's state
        assert said["wrapper"]["a"] == "torch.nn.parallel.distributed"
        assert said["wrapper"]["b"] == "gradwire.parallel.ddp"
        assert said["reprs"] == [
            "GradwireKwargs()",
            "GradwireKwargs(bucket_cap_mb=5, find_unused_parameters=True, hook=mean())",
        ]
        kinds = [error.partition(":")[0] for error in said["errors"]]
        assert kinds == ["HookTypeError", "UsageError", "UsageError", "ValueError"]
    assert ranks[0]["stock"] != ranks[1]["stock"]

    first, second = (line.split() for line in out.splitlines())
    assert first[0] == second[0] == "loss"
    assert "quantize(bits=8" in out
    assert float(second[1]) < float(first[1])
