"""The launcher's loop on real processes, in this process: the scripts import nothing, so that they start at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from gradwire import root_cause
from gradwire.errors import UsageError
from gradwire.launch import display, shutdown, tracebacks
from gradwire.launch.process import RankProcess
from gradwire.launch.supervise import Run, _Supervisor, supervise
from gradwire.observe.monitor import RunMonitor
from gradwire.observe.run_follower import RunFollower
from helpers.made_steps import made_steps, write_rings
from helpers.waiting import wait_for_exit, wait_until

HEAD = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
folder = os.path.dirname(__file__)
def mark(name):
    open(os.path.join(folder, f"{name}-{rank}"), "w").close()
def wait_for(mark):
    while not os.path.exists(os.path.join(folder, mark)):
        time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path, capfdbinary):
    """Run a script on some ranks: (exit code, stdout, stderr)."""

    def start(script: str, size: int = 2, **options) -> tuple[int, bytes, bytes]:
        for mark in tmp_path.glob("*-[0-9]"):  # of an earlier launch
            mark.unlink()
        file = tmp_path / "script.py"
        file.write_text(HEAD + textwrap.dedent(script))
        environments = [{"RANK": str(rank), "PYTHONUNBUFFERED": "1"} for rank in range(size)]
        code = supervise(Run([sys.executable, "-S", str(file)], environments, **options))
        return code, *capfdbinary.readouterr()

    return start


def wait_for(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() for path in paths), f"{', '.join(map(str, paths))} are made")


# -- the monitor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def monitor(tmp_path):
    """A monitor of two ranks that were recorded before, with a line of figures at once."""
    (tmp_path / "run").mkdir()
    write_rings(tmp_path / "run", made_steps(2, 30), size=2)
    monitor = RunMonitor(RunFollower(tmp_path / "run"), size=2, stats=0.001)
    yield monitor
    monitor.run.close()


def test_figures_are_printed_while_ranks_run(launch, monitor):
    script = "time.sleep(0.1)\nprint('done')"
    code, out, err = launch(script, monitor=monitor)
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] done", b"[1] done"]
    assert err.startswith(b"gradwire run: step 30, ")


def test_a_picture_is_drawn_below_the_output_and_stays_at_the_end(launch, monitor, monkeypatch):
    monkeypatch.setattr(display, "find_terminal", lambda environ: 2)
    monkeypatch.setattr(display.os, "isatty", lambda fd: fd == 2)
    sizes = []

    def picture(status, columns, lines):
        sizes.append((columns, lines))
        return [b"step %d" % status.step]

    code, out, err = launch("print('done', file=sys.stderr)", monitor=monitor, picture=picture)
    assert code == 0
    assert sizes[0] == (79, 15)
    assert out == b""
    assert b"done\x1b[0m\nstep 30\n" in err or b"done\nstep 30\n" in err
    assert err.endswith(b"step 30\n")


def test_a_picture_stays_above_the_report_of_a_failure(launch, monitor, monkeypatch):
    monkeypatch.setattr(display, "find_terminal", lambda environ: 2)
    monkeypatch.setattr(display.os, "isatty", lambda fd: fd == 2)
    code, _, err = launch("sys.exit(3)", monitor=monitor, picture=lambda *_: [b"the picture"])
    assert code == 3
    report = err.rpartition(b"the picture\n")[2]
    assert b"exit" in report
    assert b"\x1b[J" not in report  # nothing of it is erased


# -- output ----------------------------------------------------------------------------------------------------------------


def test_success_shows_each_stream_with_ranks_and_loses_nothing(launch, tmp_path):
    code, out, err = launch(
        r"""
        sys.stdout.buffer.write(b"caf\xe9 %d\n" % rank)
        print("to stderr", rank, file=sys.stderr)
        print("no line feed", end="")
        """,
        3,
        log_dir=tmp_path / "logs" / "deep",
    )
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        line for r in b"012" for line in (b"[%c] caf\xe9 %c" % (r, r), b"[%c] no line feed" % r)
    )
    assert sorted(err.splitlines()) == [b"[%c] to stderr %c" % (r, r) for r in b"012"]
    log = (tmp_path / "logs" / "deep" / "rank-1.log").read_bytes()
    assert sorted(log.replace(b"\n", b"|\n").splitlines()) == [b"caf\xe9 1|", b"no line feed", b"to stderr 1|"]


def test_much_output_of_all_ranks_at_once_is_not_torn(launch):
    code, out, err = launch(
        """
        for i in range(4000):
            os.write(1 + i % 2, b"%d:%d:%s\\n" % (rank, i, b"x" * (i % 300)))
        """,
        3,
    )
    assert code == 0
    for first, stream in enumerate((out, err)):
        seen: dict[bytes, list[int]] = {b"0": [], b"1": [], b"2": []}
        for line in stream.splitlines():
            match = re.fullmatch(rb"\[(\d)\] (\d):(\d+):(x*)", line)
            assert match is not None, line
            assert match[1] == match[2]
            assert len(match[4]) == int(match[3]) % 300
            seen[match[1]].append(int(match[3]))
        assert all(numbers == list(range(first, 4000, 2)) for numbers in seen.values())


def test_without_prefix(launch):
    code, out, _ = launch("print('plain')", 2, prefix=False)
    assert (code, out) == (0, b"plain\nplain\n")


def test_rank_0_reads_what_is_piped_in_and_the_others_nothing(launch):
    read, write = os.pipe()
    saved = os.dup(0)
    try:
        os.dup2(read, 0)
        os.write(write, b"a message")
        os.close(write)
        code, out, _ = launch("print(repr(sys.stdin.read()))")
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read)
    assert (code, sorted(out.splitlines())) == (0, [b"[0] 'a message'", b"[1] ''"])


def test_a_folder_for_logs_that_cannot_be_made_is_a_usage_error(launch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="writing the output of rank 0 to .*file"):
        launch("", log_dir=tmp_path / "file")


def test_a_program_that_is_not_there_leaves_nothing(tmp_path):
    code = supervise(Run([str(tmp_path / "nothing")], [{}, {}], grace=1))
    assert code == 1


# -- failures --------------------------------------------------------------------------------------------------------------


def test_a_failing_rank_stops_the_others_and_its_traceback_is_last(launch):
    code, _, err = launch(
        """
        def rank_main():
            raise ValueError("the loss is a teapot")
        if rank == 1:
            rank_main()
        time.sleep(100)
        """,
        3,
    )
    lines = err.decode().splitlines()
    assert code == 1
    assert lines[-1].startswith("gradwire run: rank 1 failed first (exit code 1, after ")
    assert lines[-1].endswith("; ranks 0, 2 were stopped")
    start = lines.index("gradwire run: last output of rank 1:")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-3:-1] == ["ValueError: the loss is a teapot", ""]
    assert lines.count("ValueError: the loss is a teapot") == 1  # and nowhere else
    assert not any("[1]" in line for line in lines)


RAISE = """
def raise_as(name, message):
    error = type(name, (Exception,), {"__module__": "gradwire.errors"})
    raise error(message)
