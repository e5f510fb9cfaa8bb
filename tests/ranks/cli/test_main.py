"""Commands in processes of their own, and with ranks that are processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradwire
from gradwire.cli import COMMANDS, main
from gradwire.observe.rings.ring import RingFile, state_of_writer
from gradwire.observe.rings.runs import runs_directory
from gradwire.recorder.format import CAPACITY
from gradwire.runtime.host import ProcessState
from helpers.made_rings import made_ring, write_ring
from helpers.warm_python import GRADWIRE_RUN


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command):
    """`import torch` alone takes seconds."""
    code = (
        "import sys\nfrom gradwire.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print(*{'torch', 'numpy', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    words = [*filter(None, [command]), "--help"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: gradwire")
    assert done.stderr.split() == []


SWALLOWED = """
import importlib, os, signal, sys
from gradwire import cli

original = importlib.import_module

def swallows(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    return original(name)

importlib.import_module = swallows
sys.exit(cli.main(["report", "--help"]))
"""


def test_an_interrupt_while_a_command_is_imported_ends_it_even_if_a_module_catches_the_exception():
    ended = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


FULL = "gradwire: writing the output: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "into", "unbuffered", "code", "message"),
    [
        (["report", "--text", "RUN"], "/dev/full", "", 1, FULL),
        (["inspect", "RUN"], "/dev/full", "1", 1, FULL),
        (["--help"], "/dev/full", "", 1, FULL),
        (["report", "--text", "RUN"], "a closed pipe", "", 141, ""),
        (["report", "--text", "RUN"], "a closed pipe", "1", 141, ""),
        (["report", "--text", "RUN"], "nothing", "", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line(tmp_path, words, into, unbuffered, code, message):
    write_ring(tmp_path, made_ring(0, range(30), size=1))
    if into == "a closed pipe":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open(os.devnull if into == "nothing" else into, os.O_WRONLY)
    command = [sys.executable, "-m", "gradwire", *(str(tmp_path) if word == "RUN" else word for word in words)]
    if into == "nothing":
        command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
    try:
        environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    finally:
        os.close(output)
    assert (ended.returncode, ended.stderr) == (code, message)


def test_ranks_print_where_the_launcher_was_started_without_streams(tmp_path):
    """What takes a descriptor below 3 would get what ranks print."""
    script = tmp_path / "script.py"
    script.write_text("import sys, pathlib\nfor _ in range(999): print(_)\npathlib.Path(sys.argv[1]).touch()\n")
    command = [sys.executable, "-m", "gradwire", "run", "-n", "1", "--no-record", str(script), str(tmp_path / "done")]
    subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh", *command], stderr=subprocess.PIPE, timeout=300, check=True
    )
    assert (tmp_path / "done").exists()


def test_it_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "gradwire", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"gradwire {gradwire.__version__}\n")


def test_two_ranks_are_measured(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    [findings] = found["hosts"].values()
    measured = {one["name"]: one for one in findings if one["area"] == "two ranks"}
    assert measured.keys() == {"shared_memory", "gloo"}
    assert all("bit/s" in one["value"] for one in measured.values())
    assert {one["level"] for one in measured.values()} == {"ok"}
    assert code == (1 if found["problems"] else 0)


DEADLINE = 120.0


SCRIPT = """
import sys, time
import gradwire as gw
group = gw.init()
for number in range(66_000):
    gw.observe.mark(str(number % 100))
group.barrier()
open(sys.argv[1] + f"/ready-{group.rank}", "w").close()
time.sleep(600)
"""


def test_after_sigkill_of_all_ranks_and_the_launcher_the_last_records_are_there(tmp_path, capsys, warm_python):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    script = [str(tmp_path / "train.py"), str(tmp_path)]
    launcher = warm_python.start(GRADWIRE_RUN, "-n", "2", "--run-dir", str(run), *script, capture=True)
    pids = []
    try:
        deadline = time.monotonic() + DEADLINE
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < deadline, "the ranks did not start"
            assert launcher.poll() is None
            time.sleep(0.05)
        for path in run.glob("rank-*.ring"):
            with RingFile(path) as ring:
                pids.append(int(ring.header["pid"]))
    finally:
        for pid in (launcher.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()
    for path in run.glob("rank-*.ring"):
        with RingFile(path) as ring:
            while state_of_writer(ring.header) is not ProcessState.GONE:
                assert time.monotonic() < deadline, "a rank did not end"
                time.sleep(0.01)
    assert main(["report", str(run), "--text"]) == 0
    text = capsys.readouterr().out
    assert text.count(f"{CAPACITY:,}") == 3  # of each rank, and in the explanation
    assert f"{2 * CAPACITY:,} records" in text
    assert "Ranks 0, 1 ended without stopping the recorder" in text


TRACED = """
import torch
import gradwire as gw
group = gw.init()
for _ in range(3):
    group.all_reduce(torch.ones(4), label="loss")
gw.observe.mark("trained")
"""


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return runs_directory(os.environ)


@pytest.fixture
def train(tmp_path, warm_python):
    """`gradwire run` of the script, with options; returns what was written on stderr."""
    path = tmp_path / "train.py"
    path.write_text(TRACED)

    def run(*options):
        done = warm_python.run(GRADWIRE_RUN, *options, str(path), timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def events(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_the_latest_run_is_traced_unless_another_is_named(state, train, tmp_path, capsys):
    train("-n", "2")
    assert sorted(path.name for path in (state / "latest").glob("*.ring")) == ["rank-0.ring", "rank-1.ring"]
    assert main(["trace", "-o", str(tmp_path / "t.json")]) == 0
    assert "of 2 ranks" in capsys.readouterr().out
    found = events(tmp_path / "t.json")
    reduced = [e for e in found if e["name"] == "all_reduce"]
    assert {(e["pid"], e["args"]["label"]) for e in reduced} == {(0, "loss"), (1, "loss")}  # type: ignore[index]
    assert len([e for e in found if e["name"] == "trained"]) == 2

    named = tmp_path / "here"
    train("-n", "1", "--run-dir", str(named))
    assert main(["trace", str(named), "-o", str(tmp_path / "t.json")]) == 0
    assert {e["pid"] for e in events(tmp_path / "t.json")} == {0}


def test_a_run_that_is_not_to_be_recorded(state, train, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADWIRE_RUN_DIR", str(tmp_path / "of a run around this one"))
    train("-n", "1", "--no-record")
    assert not state.exists()
    assert not (tmp_path / "of a run around this one").exists()


def test_without_a_state_directory_the_script_runs_all_the_same(train, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "not recorded" in train("-n", "1")
