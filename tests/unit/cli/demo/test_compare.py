"""The comparison of the demo: every way to train is measured, and the table says which is faster."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.cli.demo.compare import VARIANTS, Times, table
from gradwire.observe.rings.runs import runs_directory


def shown(times: list[Times], **machine: float) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(100.0, times, **{"load": 2.0, "cores": 2, **machine}))
    return console.file.getvalue().splitlines()


def test_factors_are_relative_to_torch_on_the_same_link():
    nbytes = [0.0, 0.0, 466e3, 233e3, 466e3, 118e3]
    lines = shown([([0.010, 0.008, 0.040, 0.032, 0.039, 0.016], nbytes), ([0.007] * 6, nbytes)])
    assert all(len(line) <= 80 for line in lines)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["on this machine", "", "", ""],
        ["torch's DDP over gloo", "10.0", "", "1.00x"],
        ["gradwire over shared memory", "8.0", "", "1.25x"],
        ["over 100 Mbit/s", "", "", ""],
        ["torch's DDP", "40.0", "466", "1.00x"],
        ["torch's DDP, its fp16 hook", "32.0", "233", "1.25x"],
        ["gradwire", "39.0", "466", "1.03x"],
        ["gradwire, 8 bits, error feedback", "16.0", "118", "2.50x"],
    ]


def test_a_busy_machine_and_too_few_cores_are_named():
    two = [([1.0] * 6, [0.0] * 6)] * 2
    assert shown(two)[-1].startswith("Median of 40 steps")
    assert shown(two, load=3.5)[-1].startswith("The machine was busy (load 3.5 on 2 cores)")
    assert shown(two * 2)[-1].startswith("4 ranks share 2 cores: times depend on the scheduler")


def test_the_demo_trains_compares_and_writes_a_page(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    options = ["--size", "tiny", "--batch-size", "1", "--steps", "3", "--ranks", "2", "--mbit", "10000"]
    picture = tmp_path / "demo.svg"
    assert main(["demo", *options, "--svg", str(picture)]) == 0
    out = capfd.readouterr().out
    for name in (*(one.name for one in VARIANTS), "on this machine", "over 10000 Mbit/s"):
        assert name in out
    *_, page, verdict = out.splitlines()
    run = (runs_directory({"XDG_STATE_HOME": str(tmp_path)}) / "latest").resolve()
    assert page.endswith(f": {run / 'report.html'}")
    assert "2 ranks" in (run / "report.html").read_text()
    drawn = picture.read_text().replace("&#160;", " ")
    assert all(words in drawn for words in ("validation loss", "over 10000 Mbit/s", "bitwise equal (digest "))
    assert verdict.startswith("All 2 replicas are bitwise equal")


def test_a_directory_that_cannot_be_made_costs_only_the_page(capfd, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    options = ["--size", "tiny", "--batch-size", "1", "--steps", "1", "--ranks", "1", "--kind", "gloo", "--no-compare"]
    assert main(["demo", *options]) == 0
    out = capfd.readouterr().out
    assert "report.html" not in out
    assert out.splitlines()[-1].startswith("The only replica")


def test_bad_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--mbit", "0"])
    assert stop.value.code == 2
    assert "greater than 0" in capsys.readouterr().err
