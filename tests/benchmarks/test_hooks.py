"""`hooks`: splits of known hooks, what it refuses, and a small run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import hook_timing, hooks
from benchmarks.__main__ import main
from benchmarks.hook_timing import Ours, Split, Stopwatch, Torchs, bucket, gradients
from benchmarks.timing import Series
from benchmarks.torch_hooks import DENSE_STEPS, TORCH_HOOKS
from gradwire.collectives import ReduceOp, all_reduce
from gradwire.hooks import CommHook, Reduced, Reduction, Turn, mean

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_a_bucket_is_made_of_matrices_and_what_is_left():
    spec = bucket(4 * (2 * 1024 * 1024 + 3 * 1024 + 5), CPU)
    assert spec.shapes == ((1024, 1024), (1024, 1024), (3, 1024), (5,))
    assert spec.numel * 4 == 4 * (2 * 1024 * 1024 + 3 * 1024 + 5)
    assert [g.numel() for g in gradients(spec, 2)] == [spec.numel] * 2


def test_spans_are_first_middle_and_last():
    watch = Stopwatch(CPU)
    assert watch.split([(0.0, 1.0)]) == Split(1.0, 0.0, 0.0)
    assert watch.split([(0.0, 1.0), (5.0, 7.0)]) == Split(1.0, 0.0, 2.0)
    assert watch.split([(0.0, 1.0), (5.0, 7.0), (8.0, 9.0), (10.0, 14.0)]) == Split(1.0, 3.0, 4.0)
    assert Split(1.0, 3.0, 4.0).total == 8.0


@dataclass(slots=True)
class ManualClock:
    """`time.perf_counter` that stands still unless it is advanced."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Slow(CommHook):
    """Takes 1 s, 2 s and 4 s of a manual clock on each rank."""

    clock: ManualClock

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self.clock.now += 1
        value = grad.clone()
        yield all_reduce(value, op=ReduceOp.AVG)
        self.clock.now += 2
        yield all_reduce(value, op=ReduceOp.AVG)
        self.clock.now += 4
        return Reduced(value, grad)


def test_a_reduction_is_split_at_its_collectives(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(hook_timing, "time", clock)
    spec = bucket(4096, CPU)
    run = Ours(Slow(clock), spec, gradients(spec, 3))
    run()
    assert run.splits == [Split(1.0, 2.0, 4.0)]
    assert run.outcome.wire_bytes == 2 * 2 * 4096 * 2 / 3
    assert run.outcome.error < 1e-6


@pytest.mark.parametrize("name", TORCH_HOOKS)
def test_torchs_hooks_are_split_in_the_same_way(name):
    spec = bucket(64 * 4096, CPU)
    run = Torchs(TORCH_HOOKS[name], spec, gradients(spec, 2), lossy_after=DENSE_STEPS)
    try:
        for _ in range(4):
            run()
    finally:
        run.close()
    last = run.splits[-1]
    assert last.compress > 0
    assert last.decompress > 0
    assert (last.middle > 0) is (name == "torch-powersgd")
    if name != "torch-powersgd":
        assert run.outcome.wire_bytes == (64 if name == "torch-allreduce" else 32) * 4096
        assert run.outcome.error < 5e-3
    else:
        assert run.outcome.wire_bytes < 32 * 4096


def test_dense_averaging_loses_nothing_but_rounding():
    spec = bucket(8192, CPU)
    run = Ours(mean(), spec, gradients(spec, 2))
    run()
    assert run.outcome.wire_bytes == 8192
    assert run.outcome.error < 1e-6


def measured() -> hooks.Measured:
    def row(scale: float) -> dict[str, Any]:
        parts = {"compress": 1e-3, "middle": 0.0, "decompress": 2e-3, "total": 3e-3}
        series = {part: Series("x", tuple(scale * r * seconds for r in (1, 2, 3))) for part, seconds in parts.items()}
        return series | {"wire_bytes": 1e6 * scale, "error": 0.01}

    return hooks.Measured(25 << 20, {"mean": row(1.0), "fp16": row(0.5), "torch-fp16": row(2.0)})


def test_the_table_fits_80_columns_and_the_words_say_the_same():
    figures = hooks.figures_of(measured())
    out = StringIO()
    Console(file=out, width=80).print(figures.table())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "torch-fp16" in out.getvalue()
    assert figures.rows["fp16"]["ratio_to_torch"].of_medians == pytest.approx(0.25)
    assert figures.rows["mean"]["ratio_to_torch"] is None
    assert hooks.lines_of([figures]) == ["25 MiB: fp16 computes 0.25 times as long as torch-fp16."]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rounds", "1"], "argument --rounds: '1' is not a whole number of 2 or more"),
        (["--hooks", "diloco"], "argument --hooks: unknown name 'diloco'"),
        (["--sizes", "much"], "argument --sizes: 'much' is not a number of bytes"),
    ],
)
def test_a_wrong_argument_is_named(argv, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["hooks", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes", "6"], "6 bytes are not a whole number of float32 elements"),
        (["--plot", "times.xyz"], "unsupported file type"),
        pytest.param(
            ["--device", "cuda"],
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(argv, message, capsys):
    assert main(["hooks", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("fonts")
def test_a_small_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    data, plot = tmp_path / "hooks.json", tmp_path / "hooks.png"
    argv = ["hooks", "--sizes", "4KiB,64KiB", "--rounds", "2", "--hooks", "mean,fp16,torch-fp16"]
    assert main([*argv, "--json", str(data), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "a bucket of 64 KiB" in said
    assert "torch's quantization hooks run only on CUDA" in said
    figures = json.loads(data.read_text())["figures"]
    assert [one["title"] for one in figures] == ["a bucket of 4 KiB", "a bucket of 64 KiB"]
    row = figures[0]["rows"]["fp16"]
    assert row["wire_bytes"] == 2048
    assert len(row["total"]["rounds"]) == 2
    assert row["ratio_to_torch"] is not None
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_hooks_that_need_nccl_are_refused_on_the_cpu(capsys):
    assert main(["hooks", "--hooks", "quantize8,torch-quantize"]) == 2
    assert "only on CUDA" in capsys.readouterr().err
