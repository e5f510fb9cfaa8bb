"""`training`: figures on known times, the check that all train the same, and one real run."""

from __future__ import annotations

import copy
import json
import re
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from benchmarks import peers, training
from benchmarks.__main__ import main
from benchmarks.models import GPT2, SIZES
from benchmarks.timing import Series
from benchmarks.training_rank import QUIET, check_same
from gradwire.errors import InternalError
from gradwire.testing import run_ranks

DDPS = [kind + flags for flags in ("", peers.VIEWS) for kind in (peers.TORCH, peers.OURS)]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def fake() -> dict[str, Series]:
    """Milliseconds: bare 100, under no_sync 105, torch 150, gradwire 120; with views 10 less. A round is twice as slow."""
    times = {peers.BARE: 100.0}
    for flags, less in (("", 0.0), (peers.VIEWS, 10.0)):
        times[peers.TORCH + flags], times[peers.OURS + flags] = 150.0 - less, 120.0 - less
        times |= {kind + flags + QUIET: 105.0 for kind in (peers.TORCH, peers.OURS)}
    return {name: Series(name, (ms / 1e3, 2 * ms / 1e3, ms / 1e3)) for name, ms in times.items()}


def test_what_is_exposed_is_the_step_less_that_under_no_sync():
    rows = training.figures_of(fake())[0].rows
    assert list(rows) == [peers.BARE, *DDPS]
    assert rows[peers.TORCH]["exposed"].median == pytest.approx(0.045)
    assert rows[peers.OURS]["exposed"].seconds == pytest.approx((0.015, 0.03, 0.015))
    assert rows[peers.OURS]["ratio_to_torch"].of_medians == pytest.approx(0.8)
    assert rows[peers.OURS + peers.VIEWS]["ratio_to_torch"].median_of_rounds == pytest.approx(110 / 140)
    assert set(rows[peers.BARE]) == {"name", "step"}
    assert "ratio_to_torch" not in rows[peers.TORCH]


def test_the_table_fits_80_columns_and_the_words_say_the_same():
    figures, words = training.figures_of(fake())
    out = StringIO()
    Console(file=out, width=80).print(figures.table())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"│ gradwire DDP, shm, views +│ +110\.0 │ +105\.0 │ +5\.0 │ +0\.786 │", out.getvalue())
    assert words[0] == (
        "With default flags gradwire's step takes 0.80 of torch's; exposed communication takes 15.0 ms of it, "
        "torch's 45.0 ms."
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "1"], "argument --ranks: '1' is not a whole number of 2 or more"),
        (["--size", "huge"], "argument --size: invalid choice: 'huge'"),
        (["--steps", "3"], "argument --steps: '3' is not a whole number of 4 or more"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["training", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_a_sequence_that_is_too_long_for_the_model_is_refused(capsys):
    assert main(["training", "--size", "tiny", "--tokens", "17"]) != 0
    assert "--tokens 17: the model's context is 16 tokens" in capsys.readouterr().err


def test_the_model_has_about_ten_million_elements():
    with torch.device("meta"):
        model = GPT2(SIZES["10m"])
    assert sum(p.numel() for p in model.parameters()) == 10_040_320


def _moved(model: nn.Module, by: float) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(by)
    return other


def test_models_that_trained_the_same_pass():
    start = nn.Linear(3, 3)

    def rank(group):
        check_same(start, {"a": _moved(start, 0.1), "b": _moved(start, 0.1 + 1e-6)}, group)

    run_ranks(rank, 2)


def test_a_model_that_went_elsewhere_is_found_out():
    start = nn.Linear(3, 3)

    def rank(group):
        check_same(start, {"a": _moved(start, 0.1), "b": _moved(start, 0.11)}, group)

    with pytest.raises(InternalError, match="b has other parameters than a after the same number of steps"):
        run_ranks(rank, 2)


def test_replicas_that_differ_are_found_out():
    start = nn.Linear(3, 3)

    def rank(group):
        check_same(start, {"a": _moved(start, 0.1 + 1e-5 * group.rank)}, group)

    with pytest.raises(InternalError, match="rank 1's parameters of a differ from rank 0's"):
        run_ranks(rank, 2)


@pytest.mark.usefixtures("warm_ranks")
def test_it_trains_by_all_means(capsys, tmp_path):
    file = tmp_path / "training.json"
    assert (
        main(["training", "--size", "tiny", "--tokens", "8", "--steps", "4", "--timeout", "60", "--json", str(file)])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "transformer, 29,216 elements in 28 parameters, float32" in text
    assert "2 ranks, one thread each, batch 1 x 8 tokens per rank" in text
    assert "zero_grad(), forward, backward, SGD" in text
    data = json.loads(file.read_text())
    rows = data["figures"][0]["rows"]
    assert list(rows) == [peers.BARE, *DDPS]
    for name in DDPS:
        assert len(rows[name]["step"]["rounds"]) == 2
        assert min(rows[name]["no_sync"]["rounds"]) > 0
