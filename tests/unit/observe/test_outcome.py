"""How a run has ended: what the launcher saves, and what can be read."""

import json

import pytest

from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome, load, save

OUTCOMES = [
    RunOutcome("", None, None, ()),
    RunOutcome(
        "rank 1 failed", 1, None, (RankOutcome(1, -9, stopped=False), RankOutcome(0, 1, stopped=True)), time=7.5
    ),
    RunOutcome("rank 0 failed", 0, None, (RankOutcome(0, 1, stopped=False, raised="ValueError"),)),
    RunOutcome("stopped by SIGINT", None, "SIGINT", (RankOutcome(0, 0, stopped=True),)),
]


NAMELESS = json.dumps({"text": None, "failed": None, "signal": None, "ranks": [], "time": 0})


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_what_was_saved_is_read(tmp_path, outcome):
    save(tmp_path, outcome)
    assert load(tmp_path) == outcome
    assert [outcome.of(one.rank) for one in outcome.ranks] == list(outcome.ranks)
    assert outcome.of(7) is None
    assert load(tmp_path, started=outcome.time) == outcome
    assert load(tmp_path, started=outcome.time + 1) is None


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "{}", "3", json.dumps({"ranks": [{}]}), json.dumps({"ranks": 1}), NAMELESS, "[" * 100_000],
)
def test_what_cannot_be_read_is_no_outcome(tmp_path, text):
    if text is not None:
        (tmp_path / "outcome.json").write_text(text)
    assert load(tmp_path) is None


def test_a_directory_that_is_gone_is_no_error(tmp_path):
    save(tmp_path / "gone", OUTCOMES[0])
    assert load(tmp_path / "gone") is None
