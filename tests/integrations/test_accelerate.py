"""gradwire in Hugging Face Accelerate: the same losses, hooks, checkpoints. `accelerate launch` starts the ranks: two forks."""

import json
from pathlib import Path

from helpers.warm_python import FORK_CLIENT, WarmPython

CHECKS = Path(__file__).parent / "scripts" / "accelerate_checks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_train.py"
LAUNCH = "from accelerate.commands.launch import main; main()"
SETTINGS = (
    "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--no_python", *FORK_CLIENT, "python", "-c",
)  # fmt: skip


def test_training_checkpoints_errors_and_the_example(warm_python: WarmPython, tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": str(tmp_path / "home")}
    script = [str(CHECKS), str(EXAMPLE), str(tmp_path)]
    code = f"import runpy, sys\nsys.argv = {script!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    [done] = warm_python.run_all([(LAUNCH, *SETTINGS, code)], envs=[environ], timeout=300)
    assert done.returncode == 0, done.stderr
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

    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[0] == second[0] == "loss"
    assert "quantize(bits=8" in done.stdout
    assert float(second[1]) < float(first[1])
