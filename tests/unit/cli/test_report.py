"""`gradwire report`: a page or a text of a run, in whatever state its ranks are."""

import os
import re
import sys
import time

import pytest

from gradwire.cli import main
from gradwire.observe.rings.runs import new_run, runs_directory
from gradwire.runtime.host import clock_identity
from helpers.made_rings import made_ring, write_ring


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    for rank in range(2):
        write_ring(directory, made_ring(rank, range(30)))
    return directory


def test_a_page_and_a_text(run, tmp_path, capsys):
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert "1,080 records of 2 ranks in" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(run), "--text"]) == 0
    assert "Where a step's time goes" in capsys.readouterr().out
    assert main(["report", str(run), "--text", "-o", str(tmp_path / "page.txt")]) == 0
    assert "Where a step's time goes" in (tmp_path / "page.txt").read_text()


def test_two_runs_side_by_side(run, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    write_ring(other, made_ring(0, range(20)))
    assert main(["report", str(run), str(other)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"A  {run}\n")
    assert "2 ranks, steps 1-29" in text
    parts = re.findall(r"^    [a-z ]+ (\d) ms ", text, re.MULTILINE)
    assert f"step, trimmed mean {sum(map(int, parts))} ms" in " ".join(text.split())
    assert "1 rank, steps 1-19" in text
    rows = {line[:25].strip(): line.split()[-1] for line in text.splitlines() if line}
    assert rows["step, median"] == rows["bytes sent per step"] == rows["step, trimmed mean"] == "1.00"
    assert "Only in B\n  warning: Rank 1 of 2 left no record here" in text
    assert main(["report", str(run), str(run), "-o", str(tmp_path / "both.txt")]) == 0
    assert "Only in" not in (tmp_path / "both.txt").read_text()
    assert main(["report", str(run), "nowhere"]) == 2
    assert "there is no directory nowhere" in capsys.readouterr().err


def test_a_script_whose_name_is_not_utf_8(tmp_path):
    write_ring(tmp_path, made_ring(0, range(3), size=1, command="tr\udcffain.py"))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "<title>tr?ain.py" in (tmp_path / "page.html").read_text()


def test_a_terminal_that_knows_ascii_only(run, monkeypatch, capsys):
    class Ascii:
        encoding = "ascii"
        written = ""

        def write(self, text):
            self.written += text.encode("ascii").decode()

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Ascii())
    assert main(["report", str(run), "--text"]) == 0
    assert "Where a step's time goes" in sys.stdout.written  # type: ignore[attr-defined]


def test_the_page_is_in_the_working_directory_unless_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no directory nowhere"),
        (["{tmp}"], "no flight recorder has written here"),
        (["{run}", "-o", "{tmp}/no/page.html"], "/no/page.html: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["report", "trace"])
def test_what_cannot_be_done(run, tmp_path, command, arguments, message, capsys):
    filled = [argument.format(tmp=tmp_path, run=run) for argument in arguments]
    assert main([command, *filled]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["report", "--text"], ["inspect"], ["trace", "-o", "OUT"], ["top", "--once"], ["suggest"]]
)
def test_the_latest_run_is_named_with_its_start(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = new_run(runs_directory(os.environ), "train.py")
    write_ring(run, made_ring(0, range(30), size=1, clock=clock_identity()))
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    assert main(words) == 0
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.strptime(run.name[:15], "%Y%m%d-%H%M%S"))
    assert capsys.readouterr().err == f"gradwire: the latest run: {run}, started {started}\n"
    assert main([*words, str(run)]) == 0
    assert capsys.readouterr().err == ""
