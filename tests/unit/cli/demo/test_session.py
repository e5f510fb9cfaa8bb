"""`gradwire demo` from end to end, small."""

import re
from unittest.mock import Mock

import pytest

from gradwire.cli import main
from gradwire.cli.demo import train

TINY = ["demo", "--size", "tiny", "--batch-size", "2", "--no-compare"]


def run(capfd, *argv: str) -> tuple[int, list[str]]:
    code = main([*TINY, *argv])
    return code, capfd.readouterr().out.splitlines()


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
    _, lines = run(capfd, "--ranks", "2", "--steps", "140", "--kind", "threads", "--batch-size", "8")
    facts = {
        name: float(v) for name, v in re.findall(r"^(validation loss|for comparison) +([\d.]+)", "\n".join(lines), re.M)
    }
    assert facts["validation loss"] < facts["for comparison"] - 0.2


@pytest.mark.parametrize(("option", "where"), [("--svg", "none/demo.svg"), ("--svg", "."), ("--kind", "foo")])
def test_a_picture_or_kind_that_cannot_be_made_is_refused_before_training(option, where, capfd, tmp_path):
    assert main([*TINY, option, str(tmp_path / where)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"gradwire: UsageError: gradwire demo {option} {tmp_path}")


def test_a_python_without_source_is_one_clear_error(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert main([*TINY, "--ranks", "2", "--kind", "threads"]) == 2
    error = capfd.readouterr().err
    assert f"gradwire: UsageError: reading the demo's text from {tmp_path}: found 0 Python source files" in error
    assert "Traceback" not in error
