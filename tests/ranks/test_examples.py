"""The examples run as their first lines say. Those of integrations, and of a hook and a group, have tests of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.warm_python import GRADWIRE_RUN

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "train.py": r"step 200: loss 0\.\d+",
    "stock_ddp.py": r"loss 0\.00\d+ over SharedMemoryGroup",
    "diloco.py": r"loss 0\.\d+ after 200 steps and 10 exchanges",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_trains_on_two_ranks(name: str, warm_python: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", str(ROOT / "examples" / name), timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(EXPECTED[name], done.stdout.strip().splitlines()[-1])


def test_the_example_of_a_slow_rank_trains(warm_python: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = [str(ROOT / "examples" / "slow_rank.py"), "--steps", "3", "--data", "0"]
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", *words, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 steps on 2 ranks\n"


def test_the_example_of_a_fault_fails_as_it_should(warm_python: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    script = str(ROOT / "examples" / "hang.py")
    done = warm_python.run(GRADWIRE_RUN, "--nproc", "2", "--no-prefix", script, "shape", timeout=300)
    assert done.returncode == 1
    assert "CollectiveMismatch" in done.stderr


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    examples = {example.name for example in (ROOT / "examples").glob("*.py")}
    assert {example for example in examples if example not in tests} == set()
