"""The warm pool under run_ranks: its workers' lives, and what is sent to them how."""

import importlib.util
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gradwire.errors import ClosedError, GroupError
from gradwire.groups import C10dGroup, Group
from gradwire.runtime.fork_server import ForkServer
from gradwire.testing import RankPool, default_pool, run_ranks
from gradwire.testing.pool.process import LocalWorker, Spawn
from gradwire.testing.pool.protocol import GroupJob, ship
from helpers.waiting import wait_for_exit
from helpers.warm_python import FORKED_RANKS, WarmPython


class LocalError(Exception):
    """Of this test module, which no worker can import."""


def my_pid(group: Group) -> int:
    return os.getpid()


def test_workers_stay_warm_while_the_world_grows_and_shrinks() -> None:
    two = run_ranks(my_pid, 2, kind="gloo")
    assert run_ranks(my_pid, 2, kind="gloo") == two
    three = run_ranks(my_pid, 3, kind="gloo")
    assert three[:2] == two
    assert run_ranks(my_pid, 1, kind="gloo") == two[:1]
    assert run_ranks(my_pid, 3, kind="gloo") == three
    assert os.getpid() not in three
    assert all(default_pool().keeps_process(pid) for pid in three)


def test_workers_use_one_thread_each() -> None:
    assert run_ranks(lambda group: torch.get_num_threads(), 2, kind="gloo") == [1, 1]


def test_calls_from_several_threads_take_turns() -> None:
    with ThreadPoolExecutor(3) as executor:
        calls = [executor.submit(run_ranks, lambda group, i=i: (i, group.rank), 2, kind="gloo") for i in range(6)]
        assert [call.result(60) for call in calls] == [[(i, 0), (i, 1)] for i in range(6)]


