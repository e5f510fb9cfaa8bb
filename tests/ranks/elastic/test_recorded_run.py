"""An elastic run is recorded: what can be seen of it while it trains, and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.report.findings import find
from gradwire.observe.report.report_model import load_report
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.run_status import RunMonitor
from helpers.waiting import wait_until

SCRIPT = """
import os, signal, sys, time, torch, gradwire as gw
folder, me = sys.argv[1], os.environ["GRADWIRE_MEMBER"].rpartition("-")[2]
model = torch.nn.Linear(2, 1)
data = gw.Deal(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=4, slots=2)
run = gw.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), data=data, steps=9)
def wait_while_the_test_looks():
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
for step in run:
    if me == "1" and step.number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    for x, in step:
        model(x).sum().backward()
    if me == "2" and step.number == 6:
        wait_while_the_test_looks()
    step.commit()
"""


def test_a_rank_that_was_killed_and_replaced(tmp_path: Path) -> None:
    script, record = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--run-dir", str(record), "--hang-after", "never", "--nproc", "2", "--elastic", "2:2"]
    command = [sys.executable, "-m", "gradwire", "run", *options, str(script), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = RunFollower(record)
    watch, monitor = HangWatch(run, deadline=0.2), RunMonitor(run)
    lines: list[str] = []

    def reported() -> bool:
        assert process.poll() is None
        lines.extend(watch.check())
        return any(
            "wait_while_the_test_looks" in line for line in lines
        )  # a busy machine may have others reported before

    try:
        wait_until(reported, "a report of the rank that does not vote")
        # The process that was killed is followed no more, and the one in its place has its rank.
        assert sorted(run.ranks) == [0, 1]
        name, _, number = run.ranks[1].member.rpartition("-")
        assert number == "2"
        about = next(line for line in reversed(lines) if "it is in user code" in line)
        assert f"rank 1 (process {run.ranks[1].member} {run.ranks[1].header['pid']}" in about
        monitor.check()
        status = monitor.status()
        assert status.view == f"view 1 of 2 ranks since step 4 ({name}-1 died, {name}-2 joined)"
        assert status.members.startswith(f"rank 0 {name}-0 (process ")
        assert [rank.step for rank in status.ranks] == [6, 6]
    finally:
        (tmp_path / "go").touch()
        output = process.communicate()[0]
        watch.run.close()
    assert process.returncode == 0, output

    report = load_report(record)
    assert report.elastic is not None
    elastic = report.elastic
    assert [(view.epoch, view.step, view.retried, change) for view, change in elastic.views] == [
        (0, 0, False, ""),
        (1, 4, True, f"{name}-1 died, {name}-2 joined"),
    ]
    assert (elastic.committed, elastic.retried) == (9, 1)
    assert 0 < elastic.goodput < 1
    assert [(fault.member, fault.kind) for fault in elastic.faults] == [(f"{name}-1", "died")]
    alarming = [one.title for one in find(report) if one.severity != "note" and "of a step is" not in one.title]
    assert alarming == []
    assert sorted(os.listdir(record))[0] == "faults.jsonl"
