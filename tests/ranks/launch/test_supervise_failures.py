"""The launcher's loop when ranks fail: how the others end, and what is reported."""

import os
import re
import time

import pytest

from gradwire.launch import shutdown
from gradwire.observe.rings.run_outcome import load
from gradwire.runtime import rank_error

FORKED_TOO = pytest.mark.parametrize("launch", ["started", "forked"], indirect=True)


@FORKED_TOO
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
    start = lines.index("gradwire run: traceback of rank 1:")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-3:-1] == ["ValueError: the loss is a teapot", ""]
    assert lines.count("[1] ValueError: the loss is a teapot") == 1  # where it was written


RAISE = "from gradwire.errors import *\n"


@pytest.fixture
def patience(monkeypatch):
    """However slow the machine, a rank comes to its end soon enough to count as the cause of the others' failures."""
    for module in (shutdown, rank_error):
        monkeypatch.setattr(module, "NEAR", 60.0)


def test_the_cause_is_shown_last_and_standard_error_as_it_is(launch, tmp_path, patience):
    script = (
        RAISE
        + """
if rank != 2:
    mark("ended")
    raise PeerLost(f"rank 2 is lost, says {rank}", rank=2)
for other in (0, 1):
    wait_for(f"ended-{other}")
raise KeyError("cause")
"""
    )
    code, _, err = launch(script, 3, log_dir=tmp_path / "logs")
    lines = err.decode().splitlines()
    assert code == 1
    assert err.count(b"Traceback") == 4  # each where it was written, and one once more at the end
    assert {f"[{r}] gradwire.errors.PeerLost: rank 2 is lost, says {r}" for r in (0, 1)} <= set(lines)
    assert lines[-3:-1] == ["KeyError: 'cause'", ""]
    assert b"Traceback" in (tmp_path / "logs" / "rank-0.log").read_bytes()


def test_a_time_out_is_about_the_missing_rank(launch):
    code, _, err = launch(
        RAISE
        + """
mark("begun")
if rank == 2:
    time.sleep(100)
raise CollectiveTimeout("not finished after 4 s", missing=[2])
""",
        3,
    )
    assert code == 1
    assert re.search(
        rb"\ngradwire run: rank 2 was missing \(CollectiveTimeout on rank [01], exit code 1, after [\d.]+ s\); rank 2 was stopped; "
        rb"rank [01] failed too\n$",
        err,
    ), err


def test_a_disagreement_is_about_those_who_disagree(launch):
    code, _, err = launch(RAISE + 'raise LayoutError("replicating a model", ranks=[2])', 3)
    assert code == 1
    assert re.search(rb"\ngradwire run: rank 2 has other parameters \(LayoutError on rank \d, exit code 1", err), err


def test_without_an_exception_the_last_lines_are_shown(launch):
    code, _, err = launch(
        """
        if rank == 1:
            for number in range(50):
                os.write(2, b"line %d\\n" % number)
            os._exit(4)
        time.sleep(100)
        """
    )
    lines = err.decode().splitlines()
    start = lines.index("gradwire run: last output of rank 1:")
    assert lines[start + 1 : -2] == [f"line {number}" for number in range(30, 50)]
    assert code == 4


@FORKED_TOO
def test_a_rank_that_ignores_sigterm_is_killed(launch):
    began = time.monotonic()
    code, _, err = launch(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mark("ignoring")
            time.sleep(100)
        wait_for("ignoring-0")
        sys.exit(7)
        """,
        grace=0.5,
    )
    assert code == 7
    assert 0.5 <= time.monotonic() - began < 60
    assert b"rank 1 failed first (exit code 7" in err
    assert b"rank 0 was stopped" in err


@FORKED_TOO
def test_a_rank_that_is_killed_is_named_with_its_signal(launch):
    code, _, err = launch("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(100)")
    assert code == 137
    assert re.search(rb"rank 1 failed first \(killed by SIGKILL, after \d+\.\d s\); rank 0 was stopped\n$", err)


def test_the_cause_is_shown_though_its_consequence_came_first(launch, patience):
    code, _, err = launch(
        """
        from gradwire.errors import PeerLost
        if rank == 0:
            open(os.path.join(folder, "pid"), "w").write(str(os.getpid()))
            mark("begun")
            raise PeerLost("rank 1 is lost", rank=1)
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


def test_ranks_that_raise_the_same_failed_too(launch, tmp_path):
    """Ranks agree on many errors; those that are slower to end were told to, but would have ended anyway."""
    script = (
        RAISE
        + """
if rank:
    signal.signal(signal.SIGTERM, lambda *_: mark("told"))
    if rank == 1:
        mark("ready")
        wait_for("told-1")
    else:
        wait_for("ready-1")
        raise NonFiniteGradient("", rank=2, parameter="a")
if rank == 0:
    time.sleep(100)
raise NonFiniteGradient("", rank=2, parameter="a")
"""
    )
    code, _, err = launch(script, 3, directory=tmp_path)
    last = err.decode().splitlines()[-1]
    assert "on rank 2 the gradient of a is not finite (NonFiniteGradient on rank 2, exit code 1, after " in last
    assert last.endswith("); rank 0 was stopped; rank 1 failed too")
    saved = load(tmp_path)
    assert saved is not None
    assert f"gradwire run: {saved.text}" == last
    assert (code, saved.failed, saved.signal) == (1, 2, None)
    assert {one.rank: (one.status, one.stopped) for one in saved.ranks} == {0: (-15, True), 1: (1, True), 2: (1, False)}


def test_a_run_that_ends_well_is_saved_too(launch, tmp_path):
    assert launch("pass", 2, directory=tmp_path)[0] == 0
    saved = load(tmp_path)
    assert saved is not None
    assert (saved.text, saved.failed, [one.status for one in saved.ranks]) == ("", None, [0, 0])


def test_a_full_disk_behind_the_output_is_reported_and_is_not_sigpipe(launch, capfdbinary):
    saved = os.dup(1)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), 1)
    try:
        code, _, err = launch("print('hello')\ntime.sleep(100 * rank)")
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert code == 1
    assert err == b"gradwire run: writing to standard output failed: No space left on device\n"
