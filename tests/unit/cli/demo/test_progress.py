"""Progress: a bar on a terminal, a few lines elsewhere, nothing from other ranks."""

import pytest

from gradwire.cli.demo.session import progress


def show(rank: int, steps: int, ranks: int = 2) -> None:
    with progress(rank, ranks, steps) as watch:
        for done in range(1, steps + 1):
            watch(done, [(3.0 + 2.0 * (rank == 0)) / done for rank in range(ranks)], 1234.5)


def test_a_pipe_gets_a_few_lines(capsys):
    show(0, 100)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step   1/100  loss 4.000  1,234 tokens/s"
    assert lines[-1] == "step 100/100  loss 0.040  1,234 tokens/s"
    assert len(lines) == 11


def test_other_ranks_print_nothing(capsys):
    show(1, 100)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_bar_for_every_rank(columns, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    show(0, 100)
    out = capsys.readouterr().out
    assert "━" in out
    assert "100/100" in out
    last = [line for line in out.splitlines() if "100/100" in line][-2:]
    assert "rank 0" in last[0]
    assert "loss 0.050" in last[0]
    assert "rank 1" in last[1]
    assert "loss 0.030" in last[1]
    assert "617 tok/s" in last[1]


def test_of_many_ranks_some_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    show(0, 1, ranks=100)
    out = capsys.readouterr().out
    assert "rank 15" in out
    assert "rank 16" not in out
