"""`gradwire run` as a command: options, exit codes, Ctrl-C, a closed pipe, a launcher that is killed."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradwire.cli import main, run
from gradwire.launch import display, store_host
from gradwire.launch.run_script import python_command
from gradwire.launch.supervise import Supervisor
from helpers.waiting import wait_for_exit, wait_until

COMMAND = [sys.executable, "-m", "gradwire", "run"]


def state(pid: int) -> str:
    """As in /proc: T is stopped, Z a zombie; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def gone(pid: int) -> bool:
    return state(pid) in "ZX"


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_options_reach_the_ranks_and_arguments_the_script(script, capfd, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = script(
        "import os, sys; print(os.environ['A'], os.environ['B'], os.environ['OMP_NUM_THREADS'], sys.argv[1:])"
    )
    options = ["--nproc", "2", "--env", "A=1=2", "--env", "B=", "--log-dir", str(tmp_path / "logs"), "--no-prefix"]
    assert main(["run", *options, path, "--nproc", "9", "--debug", "-m"]) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    line = f"1=2  {threads} ['--nproc', '9', '--debug', '-m']\n"
    assert capfd.readouterr().out == 2 * line
    assert [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)] == [line] * 2


@pytest.mark.parametrize(
    "words",
    [["--", "x"], ["x", "--", "y"], ["--"], ["--", "--", "x"], ["-n", "--", "3"], ["--", "-n", "3"], ["", "-"]],
    ids=" ".join,
)
@pytest.mark.parametrize("options", [["-n", "1"], ["-n", "1", "--"], ["--nproc=1", "--debug"]], ids=" ".join)
def test_the_script_gets_the_arguments_that_python_would_pass(words, options, script, monkeypatch):
    started = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    path = script("import sys; print(sys.argv)")
    assert main(["run", *options, path, *words]) == 0
    (plan,) = started
    start = python_command("gradwire.launch.run_script", errors=str(plan.errors))
    assert plan.command == [sys.executable, *start, path, *words]


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], 5.0), (["--hang-after", "30"], 30.0), (["--hang-after=0"], None), (["--hang-after", "never"], None)],
)
def test_when_hangs_are_reported(words, expected, script, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    assert main(["run", "-n", "1", "--run-dir", str(tmp_path / "run"), *words, script("")]) == 0
    assert started[0].watch.deadline == (float("inf") if expected is None else expected)
    assert (started[0].watch.next_look == float("inf")) == (expected is None)


@pytest.mark.parametrize(("options", "words"), [([], ["x.py", "1"]), (["-m"], ["x", "1"])])
def test_a_script_that_is_observed(options, words, script, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main(["run", "-n", "1", "--observe", "--run-dir", str(tmp_path / "run"), *options, *words]) == 0
    start = python_command("gradwire.launch.run_script", errors=str(tmp_path / "run"), observe=True)
    assert started[0].command == [sys.executable, *start, *options, *words]
    assert main(["run", "-n", "1", "--observe", "--no-record", *options, *words]) == 2


def test_a_module(script, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script("import sys; print(__name__, sys.argv[1:]); sys.exit(5)")
    assert main(["run", "-n", "1", "-m", "script", "x"]) == 5
    assert capfd.readouterr().out == "[0] __main__ ['x']\n"


@pytest.mark.parametrize(("gpus", "expected"), [(3, 3), (0, len(os.sched_getaffinity(0)))])
def test_by_default_there_is_a_rank_per_device_or_per_core(gpus, expected, script, monkeypatch):
    started = []
    monkeypatch.setattr(run, "count_gpus", lambda: gpus)
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    assert main(["run", "--timeout", "2.5", script("")]) == 0
    (plan,) = started
    assert (len(plan.environments), plan.grace, plan.prefix, plan.log_dir) == (expected, 2.5, True, None)


@pytest.mark.parametrize(
    ("options", "terminal", "has_picture", "stats"),
    [
        ([], 2, False, None),
        (["--stats", "5"], 2, False, 5.0),
        (["--watch"], 2, True, None),
        (["--watch", "--stats", "2.5"], 2, True, 2.5),
        (["--watch"], None, False, 10.0),
        (["--watch", "--stats", "60"], None, False, 60.0),
    ],
)
def test_a_live_view_needs_a_terminal(options, terminal, has_picture, stats, script, monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(display, "find_terminal", lambda environ: terminal)
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    assert main(["run", "-n", "1", *options, script("")]) == 0
    assert (started[0].picture is not None, started[0].monitor._stats) == (has_picture, stats)


@pytest.mark.parametrize("option", [["--watch"], ["--stats", "5"]])
def test_what_is_not_recorded_cannot_be_shown(option, script, capsys):
    assert main(["run", "--no-record", *option, script("")]) == 2
    assert "omit --no-record" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "often"])
def test_an_interval_must_be_positive(value, script, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--stats", value, script("")])
    assert f"'{value}' is not a number greater than 0" in capsys.readouterr().err


def test_a_script_that_is_not_there(capsys, tmp_path):
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert "none.py: there is no such file. Options of gradwire run go before the script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: SCRIPT. See gradwire run --help."),
        (["--nproc", "0", "x"], "'0' is not a whole number of 1 or more"),
        (["--nproc", "many", "x"], "'many' is not a whole number of 1 or more, nor gpu, cpu or auto"),
        (
            ["--nnodes", "2", "x"],
            "'2' hosts: gradwire run starts ranks on this machine only. For several hosts use torchrun",
        ),
        (
            ["--max_restarts=3", "x"],
            "unrecognized arguments: --max_restarts=3. Ranks are replaced with --elastic MIN:MAX",
        ),
        (
            ["--rdzv-backend", "c10d", "x"],
            "unrecognized arguments: --rdzv-backend. gradwire run starts ranks on this machine",
        ),
        (["--fast", "x"], "error: unrecognized arguments: --fast. See gradwire run --help."),
        (["--env", "A", "x"], "argument --env: 'A' is not NAME=VALUE"),
        (["--env", "=A", "x"], "argument --env: '=A' is not NAME=VALUE"),
        (["--timeout", "soon", "x"], "argument --timeout: 'soon' is not a number of seconds"),
        (["--timeout", "-1", "x"], "argument --timeout: '-1' is not a number of seconds"),
        (["--timeout", "inf", "x"], "argument --timeout: 'inf' is not a number of seconds"),
        (["--hang-after", "later", "x"], "argument --hang-after: 'later' is not a number of seconds"),
        (["--hang-after", "nan", "x"], "argument --hang-after: 'nan' is not a number of seconds"),
    ],
)
def test_a_wrong_option_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["run", *argv])
    assert ending.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gradwire run: error: ")
    assert message in line


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=2"],
        ["--standalone", "--nnodes", "1", "--nproc-per-node=2"],
        ["--nnodes=1:1", "-n", "2"],
    ],
)
def test_options_as_torchrun_spells_them(words, script, monkeypatch):
    started = []
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    assert main(["run", *words, script(""), "--nproc-per-node", "7"]) == 0
    (plan,) = started
    assert len(plan.environments) == 2
    assert plan.command[-2:] == ["--nproc-per-node", "7"]