"""


@pytest.fixture
def patience(monkeypatch):
    """However slow the machine, a rank comes to its end soon enough to count as the cause of the others' failures."""
    for module in (shutdown, root_cause):
        monkeypatch.setattr(module, "NEAR", 60.0)


def test_one_traceback_and_a_line_for_each_other_rank(launch, tmp_path, patience):
    script = (
        RAISE
        + """
if rank != 2:
    mark("ended")
    raise_as("PeerLost", f"rank 2 is lost, says {rank}")
for other in (0, 1):
    wait_for(f"ended-{other}")
raise KeyError("cause")
"""
    )
    code, _, err = launch(script, 3, log_dir=tmp_path / "logs")
    lines = err.decode().splitlines()
    assert code == 1
    assert err.count(b"Traceback") == 1
    assert {f"[{r}] gradwire.errors.PeerLost: rank 2 is lost, says {r}" for r in (0, 1)} <= set(lines)
    assert f"gradwire run: 2 tracebacks shortened to one line: in full in {tmp_path / 'logs'}" in lines
    assert lines[-3:-1] == ["KeyError: 'cause'", ""]
    assert b"Traceback" in (tmp_path / "logs" / "rank-0.log").read_bytes()
    _, _, err = launch(script, 3, all_tracebacks=True)
    assert err.count(b"Traceback") == 4  # each where it was written, and once more at the end


