"""Rank processes of a benchmark: what they return, and how they end when something goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from benchmarks import mpi
from benchmarks.world import run_world
from gradwire.errors import CollectiveTimeout, GroupError, PeerLost
from helpers.warm_python import FORKED_RANKS, WarmPython


@pytest.fixture(scope="module")
def open_mpi():
    found = mpi.find()
    return found if isinstance(found, mpi.OpenMPI) else pytest.skip(found)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_nothing_in_a_rank_is_different_from_any_other_process():
    """What is measured in it must not depend on who started it."""

    def task(context):
        names = [thread.name for thread in threading.enumerate()]
        return gc.isenabled(), gc.get_freeze_count(), torch.get_num_threads(), names

    (found,) = run_world(task, 1, name="test")
    assert found == (True, 0, 1, ["MainThread", "gradwire-pool-control"])


@pytest.mark.usefixtures("warm_ranks")
def test_results_come_in_the_order_of_ranks_and_news_on_the_way():
    def task(context):
        context.report(os.getpid())
        context.barrier.wait()
        context.store.set(f"from {context.rank}", str(context.rank))
        return context.rank, context.size, context.store.get(f"from {1 - context.rank}").decode()

    pids: list[int] = []
    assert run_world(task, 2, name="test", on_report=pids.append) == [(0, 2, "1"), (1, 2, "0")]
    assert len(set(pids)) == 2
    assert all(map(_gone, pids))


@pytest.mark.usefixtures("warm_ranks")
def test_what_a_rank_raises_is_reported_with_its_traceback():
    def task(context):
        if context.rank == 1:
            raise ValueError("out of luck")
        context.barrier.wait()

    with pytest.raises(GroupError, match="^test with 2 ranks: rank 1 failed: ValueError: out of luck") as caught:
        run_world(task, 2, name="test")
    assert 'raise ValueError("out of luck")' in "\n".join(caught.value.__notes__)


def _killed(launcher):
    pids: list[int] = []

    def task(context):
        context.report(os.getpid())
        context.barrier.wait()
        if context.rank == 1:
            print("my last line", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        context.barrier.wait()

    with pytest.raises(PeerLost, match="^test with 2 ranks: rank 1 died") as caught:
        run_world(task, 2, name="test", on=launcher, on_report=pids.append)
    assert caught.value.rank == 1
    assert "my last line" in "\n".join(caught.value.__notes__)
    assert len(pids) == 2
    assert all(map(_gone, pids))


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_dies_ends_the_world():
    _killed(())


def test_a_rank_that_dies_under_mpirun_ends_the_world(open_mpi):
    _killed(open_mpi)


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_hangs_ends_the_world_and_shows_where_it_stood():
    pids: list[int] = []

    def task(context):
        context.report(os.getpid())
        if context.rank == 0:
            return
        time.sleep(1000.0)

    with pytest.raises(
        CollectiveTimeout, match=r"no rank has reported for 2 s, and ranks \[1\] have not finished"
    ) as caught:
        run_world(task, 2, name="test", timeout=2.0, on_report=pids.append)
    assert (caught.value.joined, caught.value.missing) == ((0,), (1,))
    assert "in task" in "\n".join(caught.value.__notes__)
    assert all(map(_gone, pids))


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_misses_the_barrier_is_named_by_the_others():
    def task(context):
        if context.rank == 0:
            context.barrier.wait()
        while True:
            context.report("still here")
            time.sleep(0.2)

    with pytest.raises(
        CollectiveTimeout, match=r"rank 0 failed: CollectiveTimeout: .* ranks \[1\] did not arrive within 1 s"
    ) as caught:
        run_world(task, 2, name="test", timeout=1.0)
    assert "time.sleep(0.2)" not in str(caught.value)
    assert any("Current thread" in note and "in task" in note for note in caught.value.__notes__)


def test_processes_that_do_not_start_are_reported(monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(GroupError, match="starting rank processes: that of rank 0 exited with code 3") as caught:
        run_world(lambda context: None, 2, name="test")
    assert "no such interpreter" in "\n".join(caught.value.__notes__)


@pytest.mark.usefixtures("warm_ranks")
def test_an_interrupted_starter_leaves_no_rank():
    pids: list[int] = []

    def task(context):
        context.report(os.getpid())
        time.sleep(1000.0)

    def on_report(pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_world(task, 2, name="test", on_report=on_report)
    assert all(map(_gone, pids))


_STARTER = """
import os, time
from benchmarks import mpi
from benchmarks.world import run_world

def task(context):
    context.report(os.getpid())
    time.sleep(1000.0)

launcher = mpi.find() if {under_mpirun} else ()
run_world(task, 2, name="test", on=launcher, on_report=lambda pid: print(pid, flush=True))
"""


def _kill_starter(python: WarmPython, *, under_mpirun: bool) -> None:
    starter = python.talk(FORKED_RANKS + _STARTER.format(under_mpirun=under_mpirun))
    assert starter.stdout is not None
    ranks = [os.pidfd_open(int(starter.stdout.readline())) for _ in range(2)]
    starter.kill()
    for pidfd in ranks:
        ended = wait([pidfd], 30.0)
        os.close(pidfd)
        assert ended
    starter.communicate()


def test_ranks_do_not_outlive_a_starter_that_was_killed(tmp_path, monkeypatch, warm_python):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    _kill_starter(warm_python, under_mpirun=False)


def test_ranks_under_mpirun_do_not_outlive_a_starter_that_was_killed(tmp_path, monkeypatch, warm_python, open_mpi):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    _kill_starter(warm_python, under_mpirun=True)
