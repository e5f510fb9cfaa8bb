"""`gradwire demo` from end to end, small."""

from __future__ import annotations

import itertools
import os
import re
import signal
from unittest.mock import Mock

import pytest

from gradwire.cli import main
from gradwire.cli.demo import train
from gradwire.testing import kinds
from gradwire.testing.mpi import missing
from helpers.warm_python import FORKED_RANKS

NO_MPI = pytest.mark.skipif(missing() is not None, reason=str(missing()))
KINDS = [pytest.param(kind, marks=NO_MPI if kind == "mpi" else ()) for kind in kinds()]
TINY = ["demo", "--size", "tiny", "--batch-size", "2", "--no-compare"]


def run(capfd, *argv: str) -> tuple[int, list[str]]:
    code = main([*TINY, *argv])
    return code, capfd.readouterr().out.splitlines()


TWICE = """
import os, sys
from gradwire.cli import main

os.setsid()
options = ["demo", "--size", "tiny", "--batch-size", "2", "--no-compare", "--ranks", "2", "--kind", sys.argv[1], "--steps"]
sys.exit(main([*options, "3"]) or main([*options, "1000000"]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_end_equal_and_ctrl_c_ends_them_without_a_traceback(kind, warm_python):
    """Two demos in one process, to start ranks once: the first trains to the end, the second is interrupted.

    A process of its own: warm rank processes write to the terminal they were started on, not to this test's. And a session of its
    own, to which the signal goes as a terminal sends it: to every process of the foreground.
    """
    demo = warm_python.talk(FORKED_RANKS + TWICE, kind)
    try:
        lines = list(itertools.takewhile(lambda line: not re.match(r"step +1/1000000 ", line), demo.stdout))
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=300)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode == 130
    assert errors.strip() == "gradwire: interrupted"
    end = next(i for i, line in enumerate(lines) if line.startswith("All 2 replicas are bitwise equal (digest "))
    first = lines[: end + 1]
    assert lines[end + 1].startswith("starting 2 ranks")  # the second demo: nothing comes after that line
    assert [line.split()[1] for line in first if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    block = "".join(first)
    assert f"2, group kind {kind}" in block
    for name in ("model", "steps", "loss", "validation loss", "for comparison"):
        assert re.search(rf"^{name} +\S", block, re.M), name
    assert "  def " in block  # what it has learnt to write begins with the prompt


def test_ranks_that_do_not_average_are_found_out(capfd, monkeypatch):
    monkeypatch.setattr(train, "replicate", lambda model, group: Mock())
    code, lines = run(capfd, "--ranks", "3", "--steps", "2", "--kind", "threads")
    assert code == 1
    assert lines[-1] == "The replicas are NOT bitwise equal: ranks [1, 2] differ from rank 0."


def test_one_rank_is_a_world(capfd):
    code, lines = run(capfd, "--ranks", "1", "--steps", "1", "--kind", "threads")
    assert code == 0
    assert lines[-1].startswith("The only replica is bitwise equal to itself (digest ")


def test_a_seed_fixes_every_bit_and_another_does_not(capfd):
    last = [run(capfd, "--ranks", "2", "--steps", "2", "--kind", "threads", "--seed", s)[1][-1] for s in "001"]
    assert last[0] == last[1] != last[2]


def test_it_learns_more_than_how_frequent_characters_are(capfd):
    _, lines = run(capfd, "--ranks", "2", "--steps", "300", "--kind", "threads", "--batch-size", "8")
    facts = {
        name: float(v) for name, v in re.findall(r"^(validation loss|for comparison) +([\d.]+)", "\n".join(lines), re.M)
    }
    assert facts["validation loss"] < facts["for comparison"] - 0.2


@pytest.mark.parametrize("where", ["none/demo.svg", "."])
def test_a_picture_that_cannot_be_written_is_refused_before_training(where, capfd, tmp_path):
    assert main([*TINY, "--svg", str(tmp_path / where)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("gradwire: UsageError: gradwire demo --svg ")


def test_a_python_without_source_is_one_clear_error(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert main([*TINY, "--ranks", "2", "--kind", "threads"]) == 2
    error = capfd.readouterr().err
    assert f"gradwire: UsageError: reading the demo's text from {tmp_path}: found 0 Python source files" in error
    assert "Traceback" not in error
