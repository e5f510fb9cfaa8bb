"""Leftovers: that each kind is seen, that what is ending is not, and that every test is under its eye."""

import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from gradwire.errors import InternalError
from gradwire.groups import Group
from gradwire.groups.kinds import find_kind
from gradwire.testing import LeftBehind, Leftovers, default_pool, leftovers, run_ranks
from gradwire.testing.leftovers import prime
from gradwire.testing.pool.pool import RankPool
from gradwire.testing.pool.protocol import GroupJob
from helpers.warm_python import WarmPython

CONFTEST = Path(__file__).parents[2] / "conftest.py"


def test_clean_is_clean() -> None:
    assert Leftovers.snapshot().compare(grace=0) == []


def test_a_thread_is_named() -> None:
    before, end = Leftovers.snapshot(), threading.Event()
    thread = threading.Thread(target=end.wait, args=(30,), name="leaky")
    thread.start()
    assert before.compare(grace=0.05) == ["thread 'leaky'"]
    end.set()
    assert before.compare(grace=10) == []


def test_a_thread_that_is_ending_is_waited_for() -> None:
    before, end = Leftovers.snapshot(), threading.Event()

    def ending() -> None:
        end.wait(0.3)

    threading.Thread(target=ending).start()
    started = time.monotonic()
    assert before.compare(grace=100) == []
    assert time.monotonic() - started < 50


def test_a_process_is_named_until_it_is_waited_for() -> None:
    before = Leftovers.snapshot()
    process = subprocess.Popen(["sleep", "30"])
    assert before.compare(grace=0) == [f"process {process.pid}: sleep 30"]
    process.kill()
    ended = os.pidfd_open(process.pid)
    os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT)
    os.close(ended)
    assert before.compare(grace=0) == [f"process {process.pid}: ended, but has not been waited for"]
    process.wait(100)
    assert before.compare(grace=0) == []


def test_a_child_of_another_thread_is_seen() -> None:
    before, processes = Leftovers.snapshot(), []
    thread = threading.Thread(target=lambda: processes.append(subprocess.Popen(["sleep", "30"])))
    thread.start()
    thread.join(100)
    assert before.compare(grace=0) == [f"process {processes[0].pid}: sleep 30"]
    processes[0].kill()
    processes[0].wait(100)


def test_sockets_and_descriptors_are_described() -> None:
    before = Leftovers.snapshot()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    local = client.getsockname()[1]
    file = open(__file__)  # noqa: SIM115
    assert set(before.compare(grace=0)) == {
        f"file descriptor {file.fileno()}: {__file__}",
        f"socket, descriptor {listener.fileno()}: TCP port {port}",
        f"socket, descriptor {client.fileno()}: TCP port {local} to port {port}",
    }
    for thing in (listener, client, file):
        thing.close()
    assert before.compare() == []


def test_a_descriptor_that_was_closed_and_opened_again_is_seen() -> None:
    read, write = os.pipe()
    before = Leftovers.snapshot()
    os.close(read)
    os.close(write)
    again = os.pipe()
    assert set(again) == {read, write}
    assert len(before.compare(grace=0)) == 2
    for end in again:
        os.close(end)


def test_unreachable_objects_are_collected_first() -> None:
    before = Leftovers.snapshot()
    ends: list[object] = list(socket.socketpair())
    ends.append(ends)
    del ends
    with pytest.warns(ResourceWarning):
        left = before.compare(grace=0)
    assert left == []


def test_what_a_thread_leaves_in_a_cycle_when_it_ends_is_collected() -> None:
    before = Leftovers.snapshot()

    def hold() -> None:
        cycle: list[object] = [socket.socket()]
        cycle.append(cycle)
        time.sleep(0.5)  # longer than the collections that come first take

    threading.Thread(target=hold).start()
    assert before.compare(grace=20.0) == []


