"""`gradwire bench stragglers`: one short real run, and what counts as a miss."""

from __future__ import annotations

import json

import pytest

from gradwire.cli import main
from gradwire.cli.bench import stragglers
from gradwire.cli.bench.sleeping_ranks import Delay
from gradwire.cli.bench.stragglers import Outcome
from gradwire.observe.stragglers.detect import SlowPhase, Straggler
from gradwire.observe.stragglers.steps import Phase

DELAY = Delay(3, Phase.DATA, 0.2)


def found(rank=3, phase=Phase.DATA, without=0.181):
    return (Straggler(rank, (SlowPhase(phase, 0.06, 0.03),), 1, 20, 20, 18, 0.24, without),)


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        (Outcome(None, (), 0.18), True),
        (Outcome(None, found(), 0.18), False),
        (Outcome(DELAY, found(), 0.24, (0.18, 0.182)), True),
        (Outcome(DELAY, (), 0.24, (0.18, 0.182)), False),
        (Outcome(DELAY, found(rank=2), 0.24, (0.18, 0.182)), False),
        (Outcome(DELAY, found(phase=Phase.FORWARD), 0.24, (0.18, 0.182)), False),
        (Outcome(DELAY, (*found(), *found(rank=2)), 0.24, (0.18, 0.182)), False),
        (Outcome(DELAY, found(without=0.16), 0.24, (0.18, 0.181)), False),
        (Outcome(DELAY, (), 0.24, (0.18, 0.2)), False),
    ],
)
def test_what_is_a_miss(outcome, passed):
    assert outcome.passed is passed
    assert len(stragglers._lines([outcome])) == 1 + (not passed) + (not outcome.is_comparable)


def test_each_delayed_run_is_compared_with_the_healthy_ones_around_it():
    outcomes = [Outcome(None, (), 0.1), Outcome(DELAY, (), 0.3), Outcome(None, (), 0.2)]
    compared = stragglers._compared(outcomes)
    assert compared[1].healthy == (0.1, 0.2)
    assert not compared[1].is_comparable  # the machine was busy
    assert compared[0] is outcomes[0]


def test_a_large_delay_on_real_ranks(capsys, tmp_path, monkeypatch, warm_ranks):
    monkeypatch.setattr(stragglers, "_TOLERANCE", 10.0)  # on a busy machine a step takes whatever it takes
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "stragglers.json"
    options = ["--ranks", "3", "--runs", "1", "--delay", "3", "--phase", "0.01", "--json", str(file)]
    assert main(["bench", "stragglers", *options]) == 0
    captured = capsys.readouterr().out
    assert "The right rank and phase in 1 of 1 runs with a delay; alarms in 0 of 2 without." in " ".join(
        captured.split()
    )
    runs = json.loads(file.read_text())["runs"]
    assert [run["is_right"] for run in runs] == [True] * 3
    assert [run["phase"] for run in runs] == [None, "data", None]
