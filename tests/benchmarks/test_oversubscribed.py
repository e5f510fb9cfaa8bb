"""`oversubscribed`: what is above its limit, whether others used the cores, and one real run."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.options import DEMO, STEP
from benchmarks.oversubscribed import OURS, THEIRS, busy_processes, cores_in_use, figures_of

TIMES = {"broadcast, 4 KiB": ((3.0, 3.0), (2.0, 2.0)), STEP: ((1.0, 1.1), (1.0, 1.0)), DEMO: ((1.05,), (1.0,))}


@pytest.mark.parametrize(
    ("busy", "others", "words"),
    [
        (0, 0.0, "1 of 3 take at most 1.1 x gloo's time, the demo 1 x; not broadcast, 4 KiB (1.50), demo (1.05)."),
        (2, 1.5, "The machine was busy otherwise (1.5 cores in use before): repeat this on an idle one."),
    ],
)
def test_what_is_above_its_limit_is_told_in_words(busy, others, words):
    slower = {name: tuple(tuple(2 * s for s in seconds) for seconds in pair) for name, pair in TIMES.items()}
    figures, line = figures_of([TIMES, slower], 8, busy, others)
    assert figures.title == f"8 ranks, {busy} busy processes"
    assert figures.rows[STEP]["ratio"].of_medians == pytest.approx(1.05)
    assert figures.rows[STEP][OURS].seconds == pytest.approx((2.0, 2.2))
    assert line.startswith(f"8 ranks, {busy} busy processes: ")
    assert line.endswith(words)


def test_idle_cores_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat = tmp_path / "stat"
    assert cores_in_use(0.0, stat) == 0.0
    stat.write_text("cpu  1 2 3 400 50 6 7 8 9\n")
    monkeypatch.setattr("time.sleep", lambda _: stat.write_text("cpu  1 2 3 430 70 6 7 8 9\n"))
    assert cores_in_use(1.0, stat) == pytest.approx(1.5)


def test_busy_processes_end():
    with busy_processes(1):
        assert cores_in_use(0.2) > 0.3


@pytest.mark.parametrize(
    ("argv", "message"), [(["--parts", "guess"], "unknown name 'guess'"), (["--busy", "-1"], "'-1' is not a whole")]
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        main(["oversubscribed", *argv])
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("warm_ranks")
def test_it_measures_collectives(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "found.json"
    argv = ["--ranks", "2", "--busy", "1", "--parts", "all_to_all,all_reduce", "--sizes", "4KiB", "--rounds", "2"]
    assert main(["oversubscribed", *argv, "--json", str(file)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    rows = json.loads(file.read_text())["figures"][0]["rows"]
    assert list(rows) == ["all_to_all, 4 KiB", "all_reduce, 4 KiB"]
    assert all(len(row[who]["rounds"]) == 2 for row in rows.values() for who in (OURS, THEIRS))
