"""The launcher's loop on real processes: what is shown of their output, and of the run."""

import os
import re

import pytest

from gradwire.errors import UsageError
from gradwire.launch import display
from gradwire.launch.shutdown import Ending
from gradwire.launch.supervise import LaunchSpec, Supervisor
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import load
from gradwire.observe.run_status import RunMonitor
from helpers.made_steps import made_steps, write_rings

FORKED_TOO = pytest.mark.parametrize("launch", ["started", "forked"], indirect=True)
FORKED = pytest.mark.parametrize("launch", ["forked"], indirect=True)


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
    monkeypatch.setenv("LINES", "25")  # workers of xdist may inherit others
    monkeypatch.setenv("COLUMNS", "80")
    sizes = []

    def picture(status, columns, lines):
        sizes.append((columns, lines))
        return f"step {status.step}"

    code, out, err = launch("print('done', file=sys.stderr)", monitor=monitor, picture=picture)
    assert code == 0
    assert sizes[0] == (79, 16)
    assert out == b""
    assert re.search(rb"done(\x1b\[0m)?\nstep 30\n", err)
    assert err.endswith(b"step 30\n")


def test_a_picture_stays_above_the_report_of_a_failure(launch, monitor, monkeypatch):
    monkeypatch.setattr(display, "find_terminal", lambda environ: 2)
    monkeypatch.setattr(display.os, "isatty", lambda fd: fd == 2)
    code, _, err = launch("sys.exit(3)", monitor=monitor, picture=lambda *_: "the picture")
    assert code == 3
    report = err.rpartition(b"the picture\n")[2]
    assert b"exit" in report
    assert b"\x1b[J" not in report  # nothing of it is erased


@FORKED_TOO
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


@FORKED_TOO
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
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        Supervisor(LaunchSpec([str(tmp_path / "nothing")], [{}, {}], grace=1)).supervise()
    assert os.listdir("/proc/self/fd") == before


@FORKED
def test_forks_are_children_of_the_launcher_and_repeat_what_was_written_before(launch):
    """And have random states of their own, and the arguments of a process that was started."""
    module = """
    import multiprocessing, random, tempfile
    print("imported")
    print("a warning", file=sys.stderr)
    """
    script = """
    import heavy, multiprocessing, random, tempfile
    command = open("/proc/self/cmdline").read().split("\\0")[:-1]
    key = multiprocessing.current_process().authkey.hex()
    print("is", os.getppid(), command == sys.orig_argv and command[-1] == __file__, os.environ["RANK"] == str(rank))
    print("random", random.random(), key, next(tempfile._get_candidate_names()), sep="\\n")
    """
    code, out, err = launch(script, module=module)
    lines = [line[4:] for line in out.splitlines()]
    assert (code, sorted(err.splitlines())) == (0, [b"[0] a warning", b"[1] a warning"])
    assert [lines.count(line) for line in (b"imported", b"is %d True True" % os.getpid(), b"random")] == [2, 2, 2]
    assert len(set(lines)) == 3 + 2 * 3


@FORKED
@pytest.mark.parametrize(
    ("module", "cold"),
    [
        (
            "import threading; threading.Thread(target=time.sleep, args=[100], daemon=True).start()",
            "importing it starts",
        ),
        ("raise ValueError('broken')", "importing it fails: ValueError: broken"),
        ("os._exit(3)", "the process that imports torch has ended"),
        ("sys.settrace(lambda *_: None)", "a debugger"),
        ("sys.modules['sitecustomize'] = sys.modules['heavy']", "/"),
        ("import sched; open(os.path.join(folder, '..', 'sched.py'), 'w')", "/"),  # would come before Python's
    ],
)
def test_ranks_are_started_where_they_cannot_be_forked(module, cold, launch, tmp_path):
    code, out, err = launch("print('hello')", module=module, cold=cold, directory=tmp_path)
    assert (code, out.count(b"hello"), err) == (0, 2, b"")
    saved = load(tmp_path)
    assert saved is not None
    assert saved.cold.startswith(cold)


def test_hangs_are_reported_also_when_a_rank_has_ended_without_an_error():
    """Others may go on for as long as they like, and hang; those that wait for one that failed are ended soon."""
    supervisor = Supervisor(LaunchSpec(["true"], [{}, {}, {}], watch=object()))  # type: ignore[arg-type]
    supervisor._shutdown.ended(Ending(0, 0, 1.0))
    assert supervisor._watch_for_hangs is not None
    supervisor._shutdown.ended(Ending(1, 1, 2.0))
    assert supervisor._watch_for_hangs is None