def test_a_pool_of_its_own_ends_its_workers(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(group: Group) -> int:
        # One rank a stream: an unbuffered print writes its end of line apart, and two would mix.
        print(f"rank {group.rank}", file=sys.stdout if group.rank == 0 else sys.stderr)
        return os.getpid()

    with RankPool() as pool:
        pids = [outcome.value for outcome in pool.run(GroupJob(speak, C10dGroup.gloo), 2)]
        assert pool.pids == pids
        assert repr(pool) == "<RankPool, 2 workers>"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert repr(pool) == "<RankPool, closed>"
    pool.close()
    with pytest.raises(ClosedError):
        pool.run(GroupJob(speak, C10dGroup.gloo), 2)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("rank 0\n", "rank 1\n")


def test_a_call_inside_another_one_on_the_same_pool_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.testing.pool.protocol.TURN_LIMIT", 0.1)
    with RankPool() as pool, pytest.raises(GroupError, match="another call on this pool has not ended"):
        pool.run(lambda context: context.report(1), 1, on_report=lambda _: pool.run(lambda context: None, 1))


def test_a_worker_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with RankPool() as pool, pytest.raises(GroupError, match="that of rank 0 exited with code 1"):
        pool.run(GroupJob(my_pid, C10dGroup.gloo), 2)


def test_a_worker_whose_program_is_missing_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(os.listdir("/proc/self/fd"))
    with RankPool() as pool, pytest.raises(FileNotFoundError):
        pool.run(GroupJob(my_pid, C10dGroup.gloo), 2)
    assert len(os.listdir("/proc/self/fd")) == before


SCRIPT = """
import os, signal, threading
from gradwire.testing import run_ranks

def tell():
    os.write(1, f"pid {{os.getpid()}}\\n".encode())

PARENT = os.getpid()

def kill_the_parent(group):
    tell()
    group.barrier()
    if group.rank == 0:
        os.kill(PARENT, signal.SIGKILL)
    elif {stop}:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait(60)

if {thread}:
    thread = threading.Thread(target=run_ranks, args=(kill_the_parent, 2), kwargs=dict(kind="gloo"))
    thread.start()
    thread.join()
run_ranks(kill_the_parent if not {polite} else lambda group: tell(), 2, kind="gloo")
"""


@pytest.mark.parametrize(
    ("thread", "stop", "polite", "status"),
    [
        pytest.param(False, False, True, 0, id="the parent exits"),
        pytest.param(True, False, False, -signal.SIGKILL, id="killed: workers see their socket close"),
        pytest.param(False, True, False, -signal.SIGKILL, id="killed: Linux kills a worker that can see nothing"),
    ],
)
def test_no_worker_outlives_its_parent(
    thread: bool, stop: bool, polite: bool, status: int, warm_python: WarmPython
) -> None:
    forked = "" if thread else FORKED_RANKS  # a process with threads must not fork
    done = warm_python.run(forked + SCRIPT.format(thread=thread, stop=stop, polite=polite), timeout=300)
    assert done.returncode == status, done.stderr
    pids = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(pids) == 2
    for pid in pids:
        wait_for_exit(pid, limit=20)


def test_helper_modules_travel_by_value(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.path.join(str(tmp_path), "helper_of_a_test.py")
    with open(path, "w") as file:
        file.write("SCALE = 5\n\ndef scaled(rank):\n    return SCALE * rank\n")
    spec = importlib.util.spec_from_file_location("helper_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    helper = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "helper_of_a_test", helper)
    spec.loader.exec_module(helper)
    scaled = helper.scaled
    assert run_ranks(lambda group: scaled(group.rank), 2, kind="gloo") == [0, 5]
    assert run_ranks(lambda group: helper.scaled(group.rank), 2, kind="gloo") == [0, 5]


def test_a_rank_imports_what_is_next_to_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbor_of_a_script.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def imports(group: Group) -> tuple[int, bool]:
        import neighbor_of_a_script  # type: ignore[import-not-found]

        return neighbor_of_a_script.VALUE, str(tmp_path) in sys.path

    assert run_ranks(imports, 2, kind="gloo") == [(3, True)] * 2
    monkeypatch.undo()
    assert run_ranks(lambda group: str(tmp_path) in sys.path, 2, kind="gloo") == [False] * 2


def test_a_fork_server_that_was_killed_is_replaced() -> None:
    server = ForkServer(["torch", "torch.distributed", "gradwire.testing.pool.worker"])
    job = GroupJob(lambda group: os.getppid(), C10dGroup.gloo)
    with RankPool(server=server) as pool:
        (first,) = pool.run(job, 1)
        worker = pool._workers[0]
        os.kill(first.value, signal.SIGKILL)
        assert worker.wait(60) is not None  # Linux kills it with the server
        server.preload.clear()  # to fork, the next one need not import torch again
        assert server.start("pass", fds=(0, 1, 2), env={}).poll(60) == 0


def test_installed_modules_travel_by_reference() -> None:
    paths = {os.path.realpath(path) for path in sys.path if path and path != os.getcwd()}
    assert len(ship(json.dumps, paths)) < 100
    assert len(ship(torch.optim.SGD, paths)) < 100
    assert len(ship(torch.ops, paths)) < 100
    assert len(ship(run_ranks, paths)) < 100
    assert len(ship(my_pid, paths)) > 200


def test_classes_of_the_test_come_home_as_themselves() -> None:
    (result,) = run_ranks(lambda group: LocalError("a result"), 1, kind="gloo")
    assert type(result) is LocalError


INTERRUPTED = """
import os, signal, sys
os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does while the worker imports torch
work = lambda *_: print("still there")
"""


def test_a_worker_that_is_still_starting_is_not_interrupted_by_ctrl_c(tmp_path: Path) -> None:
    with open(tmp_path / "output", "wb") as output:
        worker = LocalWorker("", Spawn(f"exec({INTERRUPTED!r})", output.fileno()))
    try:
        assert worker.wait(60.0) == 0
    finally:
        worker.kill()
        worker.release()
    assert (tmp_path / "output").read_text() == "still there\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