def test_shared_memory_of_ours_is_seen_and_of_others_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "_SHM", str(tmp_path))  # what is in /dev/shm, all tests that run now see
    path = tmp_path / "ours"
    before = Leftovers.snapshot()
    with open(path, "wb") as file:
        file.truncate(4096)
    try:
        assert before.compare(grace=0) == [f"shared memory {path}"]
        script = (
            f"import mmap, sys; f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print('mapped', flush=True);"
            "sys.stdin.read()"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", script], process_group=0, **pipes) as other:  # type: ignore[call-overload]
            assert other.stdout.readline() == "mapped\n"
            assert f"shared memory {path}" not in before.compare(grace=0)
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
            pass
        assert before.compare(grace=0) == [f"shared memory {path}"]
    finally:
        os.unlink(path)
    assert before.compare(grace=0) == []


def test_the_resource_tracker_is_pythons_own() -> None:
    before = Leftovers.snapshot()
    resource_tracker.ensure_running()
    assert before.compare(grace=0) == []


def test_what_torch_keeps_for_life_is_there_early() -> None:
    before = Leftovers.snapshot()
    prime()
    assert before.compare(grace=5) == []


def test_only_a_keepers_own_is_kept() -> None:
    with RankPool() as pool:
        with_pool, alone = Leftovers.snapshot(pool), Leftovers.snapshot()
        (outcome,) = pool.run(GroupJob(lambda group: os.getpid(), find_kind("gloo", who="test").build), 1)
        assert with_pool.compare() == []
        left = alone.compare(grace=0)
        assert any(line.startswith(f"process {outcome.value}: ") for line in left)
        assert any(line.startswith("socket, descriptor") for line in left)
        read, write = os.pipe()
        assert len(with_pool.compare(grace=0)) == 2
        os.close(read)
        os.close(write)


def test_a_clean_test_costs_less_than_five_milliseconds_of_cpu_time() -> None:
    costs = []
    for _ in range(10):
        started = time.thread_time()
        Leftovers.snapshot(default_pool()).compare()
        costs.append(time.thread_time() - started)
    assert min(costs) < 0.005


PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def test_a_test_that_leaves_something_fails(
    tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_leaks.py").write_text(
        "import threading, os\n"
        "def test_clean(): pass\n"
        "def test_thread(): threading.Thread(target=threading.Event().wait, name='leaky', daemon=True).start()\n"
        "def test_descriptor(): os.pipe()\n"
        "def test_clean_again(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {CONFTEST.parent}\n")
    monkeypatch.chdir(tmp_path)
    done = warm_python.run(PYTEST, "-q", "-p", "no:cacheprovider", str(tmp_path), timeout=300)
    assert "4 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    assert "the test left behind: thread 'leaky' (daemon)" in done.stdout
    assert "the test left behind: file descriptor" in done.stdout


NVIDIA, EVENT = "/dev/nvidia0", "anon_inode:[eventfd]"


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        ({}, {7: NVIDIA, 8: EVENT, 9: "pipe:[1]"}, []),  # the process starts to use CUDA
        ({5: "/dev/nvidiactl"}, {5: "/dev/nvidiactl", 7: NVIDIA, 8: EVENT}, []),  # it had counted the devices
        ({5: NVIDIA}, {5: NVIDIA, 7: NVIDIA, 8: "pipe:[1]"}, ["file descriptor 8: pipe:[1]"]),
        ({5: NVIDIA}, {5: NVIDIA, 8: EVENT}, [f"file descriptor 8: {EVENT}"]),  # without a context: somebody's
        ({}, {8: EVENT}, [f"file descriptor 8: {EVENT}"]),
    ],
)
def test_what_cudas_driver_opens_is_not_left_behind(
    before: dict[int, str], after: dict[int, str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "open_descriptors", lambda: before)
    snapshot = Leftovers.snapshot()
    monkeypatch.setattr(leftovers, "open_descriptors", lambda: after)
    assert snapshot.compare(grace=0) == left


def test_a_function_of_torch_that_a_rank_replaces_is_left_behind() -> None:
    def replaces(group: Group) -> None:
        torch.nn.functional.relu = lambda x: x  # type: ignore[assignment]

    def restores(group: Group) -> None:
        plain = torch.nn.functional.relu
        torch.nn.functional.relu = lambda x: x  # type: ignore[assignment]
        torch.nn.functional.relu = plain

    run_ranks(restores, 1, kind="gloo", leftovers=LeftBehind.RAISE)
    with pytest.raises(InternalError, match=r"torch\.nn\.functional\.relu is replaced by <function"):
        run_ranks(replaces, 1, kind="gloo", leftovers=LeftBehind.RAISE)
    run_ranks(restores, 1, kind="gloo", leftovers=LeftBehind.RAISE)  # in another process


def test_a_number_of_threads_that_a_rank_has_set_is_left_behind() -> None:
    def sets(group: Group) -> None:
        torch.set_num_threads(2)

    with pytest.raises(InternalError, match="torch uses 2 threads instead of 1"):
        run_ranks(sets, 1, kind="gloo", leftovers=LeftBehind.RAISE)
    assert run_ranks(lambda group: torch.get_num_threads(), 1, kind="gloo") == [1]  # in another process
