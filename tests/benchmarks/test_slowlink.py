"""`slowlink`: figures and charts of known curves, what it refuses, and a small run over a simulated link."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from benchmarks import slowlink
from benchmarks.__main__ import main
from benchmarks.slowlink import Race, figures_of, lines_of
from benchmarks.slowlink_rank import Curve, News, Plan, Point, _is_over
from gradwire.errors import PeerLost


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def curve(name: str, seconds: float, losses: list[float], *, every: int = 1, nbytes: float = 1e6) -> Curve:
    points = [Point(5 * i, 5 * i * seconds, 5 * i * nbytes, loss, 5 * i % every == 0) for i, loss in enumerate(losses)]
    return Curve(name, tuple(points))


def race() -> Race:
    return Race(
        100.0,
        [
            curve("torch", 3.0, [4.0, 3.5, 3.0], nbytes=4e7),
            curve("mean", 3.0, [4.0, 3.5, 3.001], nbytes=4e7),
            curve("quantize8", 0.5, [4.0, 3.6, 3.2, 2.9], nbytes=1e7),
            curve("diloco", 0.2, [4.0, 2.9, 2.8], every=10, nbytes=1e5),
            curve("top_k", 0.4, [4.0, 3.9, 3.8], nbytes=1e5),
        ],
    )


FACTS = {"cpu": "a core", "software": "gradwire", "model": "transformer", "link": "a link"}


def test_who_reaches_the_mark_and_how_much_sooner():
    known = race()
    by_name = {c.name: known.ratio(c) for c in known.curves}
    assert known.mark == pytest.approx(3.003)
    assert by_name["torch"] == 1.0
    assert by_name["mean"] == 1.0  # a thousandth above counts
    assert by_name["quantize8"] == pytest.approx(30 / 7.5)
    assert by_name["diloco"] == pytest.approx(30 / 2.0)  # after 10 steps, when replicas are equal, and not after 5
    assert by_name["top_k"] is None
    assert known.best.name == "diloco"


def test_the_table_fits_80_columns_and_the_words_say_the_same():
    out = StringIO()
    Console(file=out, width=80).print(figures_of(race()).table())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert re.search(r"│ quantize8 +│ +0\.500 │ +10 │ +15 │ +7\.5 │ +4\.0 │", out.getvalue())
    assert re.search(r"│ top_k .*│ +not in 10 │ +not in 4 │ +│", out.getvalue())
    assert lines_of(race()) == [
        "diloco (gradwire: parameters every 50 steps) reached the target first, 15.0 times as fast as torch's DDP.",
        "As fast as torch's DDP: mean.",
        "Did not reach the target: top_k.",
    ]


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (3.1, ["No contender was faster than torch's DDP on this link.", "As fast as torch's DDP: mean."]),
        (2.9, ["No contender was faster than torch's DDP on this link.", "As fast as torch's DDP: mean."]),
        (3.5, ["No contender was faster than torch's DDP on this link.", "Slower than torch's DDP: mean."]),
        (2.7, ["mean (gradwire: dense float32) reached the target first, 1.1 times as fast as torch's DDP."]),
    ],
)
def test_a_contender_is_said_to_be_faster_only_if_the_table_shows_it(seconds, lines):
    """What rounds to 1.0 is as fast, whichever side of it the ratio is."""
    torchs, ours = curve("torch", 3.0, [4.0, 3.0]), curve("mean", seconds, [4.0, 3.0])
    assert lines_of(Race(100.0, [torchs, ours])) == lines


def test_every_evaluation_is_kept():
    rows = figures_of(race()).rows
    assert rows["quantize8"]["speedup"] == pytest.approx(4.0)
    assert rows["top_k"]["speedup"] is None
    assert [p["loss"] for p in rows["torch"]["points"]] == [4.0, 3.5, 3.0]


@pytest.mark.usefixtures("fonts")
def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    slowlink.draw(tmp_path / "loss.png", race(), FACTS)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def plan(**changed) -> Plan:
    given = Plan(
        names=("torch",),
        size="tiny",
        batch=1,
        rate=1e-3,
        seed=0,
        steps=10,
        seconds=None,
        exam_every=5,
        patience=2.0,
        link=None,
    )
    return replace(given, **changed)


def test_when_a_contender_is_over():
    reference, slow = race().reference, curve("top_k", 1.0, [4.0, 3.9])
    assert not _is_over(plan(), reference.points[:2], "torch", None)
    assert _is_over(plan(), reference.points, "torch", None)
    assert _is_over(plan(seconds=15.0), reference.points[:2], "torch", None)
    assert not _is_over(plan(), slow.points, "top_k", reference)
    assert _is_over(plan(patience=0.5), slow.points, "top_k", reference)  # as many steps
    assert _is_over(plan(patience=0.1), slow.points, "top_k", reference)
    assert _is_over(plan(), race().curves[2].points, "quantize8", reference)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mbit", "0"], "argument --mbit: '0' is not a number greater than 0"),
        (["--hosts", "1"], "argument --hosts: '1' is not a whole number of 2 or more"),
        (["--hooks", "mean,magic"], "argument --hooks: unknown name 'magic'; known names: torch, torch-fp16"),
        (["--steps", "3", "--seconds", "3"], "not allowed with argument"),
        (["--size", "huge"], "argument --size: invalid choice: 'huge'"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["slowlink", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plot", "ways.xyz"], "--plot ways.xyz: unsupported file type. Use a name that ends in .png, .svg, .pdf."),
        (["--plot", "nowhere/ways.png"], "there is no folder nowhere. Create it first."),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_trained(argv, message, capsys):
    assert main(["slowlink", *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_there_are_no_charts(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["slowlink", "--plot", "ways.png"]) == 2
    assert "matplotlib is not installed. pip install gradwire[plot]" in capsys.readouterr().err


def test_where_hosts_are_not_permitted_the_simulated_link_is_offered(monkeypatch, capsys):
    monkeypatch.setattr(slowlink, "why_not", lambda mbit: "making network namespaces needs root")
    assert main(["slowlink"]) == 2
    said = capsys.readouterr().err
    assert "hosts cannot be created here: making network namespaces needs root" in said
    assert "--throttled simulates the link instead." in said


def test_what_was_done_before_a_failure_is_not_lost(monkeypatch, capsys, tmp_path):
    def failing(task, ranks, *, on_report, **named):
        for done in race().curves[:2]:
            on_report(None)
            on_report(News(done.name, done.points[1], None))
            on_report(News(done.name, done.last, done))
        raise PeerLost("rank 1 died", rank=1)

    monkeypatch.setattr(slowlink, "run_world", failing)
    file = tmp_path / "ways.json"
    assert main(["slowlink", "--throttled", "--json", str(file)]) == 1
    said = capsys.readouterr()
    assert "rank 1 died" in said.err
    assert "The results above are those of torch, mean, which had finished." in said.err
    assert list(json.loads(file.read_text())["figures"][0]["rows"]) == ["torch", "mean"]


def test_a_failure_of_the_reference_leaves_nothing_to_show(monkeypatch, capsys):
    def failing(task, ranks, **named):
        raise PeerLost("rank 1 died", rank=1)

    monkeypatch.setattr(slowlink, "run_world", failing)
    assert main(["slowlink", "--throttled"]) == 1
    said = capsys.readouterr()
    assert "rank 1 died" in said.err
    assert "mark" not in said.out


@pytest.mark.usefixtures("fonts", "warm_ranks")
def test_a_small_run_over_a_simulated_link(tmp_path, capsys):
    files = [tmp_path / name for name in ("ways.json", "ways.png")]
    argv = [
        "slowlink",
        "--throttled",
        "--size",
        "tiny",
        "--mbit",
        "50",
        "--steps",
        "4",
        "--exam-every",
        "2",
        "--rate",
        "0.01",
    ]
    argv += ["--hooks", "mean,torch-fp16", "--json", str(files[0]), "--plot", str(files[1])]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "simulated, 50 Mbit/s and 0.5 ms for each of 2 ranks that share memory" in said
    ways = json.loads(files[0].read_text())["figures"][0]["rows"]
    assert list(ways) == ["torch", "mean", "torch-fp16"]
    assert ways["mean"]["points"][-1]["loss"] == pytest.approx(ways["torch"]["points"][-1]["loss"], rel=1e-4)
    assert ways["mean"]["steps"] == 4
    assert ways["torch"]["link_busy"] is None
    assert 0.2 < ways["mean"]["link_busy"] < 1.05
    assert ways["torch-fp16"]["bytes_per_step"] == pytest.approx(ways["torch"]["bytes_per_step"] / 2, rel=0.05)
    assert files[1].stat().st_size > 1000
