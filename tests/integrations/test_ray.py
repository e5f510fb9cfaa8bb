"""gradwire in Ray Train, on a Ray that is started for the test: the same losses, hooks, checkpoints."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import wait_until
from helpers.warm_python import WarmPython
from helpers.warm_ranks import run_script

CHECKS = Path(__file__).parent / "scripts" / "ray_checks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
DRIVER = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # until Ray sees that the workers have ended
    # Processes without which training is the same: every one imports Ray, and some torch.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """Where Ray keeps its files; with a short name, because of its sockets. Every Ray process has it in its environment."""
    path = tempfile.mkdtemp(prefix="ray-")
    yield path
    for pid in processes_of(path):  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)


def processes_of(directory: str) -> list[int]:
    """The processes in whose environment the directory is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if directory.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            pass
    return found


def check_what_ranks_wrote(directory: Path) -> list[dict[str, Any]]:
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for said in ranks:
        assert (said["backend"], said["group"]) == ("gradwire", "C10dGroup")
        assert said["gradwire"] == said["mean"] == said["stock"]
        assert said["resumed"] == said["compressed"][3:]
        assert said["compressed"] != said["stock"]
        stage, function, strategy = said["errors"]
        assert "is a stage" in stage
        assert "must be an nn.Module, got function" in function
        assert "pass arguments of DistributedDataParallel as keywords. Omit parallel_strategy_kwargs=" in strategy
    assert ranks[0]["stock"] != ranks[1]["stock"]
    return ranks


def test_training_checkpoints_errors_and_the_example_in_local_mode(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "saved").mkdir()
    texts = run_script(
        warm_python, CHECKS, str(EXAMPLE), str(tmp_path), "--local", env=SETTINGS, imports="ray.train.torch"
    )
    check_what_ranks_wrote(tmp_path)
    assert all("loss " in text for text in texts)


@pytest.mark.acceptance
def test_training_checkpoints_errors_and_the_example(
    tmp_path: Path, ray_directory: str, warm_python: WarmPython
) -> None:
    (tmp_path / "saved").mkdir()
    environ = {**SETTINGS, "RAY_TMPDIR": ray_directory, "OMP_NUM_THREADS": "1"}
    [done] = warm_python.run_all([(DRIVER, str(CHECKS), str(EXAMPLE), str(tmp_path))], envs=[environ], timeout=400)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    wait_until(lambda: not processes_of(ray_directory), "Ray's processes have ended")
    for said in check_what_ranks_wrote(tmp_path):
        assert said["files"] == ["gradwire-hook-0.pt", "gradwire-hook-1.pt", "model.pt"]
    (line,) = (line for line in out.splitlines() if line.startswith("loss "))
    assert str(tmp_path) in line
    assert f"last {line.split()[-1]}" in out.splitlines()
