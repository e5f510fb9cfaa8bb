"""The launcher's loop and signals; and that no process outlives the launcher."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradwire.launch.supervise import LaunchSpec, Supervisor
from gradwire.observe.rings.run_outcome import load
from helpers.waiting import wait_for_exit, wait_until

FORKED_TOO = pytest.mark.parametrize("launch", ["started", "forked"], indirect=True)
FORKED = pytest.mark.parametrize("launch", ["forked"], indirect=True)


def wait_for(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() for path in paths), f"{', '.join(map(str, paths))} are made")


@FORKED_TOO
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


@FORKED_TOO
@pytest.mark.parametrize("leave", ["pass", "os.setpgrp()", "os.setsid()"])
def test_a_stopped_rank_and_what_it_started_get_the_signal(launch, leave):
    """Also where the rank has left the group of its guardian."""
    code, out, err = launch(
        f"""
        if rank == 0:
            {leave}
            child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
            print("child", child.pid)
            mark("child")
            time.sleep(100)
        wait_for("child-0")
        sys.exit(3)
        """
    )
    assert code == 3
    assert b"rank 0 was stopped" in err
    (pid,) = map(int, re.findall(rb"child (\d+)", out))
    wait_for_exit(pid)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(("thread", "leave"), [(False, "pass"), (True, "pass"), (False, "os.setsid()")])
def test_what_ranks_started_ends_with_a_launcher_that_is_killed(tmp_path, thread, leave, stopped):
    """Also where ranks ignore what can be ignored, are stopped, were started by a thread, or have left their guardian's group."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, subprocess, time\n"
        f"{leave}\n"
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


@pytest.fixture
def send(tmp_path):
    """Send signals to this process, the launcher: each as soon as all ranks have made the mark that goes with it."""
    threads = []

    def start(*signals: tuple[str, int], size: int = 2) -> None:
        def send_all() -> None:
            try:
                for mark, number in signals:
                    wait_for(*(tmp_path / f"{mark}-{rank}" for rank in range(size)))
                    os.kill(os.getpid(), number)
            except AssertionError:
                for _ in range(2):  # the launcher kills the ranks, and does not wait for what does not come
                    os.kill(os.getpid(), signal.SIGINT)
                raise

        threads.append(threading.Thread(target=send_all))
        threads[0].start()

    yield start
    for thread in threads:
        thread.join(100)


@FORKED_TOO
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
    code, _, err = launch("mark('ready'); stay()")
    assert code == 130
    assert b"SIGUSR1" not in err


def test_after_an_interrupt_what_ranks_still_write_is_shown(launch, send):
    send(("ready", signal.SIGINT))
    code, _, err = launch(
        """
        import atexit
        atexit.register(lambda: print("saved by", rank, file=sys.stderr))
        mark('ready')
        stay()
        """
    )
    assert code == 130
    assert err.count(b"] KeyboardInterrupt\n") == 2
    assert {b"[0] saved by 0", b"[1] saved by 1"} < set(err.splitlines())
    assert re.search(rb"\ngradwire run: stopped by SIGINT after \d+\.\d s\n$", err)


@FORKED_TOO
def test_an_interrupt_that_is_lost_in_an_import_does_not_take_the_grace(launch, send, tmp_path):
    """Rank 0 is interrupted in an import; rank 1 has lost the interrupt, as C code under `import torch` may."""
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(tmp_path / 'ready-0')!r}, 'w').close()\nwhile True: time.sleep(0.01)\n"
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
    assert re.fullmatch(rb"gradwire run: stopped by SIGINT after \d+\.\d s\n", err)  # and no traceback of an import


def test_a_signal_reaches_ranks_that_are_starting(launch, tmp_path, monkeypatch):
    """Rank 0 runs, and nobody has its process yet; rank 1 has not been started."""

    def start(*args, **options):
        process = subprocess.Popen(*args, **options)
        if options["env"]["RANK"] == "0":
            wait_for(tmp_path / "ready-0")
            os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(Supervisor, "_popen", staticmethod(start))
    code, out, err = launch(
        """
        def handler(number, frame):
            print("interrupted")
            sys.exit()
        signal.signal(signal.SIGINT, handler)
        mark("ready")
        stay()
        """,
        grace=1000,
    )
    assert out.count(b"[0] interrupted\n") == 1
    assert code in (0, 130), err  # rank 1 may get it before its handler is there


@FORKED_TOO
def test_a_second_interrupt_kills(launch, send):
    send(("ready", signal.SIGINT), ("ignoring", signal.SIGINT))
    code, _, err = launch(
        """
        signal.signal(signal.SIGINT, lambda number, frame: mark("ignoring"))
        mark("ready")
        stay()
        """,
        grace=1000,
    )
    assert (code, err.count(b"\n")) == (130, 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@FORKED_TOO
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


@FORKED_TOO
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


@FORKED_TOO
def test_it_runs_in_a_thread_too(launch):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(launch("print(rank)")))
    thread.start()
    thread.join(100)
    ((code, out, _),) = answers
    assert (code, sorted(out.split())) == (0, [b"0", b"1", b"[0]", b"[1]"])


def test_a_third_ctrl_c_counts_while_the_second_is_still_handled():
    """It used to be lost there, and the launcher then waited for a fourth."""
    supervisor = Supervisor(LaunchSpec(["true"], [{}]))
    sent = []

    class Rank:
        def send(self, number):
            sent.append(number)
            if number == signal.SIGKILL:
                supervisor._got_signal(signal.SIGINT, None)

    supervisor._ranks[0] = Rank()  # type: ignore[assignment]
    supervisor._got_signal(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        supervisor._got_signal(signal.SIGINT, None)
    assert sent == [signal.SIGINT, signal.SIGKILL]


@FORKED
def test_an_interrupt_while_modules_are_imported_for_all_ranks(launch, send, tmp_path):
    send(("ready", signal.SIGINT), size=1)
    module = """
    open(os.path.join(folder, "pid"), "w").write(str(os.getpid()))
    open(os.path.join(folder, "..", "ready-0"), "w").close()
    stay()
    """
    code, out, err = launch("print('never')", module=module, cold="", directory=tmp_path)
    assert (code, out) == (130, b"")
    assert re.fullmatch(rb"gradwire run: stopped by SIGINT after \d+\.\d s\n", err)
    wait_for_exit(int((tmp_path / "lib" / "pid").read_text()))
    saved = load(tmp_path)
    assert saved is not None
    assert (saved.signal, [one.status for one in saved.ranks]) == ("SIGINT", [-2, -2])