@pytest.mark.parametrize(
    ("word", "gpus", "expected"),
    [("cpu", 3, len(os.sched_getaffinity(0))), ("gpu", 3, 3), ("auto", 3, 3), ("gpu", 0, None)],
)
def test_words_in_place_of_a_number(word, gpus, expected, script, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(run, "count_gpus", lambda: gpus)
    monkeypatch.setattr(Supervisor, "supervise", lambda supervisor: started.append(supervisor._run) or 0)
    code = main(["run", "--nproc-per-node", word, script("")])
    if expected is None:
        assert (code, started) == (2, [])
        assert "there is no GPU" in capsys.readouterr().err
    else:
        assert (code, len(started[0].environments)) == (0, expected)


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["run", "--help"], ["run", "SCRIPT"], ["run", "none.py"]])
def test_the_launcher_does_not_import_torch(argv, script):
    argv = [script("") if word == "SCRIPT" else word for word in argv]
    code = (
        "import sys\nfrom gradwire.cli import main\n"
        f"try: main({['run', '-n', '2', *argv[1:]] if argv[0] == 'run' else argv})\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True)


def test_a_store_that_ends_ends_the_run(script, capfd, monkeypatch):
    monkeypatch.setattr(store_host, "_PROGRAM", "raise SystemExit('no torch here')")
    assert main(["run", "-n", "2", script(SLEEP)]) == 1
    err = capfd.readouterr().err
    assert "no torch here" in err
    assert err.splitlines()[-1].startswith(
        "gradwire run: the process that hosts the store has ended (exit code 1, after "
    )
    assert "SIGTERM" not in err


@pytest.mark.parametrize(
    "then", ["time.sleep(100)", "raise DistNetworkError('Connection reset by peer')"], ids=["ranks wait", "ranks fail"]
)
def test_the_last_line_names_a_store_that_was_killed(then, script, capfd, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    monkeypatch.setattr(
        store_host, "_PROGRAM", f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(100)"
    )
    path = script(
        "import os, signal, time\n"
        "class DistNetworkError(Exception): pass\n"
        f"while not (os.path.exists({str(pid)!r}) and (text := open({str(pid)!r}).read()).endswith(' ')): time.sleep(0.01)\n"
        f"os.kill(int(text), signal.SIGKILL)\n{then}\n"
    )
    assert main(["run", "-n", "2", path]) == 1
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .startswith("gradwire run: the process that hosts the store has ended (killed by SIGKILL, after ")
    )


SLEEP = "import os, time\nprint('pid', os.getpid(), flush=True)\nwhile True: time.sleep(0.01)\n"


def started(process: subprocess.Popen[str], ranks: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[-1]) for _ in range(ranks)]


