"""`parity`: the rule on known losses, what it refuses, and a small run."""

from __future__ import annotations

import json
import math
from io import StringIO

import pytest
from rich.console import Console

from benchmarks import parity
from benchmarks.__main__ import main
from benchmarks.learners import hook_of, train
from benchmarks.parity import Verdict, compare, spread
from benchmarks.parity_rank import Score


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


DENSE = [1.00, 1.02, 0.98]  # a standard deviation of 0.02, so 0.0327 are allowed


def test_a_run_that_diverged_is_worse():
    found = compare([1.0, float("nan"), 1.0], [1.0, 1.1, 0.9])
    assert found.verdict is Verdict.WORSE
    assert math.isnan(found.spread)


def test_where_dense_averaging_diverged_nothing_can_be_reported(monkeypatch, capsys):
    scores = {name: [Score(float("nan"), 0.0)] * 2 for name in ("mean", "bf16")}
    monkeypatch.setattr(parity, "run_world", lambda *args, **settings: [scores])
    assert main(["parity", "--task", "text", "--hooks", "bf16", "--seeds", "2"]) == 2
    assert "dense averaging itself has diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([1.00, 1.02, 0.98], Verdict.NOISE),
        ([1.03, 1.05, 1.01], Verdict.NOISE),
        ([1.04, 1.06, 1.02], Verdict.WORSE),
        ([0.5, 0.5, 0.5], Verdict.NOISE),  # better is not worse
        ([1.5, 0.9, 0.9], Verdict.WORSE),  # its own spread does not help it
    ],
)
def test_within_noise_is_a_matter_of_the_dense_runs_spread(losses, verdict):
    assert compare(losses, DENSE).verdict is verdict


def test_where_the_dense_runs_hardly_differ_a_hundredth_is_told_apart():
    dense = [1.0, 1.0001, 0.9999]
    assert compare([1.005] * 3, dense).verdict is Verdict.SLIGHT
    assert compare([1.02] * 3, dense).verdict is Verdict.WORSE


def test_differences_are_taken_seed_by_seed():
    found = compare([1.1, 2.2], [1.0, 2.0])
    assert found.percent == pytest.approx(10.0)
    assert found.difference == pytest.approx(0.15)
    assert spread([3.0]) == 0.0


def test_the_table_fits_80_columns_and_the_words_say_the_same():
    scores = {
        "mean": [Score(loss, 0.9) for loss in DENSE],
        "bf16": [Score(loss, 0.9) for loss in DENSE],
        "top_k": [Score(loss + 0.5, 0.8) for loss in DENSE],
    }
    found = {name: compare([s.loss for s in of], DENSE) for name, of in scores.items()}
    out = StringIO()
    figures = parity.figures_of(scores, found)
    Console(file=out, width=80).print(figures.table())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "+0.5000" in out.getvalue()
    assert parity.lines_of(found) == ["Within noise: bf16.", "Worse: top_k."]
    assert figures.rows["top_k"]["verdict"] == "worse"
    assert figures.rows["mean"]["losses"] == DENSE


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds", "1"], "argument --seeds: '1' is not a whole number of 2 or more"),
        (["--task", "chess"], "argument --task: invalid choice: 'chess'"),
        (["--hooks", "magic"], "argument --hooks: unknown name 'magic'"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["parity", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_replicas_must_not_be_apart_at_the_end(capsys):
    assert main(["parity", "--steps", "70", "--hooks", "diloco"]) == 2
    assert "replicas would differ at the end: they are averaged with diloco every 50 steps" in capsys.readouterr().err


def test_without_scikit_learn_there_are_no_digits(monkeypatch, capsys):
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    assert main(["parity"]) == 2
    assert "scikit-learn is not installed. pip install gradwire[lab], or --task text." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "over"),
    [
        pytest.param("digits", "replicas", marks=pytest.mark.acceptance),  # scikit-learn is imported by both ranks
        ("text", "replicas"),
        pytest.param("text-short", "replicas", marks=pytest.mark.acceptance),
        ("text", "shards"),
    ],
)
@pytest.mark.usefixtures("warm_ranks")
def test_a_small_run(task, over, tmp_path, capsys):
    if task == "digits":
        pytest.importorskip("sklearn")
    file = tmp_path / "parity.json"
    argv = ["parity", "--task", task, "--ranks", "2", "--seeds", "2", "--steps", "6", "--over", over]
    argv += ["--hooks", "bf16" if over == "replicas" else "bf16,diloco"]
    assert main([*argv, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["figures"][0]["rows"]
    assert list(rows) == ["mean", "bf16"]
    dense = rows["mean"]["losses"]
    assert len(set(dense)) == 2
    assert rows["bf16"]["losses"] == pytest.approx(dense, rel=0.02)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_simulated_learners_of_sparse_loco_send_33_times_less_than_those_of_diloco():
    (dense, bytes_dense), (sparse, bytes_sparse) = (
        train(hook_of(name, 0.7), 0, 30) for name in ("diloco", "sparse_loco")
    )
    assert dense != sparse
    assert max(dense, sparse) < math.log(96)  # both have learned something
    assert bytes_dense / bytes_sparse >= 33
    payload = bytes_dense * 8 / 14, bytes_sparse / 7  # of an all-reduce and of an all-gather
    assert payload[0] / payload[1] >= 130
