"""Detection of stragglers: one short real run, and what counts as a miss."""

from __future__ import annotations

import json

import pytest

from detection import stragglers
from detection.sleeping_ranks import Delay
from detection.stragglers import Trial
from gradwire.observe.stragglers.detect import SlowPhase, Straggler
from gradwire.observe.stragglers.steps import Phase

DELAY = Delay(3, Phase.DATA, 0.2)


def found(rank=3, phase=Phase.DATA, without=0.181):
    return (Straggler(rank, (SlowPhase(phase, 0.06, 0.03),), 1, 20, 20, 18, 0.24, without),)


@pytest.mark.parametrize(
    ("trial", "passed"),
    [
        (Trial(None, (), 0.18), True),
        (Trial(None, found(), 0.18), False),
        (Trial(DELAY, found(), 0.24, (0.18, 0.182)), True),
        (Trial(DELAY, (), 0.24, (0.18, 0.182)), False),
        (Trial(DELAY, found(rank=2), 0.24, (0.18, 0.182)), False),
        (Trial(DELAY, found(phase=Phase.FORWARD), 0.24, (0.18, 0.182)), False),
        (Trial(DELAY, (*found(), *found(rank=2)), 0.24, (0.18, 0.182)), False),
        (Trial(DELAY, found(without=0.16), 0.24, (0.18, 0.181)), False),
        (Trial(DELAY, (), 0.24, (0.18, 0.2)), False),
    ],
)
def test_what_is_a_miss(trial, passed):
    assert trial.passed is passed
    judged = trial.error is not None and trial.is_comparable
    assert len(stragglers._lines([trial])) == 1 + (not passed) + (not trial.is_comparable) + judged


def test_each_delayed_run_is_compared_with_the_healthy_ones_around_it():
    trials = [Trial(None, (), 0.1), Trial(DELAY, (), 0.3), Trial(None, (), 0.2)]
    compared = stragglers._compared(trials)
    assert compared[1].healthy == (0.1, 0.2)
    assert not compared[1].is_comparable  # the machine was busy
    assert compared[0] is trials[0]


def test_a_large_delay_on_real_ranks(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(stragglers, "_TOLERANCE", 10.0)  # on a busy machine a step takes whatever it takes
    file = tmp_path / "stragglers.json"
    assert stragglers.main(["--ranks", "3", "--runs", "1", "--delay", "3", "--phase", "0.01", "--json", str(file)]) == 0
    captured = capsys.readouterr().out
    assert "The right rank and phase in 1 of 1 runs with a delay; alarms in 0 of 2 without." in captured
    runs = json.loads(file.read_text())
    assert [run["is_right"] for run in runs] == [True] * 3
    assert [run["phase"] for run in runs] == [None, "data", None]
