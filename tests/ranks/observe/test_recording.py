"""What processes record of themselves, also those that fork or are killed."""

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import observe
from gradwire.errors import GroupAborted, UsageError
from gradwire.launch.run_script import python_command
from gradwire.observe.rings.ring import read_ring
from gradwire.recorder import writer
from gradwire.recorder.format import EPOCH_SHIFT, RecordKind as K
from gradwire.testing import run_ranks


def test_two_processes_of_one_rank_are_refused(tmp_path, warm_python):
    script = f"""
import sys
from gradwire import observe
observe.start({str(tmp_path)!r}, rank=0, size=2)
print("recording", flush=True)
sys.stdin.read()
"""
    other = warm_python.talk(script)
    try:
        assert other.stdout.readline() == "recording\n"
        with pytest.raises(UsageError, match=f"process {other.pid} records as rank 0"):
            observe.start(tmp_path, rank=0, size=2)
    finally:
        other.kill()
        other.communicate()
    observe.start(tmp_path, rank=0, size=2)  # it has ended
    observe.stop()


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo"])
def test_collectives_have_the_same_ordinals_on_all_ranks(tmp_path, kind):
    """Also where a rank sends more messages than another, and after a group was aborted and recovered."""

    def rank_main(group):
        if kind != "threads" or group.rank == 0:
            observe.start(tmp_path, rank=group.rank, size=group.size)
        try:
            group.barrier()  # after which all ranks are recorded, where they share a process
            group.all_reduce(torch.ones(3), label="first")
            if group.rank == 0:
                group.send(torch.ones(1), 1, tag=1)
            elif group.rank == 1:
                group.recv(torch.ones(1), 0, tag=1)
            group.all_reduce(torch.ones(3), label="second")
            (tmp_path / f"second-{group.rank}").touch()
            if group.rank == 0:
                while (
                    len(list(tmp_path.glob("second-*"))) < group.size
                ):  # an abort fails what others have yet to wait for
                    time.sleep(0.01)
                group.abort("on purpose")
            with pytest.raises(GroupAborted):
                group.all_reduce(torch.ones(1), label="lost")
                group.all_reduce(torch.ones(1), label="lost")
            group.recover()
            group.all_reduce(torch.ones(3), label="third")
            group.barrier()
        finally:
            if kind != "threads":
                observe.stop()

    try:
        run_ranks(rank_main, 3, kind=kind)
        found: dict[str, set[int]] = {}
        number = 0
        for ring in observe.read_rings(tmp_path):
            for record in ring.of_kind(K.COLLECTIVE_FINISHED):
                if record.label in ("first", "second", "third"):
                    found.setdefault(record.label, set()).add(record.ordinal)
                    number += 1
        assert number == 9
        assert {label: len(ordinals) for label, ordinals in found.items()} == dict.fromkeys(
            ["first", "second", "third"], 1
        )
        first, second, third = (found[label].pop() for label in ("first", "second", "third"))
        assert second == first + 1
        assert third >> EPOCH_SHIFT == 1
    finally:
        observe.stop()


def test_collectives_of_a_hook_belong_to_their_bucket(tmp_path):
    def rank_main(group):
        observe.start(tmp_path, rank=group.rank, size=group.size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        ddp = gw.replicate(model, group=group, hook=gw.hooks.power_sgd(rank=1))
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        observe.stop()
        del ddp

    run_ranks(rank_main, 2, kind="shared_memory")
    for ring in observe.read_rings(tmp_path):
        of_hook = [r for r in ring.of_kind(K.COLLECTIVE_SUBMITTED, K.COLLECTIVE_FINISHED) if r.bucket >= 0]
        assert len({r.seq for r in of_hook}) >= 3 * 2  # two collectives or more per step
        assert {r.step for r in of_hook} == {0, 1, 2}


def test_a_forked_child_that_is_recorded_writes_each_record_once(tmp_path, warm_python):
    script = f"""
import os, torch, warnings
from gradwire import observe
observe.start({str(tmp_path)!r}, rank=0, size=2)
warnings.simplefilter("ignore")
if os.fork() == 0:
    observe.start({str(tmp_path)!r}, rank=1, size=2)
    parameter = torch.ones(1, requires_grad=True)
    torch.optim.SGD([parameter], 0.1).step()
    os._exit(0)
os.wait()
"""
    assert warm_python.run(script, timeout=120).returncode == 0
    first, second = observe.read_rings(tmp_path)
    assert first.records == []
    assert [(r.kind, r.rank) for r in second.records] == [(K.OPTIMIZER_BEGAN, 1), (K.OPTIMIZER_ENDED, 1)]


HEADER = {"rank": 3, "size": 4, "pid": 1, "host": "h", "clock": "c", "started": 0, "started_wall": 0, "ops": []}


def test_a_killed_process_leaves_all_it_wrote(tmp_path):
    script = f"""
import os, signal
from pathlib import Path
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import FlightRecorder, RankInGroup
recorder = FlightRecorder(Path({str(tmp_path / "rank-3.ring")!r}), header={HEADER!r})
for number in range(100):
    recorder.put(RecordKind.MARK, RankInGroup(rank=3), label=f"mark {{number % 7}}", nbytes=number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -signal.SIGKILL
    records = read_ring(tmp_path / "rank-3.ring").records
    assert [(record.nbytes, record.label) for record in records] == [(n, f"mark {n % 7}") for n in range(100)]


def test_a_forked_child_does_not_write_into_its_parents_ring(recorded):
    recorder = writer.active
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # a fork with threads, which other tests may have left to pools
        pid = os.fork()
    if pid == 0:
        os._exit(writer.active is not None)
    assert os.waitpid(pid, 0)[1] == 0
    assert writer.active is recorder is not None


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import gradwire as gw
import neighbor

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(3, 4))
    gw.observe.mark(f"{sys.argv[1:]} {neighbor.__name__}")
    gw.observe.stop()
    model(torch.ones(3, 4)).sum().backward()
"""


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_a_script_that_keeps_torchs_ddp_is_recorded(tmp_path, words, monkeypatch, warm_python):
    """As `gradwire run --observe` starts it: with its own arguments, directory and __main__."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbor.py").touch()
    environ = {"GRADWIRE_RUN_DIR": str(tmp_path / "run"), "RANK": "0", "WORLD_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.chdir(tmp_path)
    _, start, *options = python_command("gradwire.launch.run_script", observe=True)
    process = warm_python.start(start, *options, *words, "--lr", "1", env=environ, capture=True)
    assert process.wait(120) == 0, process.communicate()
    process.communicate()
    *steps, mark = observe.read_rings(tmp_path / "run")[0].records
    step = [K.FORWARD_BEGAN, K.FORWARD_ENDED, K.OPTIMIZER_BEGAN, K.OPTIMIZER_ENDED]
    assert [r.kind for r in steps] == 2 * step
    assert [r.step for r in steps if r.kind is K.FORWARD_BEGAN] == [0, 1]
    assert mark.label == "['--lr', '1'] neighbor"
