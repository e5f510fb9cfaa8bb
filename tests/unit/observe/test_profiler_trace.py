"""torch.profiler's traces in the picture of a run, on one clock."""

import gzip
import json
import time

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import gradwire as gw
from gradwire import observe
from gradwire.cli import main
from helpers.backward_calls import in_backward
from helpers.made_rings import made_ring, write_ring

PAUSE = 0.002


def annotate():
    time.sleep(PAUSE)
    with record_function("in backward"):
        time.sleep(PAUSE)
    time.sleep(PAUSE)


class Annotated(nn.Module):
    """Its forward is annotated from the inside, with a pause around it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(PAUSE)
        with record_function("in forward"):
            y = self.layer(x)
        time.sleep(PAUSE)
        return in_backward(y, annotate)


def events(path):
    return json.loads(path.read_text())["traceEvents"]


def test_what_is_annotated_in_a_step_lies_in_that_step(recorded, tmp_path, capsys):
    [group] = gw.ThreadGroup.world(1)
    model = gw.DistributedDataParallel(Annotated(), process_group=group)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    observe.stop()
    group.close()
    (tmp_path / "profiles").mkdir()
    written = tmp_path / "profiles" / "host_1.pt.trace.json"
    profiler.export_chrome_trace(str(written))
    (tmp_path / "profiles" / "packed.json.gz").write_bytes(gzip.compress(written.read_bytes()))
    (tmp_path / "profiles" / "other.json").write_text("{}")
    output = tmp_path / "merged.json"
    assert main(["trace", str(recorded), "--profiler", str(tmp_path / "profiles"), "-o", str(output)]) == 0
    shown = capsys.readouterr()
    assert "With 2 traces of torch.profiler." in shown.out
    assert "other.json: left out: it is not a trace" in shown.err
    found = events(output)
    for name, phase in (("in forward", "forward"), ("in backward", "backward")):
        notes = sorted({(e["ts"], e["ts"] + e["dur"]) for e in found if e["name"] == name and e["ph"] == "X"})
        phases = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["name"] == phase and e.get("tid") == 1)
        assert len(notes) == len(phases) == 3
        for (begin, end), (first, last) in zip(notes, phases, strict=True):
            assert first <= begin < end <= last, name
    assert {e["pid"] for e in found} == {0}  # operators are shown in the process of the rank, on tracks of their own
    assert {e["tid"] for e in found if e.get("cat") == "cpu_op"}.isdisjoint(range(100))


def made_profile(pid, **more):
    """A trace of a process with a device, as of a GPU, whose number is that of a rank."""
    base = 1_800_000_000 * 10**9
    rows = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "GPU 0"}},
        {"ph": "X", "name": "op", "pid": pid, "tid": 7, "ts": 1000.5, "dur": 2.0},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 2000.0, "dur": 2.0},
        {"ph": "s", "name": "ac2g", "id": 4, "pid": pid, "tid": 7, "ts": 1000.5},
        {"ph": "X", "name": "early", "pid": pid, "tid": 7, "ts": -900_000.0, "dur": 2.0},
        {"ph": "X", "name": "span", "pid": "Spans", "tid": "x", "ts": 1000.0, "dur": 2.0},
    ]
    return json.dumps({"traceEvents": rows, "baseTimeNanoseconds": base, **more})


def test_devices_processes_and_flows_of_several_ranks_are_kept_apart(tmp_path):
    """The wall clock of both rings begins at the base of the traces; the trace begins 1 ms later, with the first record."""
    for rank in range(2):
        write_ring(tmp_path, made_ring(rank, range(3), host="ab"[rank], pid=1000))
        (tmp_path / f"p{rank}.json").write_text(made_profile(1000, distributedInfo={"rank": rank}))
    words = [word for rank in range(2) for word in ("--profiler", str(tmp_path / f"p{rank}.json"))]
    assert main(["trace", str(tmp_path), *words, "-o", str(tmp_path / "t.json")]) == 0
    found = events(tmp_path / "t.json")
    assert [(e["pid"], e["ts"]) for e in found if e["name"] == "op"] == [(0, 0.5), (1, 0.5)]
    kernels = [e["pid"] for e in found if e["name"] == "kernel"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert [names[pid] for pid in kernels] == ["rank 0: GPU 0", "rank 1: GPU 0"]
    assert [e["id"] for e in found if e["name"] == "ac2g"] == ["0.profiler.4", "1.profiler.4"]
    assert not [e for e in found if e["name"] in ("early", "span")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[", "Expecting value"),
        ("[]", "it is not a trace"),
        ('{"traceEvents": []}', "the time at which it begins"),
        (made_profile(99), "it is not of a process of this run"),
    ],
)
def test_files_that_do_not_belong_to_the_run(tmp_path, capsys, content, why):
    write_ring(tmp_path, made_ring(0, range(3), size=1))
    (tmp_path / "p.json").write_text(content)
    words = ["trace", str(tmp_path), "--profiler", str(tmp_path / "p.json"), "-o", str(tmp_path / "t.json")]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "With 0 traces" in shown.out
    assert why in shown.err


def test_what_is_refused(tmp_path, capsys):
    write_ring(tmp_path, made_ring(0, range(3), size=1))
    (tmp_path / "empty").mkdir()
    for words, why in (
        (["--profiler", str(tmp_path / "none")], "there is no such file"),
        (["--profiler", str(tmp_path / "empty")], "there is no file"),
    ):
        assert main(["trace", str(tmp_path), "-o", str(tmp_path / "t"), *words]) == 2
        assert why in capsys.readouterr().err
