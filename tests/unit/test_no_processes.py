"""The guard in `conftest.py` notices every way in which tests here start processes."""

import os
import subprocess

from gradwire.testing import run_ranks


def test_a_new_process_is_noticed(processes: list[str]) -> None:
    subprocess.run(["true"], check=True)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    assert [name.partition("(")[0] for name in processes] == ["subprocess.Popen", "os.posix_spawn"]
    processes.clear()


def test_warm_ranks_are_noticed(processes: list[str]) -> None:
    run_ranks(lambda group: group.rank, 2, kind="gloo")
    assert "RankPool.run" in processes
    processes.clear()


def test_threads_are_no_processes(processes: list[str]) -> None:
    run_ranks(lambda group: group.rank, 2)
    assert processes == []
