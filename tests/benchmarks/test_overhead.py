"""`overhead` end to end, small, and its output."""

from __future__ import annotations

import json
import re
import subprocess
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from benchmarks import against, overhead, peers
from benchmarks.__main__ import main
from benchmarks.machine import describe
from benchmarks.timing import Series
from gradwire.recorder import writer
from helpers.warm_python import FORK_CLIENT

WORKER = "benchmarks.against_worker"
VARIANTS = ["bare", "torch", "gradwire", "torch, views", "gradwire, views"]
SMALL = ["overhead", "--parameters", "6", "--steps", "8", "--block", "2"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: WHAT"),
        (["fly"], "invalid choice: 'fly'"),
        ([*SMALL, "--device", "abacus"], "argument --device: invalid choice: 'abacus'"),
        ([*SMALL, "--steps", "0"], "argument --steps: '0' is not a whole number of 1 or more"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(argv)
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_it_measures_all_variants_and_writes_every_round(capsys, tmp_path):
    file, threads = tmp_path / "overhead.json", torch.get_num_threads()
    assert main([*SMALL, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    out = "\n".join(lines)
    for name in VARIANTS:
        assert re.search(rf"^│ {name} +│ +[\d.]+ │", out, re.M), name
    # Of few steps, torch's overhead may be lost in noise, which is said instead.
    assert (
        len(re.findall(r"gradwire's overhead (is -?[\d.]+ of|cannot be compared with) torch's", " ".join(out.split())))
        == 2
    )
    data = json.loads(file.read_text())
    [figures] = data["figures"]
    assert list(figures["rows"]) == VARIANTS
    steps = [row["step"]["rounds"] for row in figures["rows"].values()]
    assert all(len(rounds) == 4 and min(rounds) > 0 for rounds in steps)
    assert set(figures["rows"]["gradwire"]) == {"step", "more", "ratio"}
    assert set(figures["rows"]["gradwire"]["ratio"]) >= {"of_medians", "median_of_rounds", "confidence_of_median"}
    assert data["settings"]["model"].startswith("6 parameters of 16 x 16 linear layers, float32, batch 4")
    assert data["machine"]["software"].endswith(
        f"torch {torch.__version__}, Python {describe()['software'].split()[-1]}"
    )
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()


def test_it_measures_the_flight_recorder_and_leaves_none(capsys, tmp_path):
    file = tmp_path / "overhead.json"
    assert main([*SMALL, "--record", "--json", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(r"The flight recorder adds -?[\d.]+ % to a step with", out)) == 2
    variants = json.loads(file.read_text())["figures"][0]["rows"]
    assert list(variants) == [*VARIANTS[:3], "gradwire, recorded", *VARIANTS[3:], "gradwire, views, recorded"]
    assert writer.active is None


def test_the_model_for_cuda_runs_the_same_way_on_the_cpu(capsys):
    argv = ["overhead", "--size", "tiny", "--batch", "2", "--steps", "4", "--block", "2", "--adamw"]
    assert main([*argv, "--clock", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "GPT-2 tiny shape, 29,216 elements in 28 parameters, float32, batch 2 x 16" in out
    assert "forward, backward, AdamW" in out
    assert "cpu time, 2 interleaved rounds of 2 steps each, after one untimed step" in out


def test_what_a_check_for_nan_adds(capsys, tmp_path):
    file = tmp_path / "overhead.json"
    assert main([*SMALL, "--nonfinite", "--json", str(file)]) == 0
    checked = json.loads(file.read_text())["figures"][0]["rows"]["gradwire checked"]
    assert checked["ratio"]["confidence_of_median"] is None  # of so few rounds
    out = capsys.readouterr().out
    # Where times are long, names are wrapped.
    for name in ("gradwire", "gradwire +checked", "gradwire, +views", "gradwire, +views +checked"):
        cells = " ".join(line.split("│")[1] for line in out.splitlines() if line.startswith("│"))
        assert re.search(name, cells), name
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert re.search(
        r"With bucket views, the check adds -?[\d.]+ % to a step \(median over \d rounds; ratio of medians: -?[\d.]+ %\)",
        words,
    )
    assert len(re.findall(r"Two such models without it differ by [\d.]+ %, two with it by [\d.]+ %\.", words)) == 2
    assert re.search(r"The sums alone, .* take [\d.]+ % of a step", " ".join(out.split()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_is_one_clear_error(capsys):
    assert main([*SMALL, "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_process_that_has_a_group_is_refused(capsys):
    with peers.world_of_one(torch.device("cpu")):
        assert main(SMALL) == 2
    assert "this process already has one" in capsys.readouterr().err


def test_a_variant_that_computes_something_else_is_found_out(capsys, monkeypatch):
    class Wrong(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self.module(x) * 1.1
            return value

    monkeypatch.setattr(peers, "wrappers", lambda: {peers.BARE: lambda model: model, "wrong": Wrong})
    assert main(SMALL) == 1
    assert "wrong computes a different gradient than bare" in capsys.readouterr().err


def _series(**ms: float) -> dict[str, Series]:
    return {name.replace("_", ", "): Series(name, (value / 1e3,) * 2) for name, value in ms.items()}


def test_on_the_cpu_what_is_added_to_bare_is_compared_and_on_cuda_the_step():
    series = _series(bare=20, torch=25, gradwire=22, torch_views=24, gradwire_views=21)
    for device, ratios, words in (
        ("cpu", [0.4, 0.25], "gradwire's overhead is 0.40"),
        ("cuda", [0.88, 0.875], "gradwire's step time is 0.88"),
    ):
        figures, lines = overhead.figures_of(series, torch.device(device))
        found = [row["ratio"] for row in figures.rows.values() if "ratio" in row]
        assert [r.of_medians for r in found] == pytest.approx(ratios)
        assert [r.median_of_rounds for r in found] == pytest.approx(ratios)
        assert words in lines[0]
        assert [row["more"] for row in figures.rows.values() if "more" in row] == pytest.approx(
            [5e-3, 2e-3, 4e-3, 1e-3]
        )


def test_a_difference_that_vanished_in_noise_is_not_a_number_to_show():
    series = _series(bare=20, torch=19, gradwire=22, torch_views=24, gradwire_views=21)
    noise, compared = overhead.figures_of(series, torch.device("cpu"))[1]
    assert "cannot be compared with torch's with default flags: torch's is lost in noise" in noise
    assert "is 0.25 of torch's with bucket views" in compared


@pytest.mark.acceptance
def test_two_checkouts_take_turns(capsys, tmp_path, monkeypatch, warm_python):
    """The second process is a fork: it need not import torch."""
    code = (
        f"import runpy, sys; sys.path.append({str(against.HERE)!r}); runpy.run_module({WORKER!r}, run_name='__main__')"
    )
    started, popen = [], subprocess.Popen
    warm_python.server.run()

    def start(command, **how):
        started.append(command)
        return popen(command if len(started) == 1 else [*FORK_CLIENT, "python", "-c", code, command[-1]], **how)

    monkeypatch.setattr("benchmarks.against.subprocess.Popen", start)
    file = tmp_path / "against.json"
    argv = [*SMALL, "--against", str(against.HERE), "--processes", "1", "--clock", "cpu", "--json", str(file)]
    assert main(argv) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "6 parameters of 16 x 16, batch 4, cpu, cpu time" in out
    assert len(re.findall(r"a step(, bucket views)?: new/old [\d.]+", out)) == 2
    assert [command[-2] for command in started] == [WORKER] * 2
    rows = json.loads(file.read_text())["figures"][0]["rows"]
    assert list(rows) == VARIANTS
    assert all(len(row["old"]["rounds"]) == len(row["new"]["rounds"]) == 4 for row in rows.values())


def test_the_other_checkout_must_be_one(capsys, tmp_path):
    assert main([*SMALL, "--against", str(tmp_path)]) == 2
    assert "there is no src/gradwire. Name the root of a checkout." in capsys.readouterr().err


def test_what_two_checkouts_are_compared_by():
    new = {"bare": [1.0, 1.0], "torch": [3.0, 3.0], "gradwire": [2.0, 2.0]}
    old = new | {"gradwire": [3.0, 5.0]}
    found = against.Comparison(against.Plan("cpu", None, 6, 4, 3, "cpu"), new, old)
    figures = against.figures_of(found)
    out = StringIO()
    Console(file=out, width=80).print(figures.table())
    assert re.search(r"│ gradwire +│ 4000.00 │ 2000.00 │ +2.00 │ +3000.00 │ +1000.00 │ +3.00 │", out.getvalue())
    row = figures.rows["gradwire"]
    assert row["ratio"].seconds == (1.5, 2.5)
    assert row["ratio_added"].seconds == (2.0, 4.0)
    [line] = against.lines_of(found)
    assert line.endswith(
        "a step: new/old 0.533; added to the bare model: 0.333 of the old, 0.500 of torch's (medians)."
    )


def test_the_machine_has_a_name():
    facts = describe()
    assert set(facts) == {"cpu", "system", "software", "loops", "load"}
    assert all(facts.values())


def test_host_compares_each_hook_with_torchs_ddp(capsys, tmp_path):
    file = tmp_path / "host.json"
    assert main(["host", "--hooks", "quantize8,sign", "--batch", "1,2", "--rounds", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "communication is free" in " ".join(out.split())
    data = json.loads(file.read_text())
    assert [one["title"] for one in data["figures"]] == ["eager, batch 1", "eager, batch 2"]
    for figures in data["figures"]:
        rows = figures["rows"]
        assert list(rows) == ["bare", "torch", "gradwire", "quantize8", "sign"]
        assert all(
            len(row[key]["rounds"]) == 2 and min(row[key]["rounds"]) > 0
            for row in rows.values()
            for key in ("step", "host")
        )
        host = [rows[name]["host"]["rounds"] for name in ("sign", "torch")]
        assert rows["sign"]["host_more"]["rounds"] == [mine - theirs for mine, theirs in zip(*host, strict=True)]
