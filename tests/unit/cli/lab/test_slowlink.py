"""`gradwire lab slowlink`: figures and charts of known curves, what it refuses, and a small run over a simulated link."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.cli.lab import charts, slowlink
from gradwire.cli.lab.curve import Curve, News, Plan, Point, _is_over
from gradwire.cli.lab.figures import Race, as_json, lines, table
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
    Console(file=out, width=80).print(table(race()))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert re.search(r"│ quantize8 +│ +0\.500 │ +10 │ +15 │ +7\.5 │ +4\.0 │", out.getvalue())
    assert re.search(r"│ top_k .*│ +not in 10 │ +not in 4 │ +- │", out.getvalue())
    first, second = lines(race())
    assert first.startswith(
        "diloco (gradwire: parameters every 50 steps) was the first to reach the target, in 2.0 s: 15.0 times"
    )
    assert second == "Not worthwhile on this link: mean, top_k."
    assert lines(Race(1.0, race().curves[:1])) == ["Only torch's DDP reached the target."]


def test_json_holds_every_examination():
    data = json.loads(json.dumps(as_json(race(), FACTS)))
    assert data["contenders"]["quantize8"]["times_sooner"] == pytest.approx(4.0)
    assert data["contenders"]["top_k"]["to_the_mark"] is None
    assert [p["loss"] for p in data["contenders"]["torch"]["points"]] == [4.0, 3.5, 3.0]


@pytest.mark.usefixtures("fonts")
def test_charts_and_a_page_that_needs_no_other_file(tmp_path):
    pytest.importorskip("matplotlib")
    charts.draw(tmp_path / "ways.png", race(), FACTS)
    assert (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")
    charts.write_page(tmp_path / "ways.html", race(), FACTS)
    page = (tmp_path / "ways.html").read_text()
    for name in ("torch", "mean", "quantize8", "diloco", "top_k"):
        assert f"<td>{name}</td>" in page
    assert page.count("<svg") == 1
    assert not re.search(r'(src|href)="(?!#)', page)  # nothing is loaded from elsewhere
    assert "seconds of training" in page


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
        main(["lab", "slowlink", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plot", "ways.xyz"], "--plot ways.xyz: unsupported file type. Use a name that ends in .png, .svg, .pdf."),
        (["--html", "ways.png"], "--html ways.png: unsupported file type. Use a name that ends in .html, .htm."),
        (["--plot", "nowhere/ways.png"], "there is no folder nowhere. Create it first."),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anything_is_trained(argv, message, capsys):
    assert main(["lab", "slowlink", *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_there_are_no_charts(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["lab", "slowlink", "--plot", "ways.png"]) == 2
    assert "matplotlib is not installed. pip install gradwire[lab]" in capsys.readouterr().err


def test_where_hosts_are_not_permitted_the_simulated_link_is_offered(monkeypatch, capsys):
    monkeypatch.setattr(slowlink, "why_not", lambda mbit: "making network namespaces needs root")
    assert main(["lab", "slowlink"]) == 2
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
    assert main(["lab", "slowlink", "--throttled", "--json", str(file)]) == 1
    said = capsys.readouterr()
    assert "rank 1 died" in said.err
    assert "The results above are those of torch, mean, which had finished." in said.err
    assert list(json.loads(file.read_text())["contenders"]) == ["torch", "mean"]


def test_a_failure_of_the_reference_leaves_nothing_to_show(monkeypatch, capsys):
    def failing(task, ranks, **named):
        raise PeerLost("rank 1 died", rank=1)

    monkeypatch.setattr(slowlink, "run_world", failing)
    assert main(["lab", "slowlink", "--throttled"]) == 1
    said = capsys.readouterr()
    assert "rank 1 died" in said.err
    assert "mark" not in said.out


@pytest.mark.usefixtures("fonts", "warm_ranks")
def test_a_small_run_over_a_simulated_link(tmp_path, capsys):
    files = [tmp_path / name for name in ("ways.json", "ways.png", "ways.html")]
    argv = [
        "lab",
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
    argv += ["--hooks", "mean,torch-fp16", "--json", str(files[0]), "--plot", str(files[1]), "--html", str(files[2])]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "simulated, 50 Mbit/s and 0.5 ms for each of 2 ranks that share memory" in said
    data = json.loads(files[0].read_text())
    assert list(data["contenders"]) == ["torch", "mean", "torch-fp16"]
    ways = data["contenders"]
    assert ways["mean"]["points"][-1]["loss"] == pytest.approx(ways["torch"]["points"][-1]["loss"], rel=1e-4)
    assert ways["mean"]["to_the_mark"]["steps"] == 4
    assert ways["torch-fp16"]["bytes_a_step"] == pytest.approx(ways["torch"]["bytes_a_step"] / 2, rel=0.05)
    for file in files[1:]:
        assert file.stat().st_size > 1000