def test_a_time_out_is_about_the_missing_rank(launch):
    code, _, err = launch(
        RAISE
        + """
mark("begun")
if rank == 2:
    time.sleep(100)
raise_as("CollectiveTimeout", f"on rank {rank}: not finished after 4 s. Joined: ranks [0, 1]; missing: ranks [2]. Look")
""",
        3,
    )
    assert code == 1
    assert re.search(
        rb"\ngradwire run: rank 2 was missing \(CollectiveTimeout on rank [01], exit code 1, after [\d.]+ s\); rank 2 was stopped; "
        rb"rank [01] failed too\n$",
        err,
    ), err
    assert err.count(b"Traceback") == 1


def test_a_disagreement_is_about_those_who_disagree(launch):
    code, _, err = launch(
        RAISE + 'raise_as("LayoutError", "replicating a model: rank 2 and rank 0 disagree. The first parameter")', 3
    )
    assert code == 1
    assert re.search(rb"\ngradwire run: rank 2 and rank 0 disagree \(LayoutError on rank \d, exit code 1", err), err


@pytest.mark.parametrize("limit", ["HOLD", "PAUSE"])
def test_a_traceback_of_a_rank_that_goes_on_is_shown(launch, monkeypatch, limit):
    monkeypatch.setattr(tracebacks, limit, 0.1)
    code, _, err = launch(
        """
        import traceback
        try:
            {}[rank]
        except KeyError:
            traceback.print_exc()
        time.sleep(0.5)
        print("still here")
        time.sleep(0.5)
        os._exit(1 if rank else 0)
        """
    )
    assert code == 1
    assert sorted(re.findall(rb"\[\d\] Traceback", err)) == [b"[0] Traceback", b"[1] Traceback"]
    assert b"shortened to one line" not in err


