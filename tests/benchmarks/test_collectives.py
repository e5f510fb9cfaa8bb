"""`collectives`: its options, tables, ratios and plot on known figures, and one real run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
from contextlib import ExitStack
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch._C._distributed_c10d import PrefixStore

from benchmarks import collectives, mpi
from benchmarks.__main__ import main
from benchmarks.collective_contenders import (
    CONTENDERS,
    GLOO,
    HEAP,
    MEMCPY,
    MPI,
    OPERATIONS,
    ORDINARY,
    Buffers,
    Contender,
)
from benchmarks.collectives import Sweep, lines_of, ratios_of, times_of
from benchmarks.result import Result
from benchmarks.timing import Series
from benchmarks.world import run_world
from gradwire.errors import InternalError

BUCKET = 25 << 20
COMMAND = ["collectives", "--ranks", "2"]
MACHINE = {"cpu": "an abacus, 2 usable of 2 cores", "software": "gradwire 0.1.0, torch 2.13.0, Python 3.11.7"}


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def fake(ranks: int = 2, *, without: str = "") -> Sweep:
    """Times in microseconds at two sizes, with a spread; the second round is twice as slow for everybody."""
    times = {
        4: {HEAP: 20.0, ORDINARY: 25.0, GLOO: 500.0, MPI: 2.0, MEMCPY: 1.0},
        BUCKET: {HEAP: 4000.0, ORDINARY: 8000.0, GLOO: 24000.0, MPI: 6000.0, MEMCPY: 5000.0},
    }
    names = tuple(name for name in CONTENDERS if name != without)
    series = {
        (name, nbytes): Series(name, tuple(row[name] * 1e-6 * slow for slow in (1.0, 2.0, 1.0)))
        for nbytes, row in times.items()
        for name in names
    }
    return Sweep(ranks, tuple(times), names, series, dict.fromkeys(series, 7))


def _result(*sweeps: Sweep) -> Result:
    figures = [one for sweep in sweeps for one in (times_of(sweep, "all_reduce"), ratios_of(sweep))]
    return Result("collectives", MACHINE, {"rounds": "3"}, figures, lines_of(sweeps))


def shown(*sweeps: Sweep) -> list[str]:
    out = StringIO()
    _result(*sweeps).show(Console(file=out, width=80))
    return out.getvalue().splitlines()


def test_times_and_ratios_stand_in_tables_of_80_columns():
    lines = shown(fake(), fake(4))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line and line.rstrip().endswith("…") for line in lines)  # nothing was cut off
    text = "\n".join(lines)
    assert re.search(r"25 MiB │ +4\.00 ms │ +8\.00 ms │ +24\.0 ms │ +6\.00 ms │ +5\.00 ms │", text)
    assert re.search(r"│ +4\.00…6\.00 │ +8\.00…12\.0 │ +24\.0…36\.0 │", text)
    assert re.search(r"25 MiB │ +6\.00 │ +1\.50 │ +0\.80 │ +3\.00 │ +0\.75 │", text)
    assert "all_reduce, 4 ranks" in text


def test_the_ratios_at_the_size_of_a_bucket_are_told_in_words():
    words = " ".join(lines_of([fake()]))
    assert words.startswith(
        "25 MiB, 2 ranks: gloo takes 6.00 times as long as heap; Open MPI takes 1.50 times as long as heap;"
    )
    assert "heap takes 0.80 times as long as memcpy" in words
    small = dataclasses.replace(fake(), sizes=(4,))
    assert lines_of([small]) == []


def test_without_open_mpi_its_columns_are_not_there():
    text = "\n".join(shown(fake(without=MPI)))
    assert "MPI" not in text
    assert re.search(r"25 MiB │ +6\.00 │ +0\.80 │ +3\.00 │", text)


def test_json_has_every_round_and_both_ratios():
    times, ratios = json.loads(json.dumps(_result(fake()).as_json()))["figures"]
    row = times["rows"]["25 MiB"]
    assert row["bytes"] == BUCKET
    assert row[GLOO]["rounds"] == pytest.approx([0.024, 0.048, 0.024])
    assert row["calls_per_turn"][GLOO] == 7
    assert ratios["rows"]["25 MiB"]["gloo / heap"]["of_medians"] == pytest.approx(6.0)
    assert ratios["rows"]["25 MiB"]["gloo / heap"]["median_of_rounds"] == pytest.approx(6.0)


# -- options -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "1"], "argument --ranks: '1' is not a whole number of 2 or more"),
        (["--sizes", "4,many"], "argument --sizes: 'many' is not a number of bytes"),
        (["--sizes", "0"], "argument --sizes: '0' is not a number of bytes"),
        (["--op", "guess"], "argument --op: invalid choice: 'guess'"),
        (["--rounds", "1"], "argument --rounds: '1' is not a whole number of 2 or more"),
        (["--mpi", "maybe"], "argument --mpi: invalid choice: 'maybe'"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["collectives", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes", "4,6"], "6 bytes are not a whole number of float32 elements. Use multiples of 4."),
        (["--plot", "times.txt"], "--plot times.txt: unsupported file type. Use a name that ends in .png, .svg, .pdf."),
        (["--plot", "nowhere/times.png"], "--plot nowhere/times.png: there is no folder nowhere. Create it first."),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(argv, message, capsys):
    assert main([*COMMAND, *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*COMMAND, "--plot", str(tmp_path / "times.png")]) == 2
    assert "matplotlib is not installed. pip install gradwire[plot], or omit --plot." in capsys.readouterr().err


def test_tensors_that_are_cut_into_parts_are_rounded_up():
    assert collectives.rounded_sizes([4, 20, BUCKET], "all_gather", [2, 3]) == (24, 26214408)
    assert collectives.rounded_sizes([4, 20], "all_reduce", [2, 3]) == (4, 20)


# -- the plot ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize(("kind", "sweeps"), [("svg", [fake()]), ("png", [fake(), fake(4, without=MPI)])])
def test_a_plot_is_drawn(tmp_path, kind, sweeps):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"times.{kind}"
    collectives.draw(argparse.Namespace(plot=file, op="all_reduce"), sweeps, MACHINE)
    assert file.stat().st_size > 10_000


# -- for real ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_mpi():
    return mpi.find()


@pytest.mark.acceptance
def test_every_contender_computes_every_operation(open_mpi):
    launcher = open_mpi if isinstance(open_mpi, mpi.OpenMPI) else ()
    names = [name for name in CONTENDERS if name != MPI or launcher]

    def task(context):
        done = 0
        for op in OPERATIONS:
            place = dataclasses.replace(context, store=PrefixStore(op, context.store))
            with ExitStack() as stack:
                for name in names:
                    contender = CONTENDERS[name](place, op, 4 * context.size, stack)
                    for numel in (context.size, 4 * context.size):
                        contender.check(name, numel, context.rank)
                        done += 1
                context.barrier.wait()
        return done

    assert run_world(task, 2, name="test", on=launcher, timeout=60.0) == [10 * len(names)] * 2


def test_a_wrong_result_is_found_out():
    lazy = Contender(
        "all_reduce", Buffers.make("all_reduce", 4, 2, torch.empty), lambda b: {"all_reduce": lambda: None}, 2
    )
    with pytest.raises(InternalError, match="all_reduce of lazy on 4 elements has a wrong result"):
        lazy.check("lazy", 4, rank=0)


@pytest.mark.usefixtures("fonts")
def test_it_measures_all_contenders(capsys, tmp_path, open_mpi):
    file = tmp_path / "collectives.json"
    argv = [*COMMAND, "--sizes", "4,4096", "--rounds", "2", "--timeout", "60", "--json", str(file)]
    if importlib.util.find_spec("matplotlib") is not None:
        argv += ["--plot", str(tmp_path / "times.png")]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    here = isinstance(open_mpi, mpi.OpenMPI)
    assert (f"{open_mpi.version} through mpi4py" if here else f"Open MPI no column: {open_mpi}") in text
    data = json.loads(file.read_text())
    rows = data["figures"][0]["rows"].values()
    assert [row["bytes"] for row in rows] == [4, 4096]
    for row in rows:
        names = [name for name in CONTENDERS if name != MPI or here]
        assert list(row) == [*names, "bytes", "calls_per_turn"]
        assert all(len(row[name]["rounds"]) == 2 and min(row[name]["rounds"]) > 0 for name in names)


def test_open_mpi_can_be_left_out():
    args = collectives._settings("broadcast", _race(), "left out by --mpi none", [2])
    assert args["Open MPI"] == "no column: left out by --mpi none"
    assert args["operation"] == "broadcast, float32, one thread per rank, 4 B to 25 MiB"


def test_with_more_ranks_than_cores_it_is_said_that_open_mpi_yields(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    launcher = mpi.OpenMPI("Open MPI v5.0.11")
    for ranks, yields in (([2], False), ([2, 4], True)):
        words = collectives._settings("all_reduce", _race(), launcher, ranks)["Open MPI"]
        assert ("yields when idle" in words) == yields


def _race() -> collectives.Race:
    return collectives.Race("all_reduce", (4, BUCKET), 3, 0.015, tuple(CONTENDERS))


def test_more_ranks_than_cores_is_said_at_once_and_progress_is_seen_without_a_terminal(monkeypatch, capsys):
    printed = []

    def run_world(*args, on_report, **options):
        printed.append(capsys.readouterr().err)
        for done in range(1, 21):
            on_report(done)
        raise InternalError("far enough")

    monkeypatch.setattr(collectives, "run_world", run_world)
    assert main(["collectives", "--ranks", "9999", "--mpi", "none"]) == 1
    assert re.match(r"benchmarks: 9999 ranks share \d+ cores", printed[0])
    assert printed[0].endswith("9999 ranks: starting\n")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:10] == [f"9999 ranks: {done} of 20 rounds" for done in range(2, 21, 2)]