def start(*words: str, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


FORKING = """
import sys
from gradwire.cli import main, run
run.preloaded_modules = lambda source: ["decimal"]
run.why_not_preload = lambda source: ""
sys.exit(main(["run", *sys.argv[1:]]))
"""
FORKED_TOO = pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-c", FORKING]], ids=["started", "forked"])


@FORKED_TOO
def test_ctrl_z_stops_ranks_too_and_ctrl_c_ends_them_once(command, script):
    # To the process group, as a terminal sends it: ranks are not in it, and get it only from the launcher.
    with start("-n", "2", script(SLEEP), command=command) as launcher:
        try:
            pids = started(launcher, 2)
            os.killpg(launcher.pid, signal.SIGTSTP)
            wait_until(lambda: {state(pid) for pid in (launcher.pid, *pids)} == {"T"}, "all are stopped")
            os.killpg(launcher.pid, signal.SIGCONT)
            wait_until(lambda: "T" not in {state(pid) for pid in (launcher.pid, *pids)}, "none is stopped")
            os.killpg(launcher.pid, signal.SIGINT)
            _, err = launcher.communicate(timeout=300)
        finally:
            launcher.kill()
    assert launcher.returncode == 130
    assert err.count("KeyboardInterrupt") == 2
    assert err.splitlines()[-1].startswith("gradwire run: stopped by SIGINT after ")
    assert all(map(gone, pids))


EARLY = """
class Early:
    def find_spec(self, name, *_):
        if name == "gradwire.launch.supervise":
            os.kill(os.getpid(), 15)
import os, sys
sys.meta_path.insert(0, Early())
"""


def test_a_signal_while_the_launcher_imports_its_parts_ends_the_run(script, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    words = ["-n", "2", "--no-record", script(SLEEP)]
    with start(*words, command=[sys.executable, "-c", EARLY + FORKING]) as launcher:
        _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1].startswith("gradwire run: stopped by SIGTERM after ")
    assert not os.listdir(tmp_path / "tmp")


@FORKED_TOO
def test_ranks_do_not_outlive_a_launcher_that_is_killed(command, script):
    with start("-n", "2", script(SLEEP), command=command) as launcher:
        pids = started(launcher, 2)
        launcher.kill()
    for pid in pids:
        wait_for_exit(pid)


def test_when_nobody_reads_the_ranks_are_stopped(script):
    with start("-n", "1", script(SLEEP.replace("time.sleep(0.01)", "print('more')"))) as launcher:
        try:
            pids = started(launcher, 1)
            assert launcher.stdout is not None
            launcher.stdout.close()
            assert launcher.wait(60) == 128 + signal.SIGPIPE
        finally:
            launcher.kill()
    assert all(map(gone, pids))


FLOOD = """
import os, signal
signal.signal(signal.SIGINT, lambda number, frame: open(__file__ + ".mark", "w").close())
print("pid", os.getpid(), flush=True)
while True:
    print("x" * 1000, flush=True)
"""


def test_a_third_ctrl_c_ends_a_launcher_whose_reader_does_not_read(script):
    path = script(FLOOD)
    with start("-n", "1", path) as launcher:
        try:
            assert launcher.stdout is not None
            (rank,) = started(launcher, 1)
            size = fcntl.fcntl(launcher.stdout, fcntl.F_GETPIPE_SZ)
            wait_until(lambda: waiting(launcher.stdout) > size - 4096, "the pipe is full")
            launcher.send_signal(signal.SIGINT)
            # Forwarded, though the launcher cannot write.
            wait_until(Path(path + ".mark").exists, "the rank receives the signal")
            launcher.send_signal(signal.SIGINT)
            wait_for_exit(rank)
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(100) == 130
        finally:
            launcher.kill()


def waiting(pipe) -> int:
    """Bytes that can be read."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)