def test_a_rank_that_ignores_sigterm_is_killed(launch):
    began = time.monotonic()
    code, _, err = launch(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mark("deaf")
            time.sleep(100)
        wait_for("deaf-0")
        sys.exit(7)
        """,
        grace=0.5,
    )
    assert code == 7
    assert 0.5 <= time.monotonic() - began < 60
    assert b"rank 1 failed first (exit code 7" in err
    assert b"rank 0 was stopped" in err


def test_a_rank_that_is_killed_is_named_with_its_signal(launch):
    code, _, err = launch("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(100)")
    assert code == 137
    assert re.search(rb"rank 1 failed first \(killed by SIGKILL, after \d+\.\d s\); rank 0 was stopped\n$", err)


def test_the_cause_is_shown_though_its_consequence_came_first(launch, patience):
    code, _, err = launch(
        """
        class PeerLost(Exception): pass
        PeerLost.__module__ = "gradwire.errors"
        if rank == 0:
            open(os.path.join(folder, "pid"), "w").write(str(os.getpid()))
            mark("begun")
            raise PeerLost("rank 1 is lost")
        wait_for("begun-0")
        end = os.pidfd_open(int(open(os.path.join(folder, "pid")).read()))
        import select
        select.select([end], [], [])  # rank 0 has ended
        raise KeyError("cause")
        """
    )
    assert code == 1
    assert err.splitlines()[-3:-1] == [b"KeyError: 'cause'", b""]
    assert err.endswith(b"; rank 0 failed too\n")
    assert b"rank 1 failed first" in err


def test_one_rank_alone_says_it_once(launch):
    code, _, err = launch("sys.exit('no luck')", 1)
    assert code == 1
    assert re.fullmatch(rb"\[0\] no luck\ngradwire run: rank 0 failed \(exit code 1, after \d\.\d s\)\n", err)


# -- no orphans ------------------------------------------------------------------------------------------------------------


def test_what_a_rank_started_neither_holds_the_launcher_up_nor_outlives_it(launch):
    began = time.monotonic()
    code, out, _ = launch(
        """
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; print('late', flush=True); time.sleep(100)"])
        print("child", child.pid)
        os._exit(0)
        """
    )
    assert code == 0
    assert time.monotonic() - began < 60
    children = [int(word) for word in re.findall(rb"child (\d+)", out)]
    assert len(children) == 2
    assert out.count(b"late") == 2
    for pid in children:
        wait_for_exit(pid)


def test_what_a_stopped_rank_started_gets_the_signal_too(launch):
    code, out, _ = launch(
        """
        if rank == 0:
            child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
            print("child", child.pid)
            mark("child")
            time.sleep(100)
        wait_for("child-0")
        sys.exit(3)
        """
    )
    assert code == 3
    (pid,) = map(int, re.findall(rb"child (\d+)", out))
    wait_for_exit(pid)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    code = (
        "import sys; from gradwire.launch.process import RankProcess\n"
        f"ranks = [RankProcess(r, [sys.executable, '-S', {str(script)!r}], {{}}, stdin=-3) for r in (0, 1)]\n"
        "import os\n"
        "for rank in ranks: os.set_blocking(rank.stdout.fileno(), True); print(rank.stdout.readline().decode(), end='')\n"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    for pid in pids:
        wait_for_exit(pid)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("thread", [False, True])
def test_what_ranks_started_ends_with_a_launcher_that_is_killed(tmp_path, thread, stopped):
    """Also where the ranks ignore what can be ignored, where they are stopped, and where a thread started them."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, subprocess, time\n"
        "for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    code = f"""
import os, signal, sys, threading, time
from gradwire.launch.process import RankProcess
def main():
    ranks = [RankProcess(r, [sys.executable, '-S', {str(script)!r}], {{}}, stdin=-3) for r in (0, 1)]
    for rank in ranks:
        os.set_blocking(rank.stdout.fileno(), True)
        line = rank.stdout.readline().decode()
        print(line, end='', flush=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            rank.send(number)
        if {stopped}:
            rank.send(signal.SIGSTOP)
            # Linux continues stopped processes whose launcher ends, not those that are about to stop.
            for pid in line.split():
                while open(f'/proc/{{pid}}/stat').read().rpartition(')')[2].split()[0] != 'T':
                    time.sleep(0.01)
    os.kill(os.getpid(), 9)
thread = threading.Thread(target=main)
thread.start() if {thread} else main()
thread.join() if {thread} else None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 4
    for pid in pids:
        wait_for_exit(pid)


def test_a_rank_whose_launcher_is_gone_already_does_not_begin(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getpid", lambda: 1 << 22)  # nobody's parent
    process = RankProcess(0, [sys.executable, "-c", f"open({str(tmp_path / 'mark')!r}, 'w')"], {}, stdin=-3)
    monkeypatch.undo()
    wait_until(lambda: process.status is not None, "the process ends")
    assert process.status == 1
    process.release()
    assert not (tmp_path / "mark").exists()


# -- signals ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def send(tmp_path):
    """Send signals to this process, the launcher: each as soon as all ranks have made the mark that goes with it."""
    threads = []

    def start(*signals: tuple[str, int], size: int = 2) -> None:
        def send_all() -> None:
            for mark, number in signals:
                wait_for(*(tmp_path / f"{mark}-{rank}" for rank in range(size)))
                os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=send_all))
        threads[0].start()

    yield start
    for thread in threads:
        thread.join(100)


def test_signals_are_passed_on_and_ranks_that_deal_with_them_end_well(launch, send):
    send(("ready", signal.SIGUSR1), ("SIGUSR1", signal.SIGINT))
    code, out, err = launch(
        """
        got = []
        def handler(number, frame):
            got.append(signal.Signals(number).name)
            mark(got[-1])
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, handler)
        mark("ready")
        wait_for(f"SIGINT-{rank}")
        print(got)
        """
    )
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[%d] ['SIGUSR1', 'SIGINT']" % rank for rank in (0, 1)]


def test_usr1_does_not_end_ranks_that_have_no_handler_for_it(launch, send):
    send(("ready", signal.SIGUSR1), ("ready", signal.SIGINT))
    code, _, err = launch("mark('ready'); time.sleep(100)")
    assert code == 130
    assert b"SIGUSR1" not in err


def test_an_interrupt_that_ranks_do_not_deal_with_is_exit_code_130(launch, send):
    send(("ready", signal.SIGINT))
    code, _, err = launch("mark('ready'); time.sleep(100)")
    assert code == 130
    assert re.fullmatch(rb"gradwire run: stopped by SIGINT after \d+\.\d s\n", err)


def test_after_an_interrupt_what_ranks_still_say_is_shown_without_tracebacks(launch, send):
    send(("ready", signal.SIGINT))
    code, _, err = launch(
        """
        import atexit
        atexit.register(lambda: print("saved by", rank, file=sys.stderr))
        mark('ready')
        time.sleep(100)
        """
    )
    assert code == 130
    assert re.fullmatch(rb"\[0\] saved by 0\n\[1\] saved by 1\ngradwire run: stopped by SIGINT after \d+\.\d s\n", err)


def test_an_interrupt_that_is_lost_in_an_import_does_not_take_the_grace(launch, send, tmp_path):
    """Rank 0 is interrupted in an import; rank 1 has lost the interrupt, as C code under `import torch` may."""
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(tmp_path / 'ready-0')!r}, 'w').close()\ntime.sleep(100)\n"
    )
    send(("ready", signal.SIGINT))
    code, _, err = launch(
        """
        if rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            mark("ready")
            time.sleep(100)
        import slow
        """,
        grace=1000,
    )
    assert code == 130
    assert re.fullmatch(rb"gradwire run: stopped by SIGINT after \d+\.\d s\n", err)


