"""Timelines of streams: which is the model's, what overlaps, the plot; and what `overlap` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.overlap import Kernel, Timeline, common, draw, kernels_of, length, union

KERNELS = [
    Kernel("gemm", 7, 0.0, 4.0),
    Kernel("gemm", 7, 4.0, 8.0),
    Kernel("quantize", 20, 3.0, 5.0),
    Kernel("add", 21, 7.0, 9.0),
]


def test_the_busiest_stream_is_the_models_and_the_rest_is_the_hooks() -> None:
    line = Timeline.of("q", KERNELS)
    assert line.model == ((0.0, 8.0),)
    assert line.hook == ((3.0, 5.0), (7.0, 9.0))
    assert (line.busy, line.hidden, line.seconds) == (4.0, 3.0, 9.0)


def test_a_step_without_kernels_takes_no_time() -> None:
    line = Timeline.of("nothing", [])
    assert (line.busy, line.hidden, line.seconds) == (0.0, 0.0, 0.0)


def test_intervals_are_counted_once() -> None:
    assert union([]) == []
    assert length([(0, 2), (1, 3), (5, 6)]) == 4
    assert common([(0, 2), (1, 3)], [(2, 6)]) == 1
    assert common([(0, 1)], [(1, 2)]) == 0


def test_kernels_come_from_the_device_only(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    assert kernels_of(profile) == []


@pytest.mark.usefixtures("fonts")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "timeline.png"
    draw(file, [Timeline.of("q", KERNELS), Timeline.of("mean", KERNELS[:2])], {"cpu": "some", "software": "some"})
    assert file.read_bytes().startswith(b"\x89PNG")


def test_overlap_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["overlap", "--hooks", "mean,nothing"])
    assert "unknown name 'nothing'" in capsys.readouterr().err
    assert main(["overlap", "--plot", str(tmp_path / "x.doc")]) == 2
    assert "unsupported file type" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["overlap"]) == 2
        assert "sees no CUDA device" in capsys.readouterr().err
