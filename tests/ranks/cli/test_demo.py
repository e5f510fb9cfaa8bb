"""The comparison of the demo: every way to train is measured, and the table says which is faster."""

import io
import itertools
import os
import re
import signal
from unittest import mock

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.cli.demo import compare
from gradwire.cli.demo.compare import VARIANTS, Times, table
from gradwire.observe.rings.runs import runs_directory
from gradwire.testing.mpi import missing
from helpers.warm_python import FORKED_RANKS


def shown(times: list[Times], **machine: float) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(100.0, times, **{"load": 2.0, "cores": 2, **machine}))
    return console.file.getvalue().splitlines()


def test_factors_are_relative_to_torch_on_the_same_link():
    nbytes = [0.0, 0.0, 466e3, 233e3, 466e3, 118e3]
    lines = shown([([0.010, 0.008, 0.040, 0.032, 0.039, 0.016], nbytes), ([0.007] * 6, nbytes)])
    assert all(len(line) <= 80 for line in lines)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["on this machine", "", "", ""],
        ["torch's DDP over gloo", "10.0", "", "1.00x"],
        ["gradwire over shared memory", "8.0", "", "1.25x"],
        ["over 100 Mbit/s", "", "", ""],
        ["torch's DDP", "40.0", "466", "1.00x"],
        ["torch's DDP, its fp16 hook", "32.0", "233", "1.25x"],
        ["gradwire", "39.0", "466", "1.03x"],
        ["gradwire, 8 bits, error feedback", "16.0", "118", "2.50x"],
    ]


def test_a_busy_machine_and_too_few_cores_are_named():
    two = [([1.0] * 6, [0.0] * 6)] * 2
    assert shown(two)[-1].startswith("Median of 40 steps")
    assert shown(two, load=3.5)[-1].startswith("The machine was busy (load 3.5 on 2 cores)")
    assert shown(two * 2)[-1].startswith("4 ranks share 2 cores: times depend on the scheduler")


def test_the_demo_trains_compares_and_writes_a_page(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    options = ["--size", "tiny", "--batch-size", "1", "--steps", "3", "--ranks", "2", "--mbit", "10000"]
    picture = tmp_path / "demo.svg"
    measure = compare.measure

    def one_round(*args):
        with mock.patch.object(compare, "_ROUNDS", 1):
            return measure(*args)

    monkeypatch.setattr(compare, "measure", one_round)
    assert main(["demo", *options, "--svg", str(picture)]) == 0
    out = capfd.readouterr().out
    for name in (*(one.name for one in VARIANTS), "on this machine", "over 10000 Mbit/s"):
        assert name in out
    *_, page, conclusion = out.splitlines()
    run = (runs_directory({"XDG_STATE_HOME": str(tmp_path)}) / "latest").resolve()
    assert page.endswith(f": {run / 'report.html'}")
    assert "2 ranks" in (run / "report.html").read_text()
    drawn = picture.read_text().replace("&#160;", " ")
    assert all(words in drawn for words in ("validation loss", "over 10000 Mbit/s", "bitwise equal (digest "))
    assert conclusion.startswith("All 2 replicas are bitwise equal")


def test_a_directory_that_cannot_be_made_costs_only_the_page(capfd, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    options = ["--size", "tiny", "--batch-size", "1", "--steps", "1", "--ranks", "1", "--kind", "gloo", "--no-compare"]
    assert main(["demo", *options]) == 0
    out = capfd.readouterr().out
    assert "report.html" not in out
    assert out.splitlines()[-1].startswith("The only replica")


def test_bad_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--mbit", "0"])
    assert stop.value.code == 2
    assert "greater than 0" in capsys.readouterr().err


NO_MPI = pytest.mark.skipif(missing() is not None, reason=str(missing()))


KINDS = ["threads", "shared_memory", pytest.param("mpi", marks=NO_MPI)]
"""One for each way of starting ranks: threads, processes of a pool, mpirun."""


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