def test_a_second_interrupt_kills(launch, send):
    send(("ready", signal.SIGINT), ("deaf", signal.SIGINT))
    code, _, err = launch(
        """
        signal.signal(signal.SIGINT, lambda number, frame: mark("deaf"))
        mark("ready")
        while True:
            time.sleep(100)
        """,
        grace=1000,
    )
    assert (code, err.count(b"\n")) == (130, 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_kills_after_the_grace(launch, send):
    send(("ready", signal.SIGTERM), size=1)
    code, _, _ = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark("ready")
        time.sleep(100)
        """,
        1,
        grace=0.3,
    )
    assert code == 143


def test_a_signal_that_was_ignored_stays_ignored(launch, send):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        send(("ready", signal.SIGHUP), ("ready", signal.SIGUSR1), size=1)
        code, out, _ = launch(
            """
            signal.signal(signal.SIGUSR1, lambda number, frame: mark("over"))
            mark("ready")
            wait_for("over-0")
            print("well")
            """,
            1,
        )
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, out) == (0, b"[0] well\n")


def test_it_runs_in_a_thread_too(launch):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(launch("print(rank)")))
    thread.start()
    thread.join(100)
    ((code, out, _),) = answers
    assert (code, sorted(out.split())) == (0, [b"0", b"1", b"[0]", b"[1]"])


def test_a_third_ctrl_c_counts_while_the_second_is_still_handled():
    """It used to be lost there, and the launcher then waited for a fourth."""
    supervisor = _Supervisor(Run(["true"], [{}]))
    sent = []

    class Rank:
        def send(self, number):
            sent.append(number)
            if number == signal.SIGKILL:
                supervisor._got_signal(signal.SIGINT, None)

    supervisor._ranks.append(Rank())  # type: ignore[arg-type]
    supervisor._got_signal(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        supervisor._got_signal(signal.SIGINT, None)
    assert sent == [signal.SIGINT, signal.SIGKILL]
