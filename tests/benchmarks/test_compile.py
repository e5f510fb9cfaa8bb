"""`compile`: figures on known times, wrong arguments, and one real run without a C++ compiler."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import compile as compile_benchmark
from benchmarks.__main__ import main
from benchmarks.compile_rank import BARE, BASE, EAGER, FORMS, INSIDE, ONE_BUCKET, TORCH, Measured


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def measured(slower: float = 1.0) -> Measured:
    """Milliseconds: 88 bare, 100 without the link; 110 compiled, 140 without overlap, 120 torch's."""
    steps = dict.fromkeys(FORMS, 110.0) | {BARE: 88.0, ONE_BUCKET: 140.0, TORCH: 120.0}
    seconds = {form: (slower * ms / 1e3,) * 3 for form, ms in steps.items()}
    with_ddp = [form for form in FORMS if form != BARE]
    seconds |= {form + BASE: (slower * 0.1,) * 3 for form in with_ddp}
    breaks = dict.fromkeys(FORMS, 0) | {TORCH: 3}
    return Measured(seconds, dict.fromkeys(with_ddp, 1e-8 * slower), breaks, 10)


def test_exposed_communication_is_a_share_of_that_without_overlap() -> None:
    rows = compile_benchmark.figures_of([measured(), measured(2.0)])[0].rows
    assert list(rows) == list(FORMS)
    inside = rows[INSIDE]
    assert inside["exposed"].median == pytest.approx(0.02)  # the slowest rank
    assert inside["exposed_to_no_overlap"] == pytest.approx(0.25)
    assert rows[TORCH]["exposed_to_no_overlap"] == pytest.approx(0.5)
    assert "exposed_to_no_overlap" not in rows[EAGER]
    assert inside["ratio_to_torch"].of_medians == pytest.approx(11 / 12)
    assert inside["ratio_to_bare"].of_medians == pytest.approx(1.25)
    assert "exposed" not in rows[BARE]
    assert rows[BARE]["largest_difference"] is None
    assert rows[TORCH]["graph_breaks"] == 3
    assert inside["largest_difference"] == 2e-8


def test_the_table_fits_80_columns() -> None:
    figures, lines = compile_benchmark.figures_of([measured()])
    out = StringIO()
    Console(file=out, width=80).print(figures.table())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert re.search(r"│ DDP\(compile\(m\)\) +│ +110\.0 │ +10\.0 │ 1\.250 │ 0\.917 │ +0 │ +1e-08 │", out.getvalue())
    assert lines[0] == "DDP(compile(m)) exposes 0.25 of the communication that a step without overlap waits for."


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--link", "0"], "argument --link: "),
        (["--link", "10", "--no-link"], "argument --no-link: not allowed with argument --link"),
        (["--forms", "all"], "argument --forms: unknown name 'all'; known names: bare, inside, outside"),
        (["--hook", "diloco"], "argument --hook: invalid choice: 'diloco'"),
    ],
)
def test_a_wrong_argument_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["compile", *argv])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--width", "100"], "--width 100: heads are 64 wide"),
        (["--bucket-mb", "0.5"], "--bucket-mb 0.5: torch's compiled DDP takes no buckets below 1 MB"),
    ],
)
def test_a_wrong_value_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *argv]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("warm_ranks")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    size = ["--blocks", "1", "--width", "8", "--tokens", "4", "--batch", "1", "--steps", "2", "--backend", "eager"]
    forms = ["--forms", "bare,inside,one bucket", "--hook", "quantize8", "--checkpointing", "--json", str(file)]
    assert main(["compile", *size, *forms]) == 0
    assert "compile(m)" in capsys.readouterr().out  # the whole name is wrapped where times are long
    found = json.loads(file.read_text())["figures"][0]["rows"]
    bare = found.pop(BARE)
    assert set(bare) == {"name", "step", "graph_breaks", "largest_difference"}
    assert bare["largest_difference"] is None  # its gradients are of one rank
    assert list(found) == [EAGER, INSIDE, ONE_BUCKET]
    assert all(form["graph_breaks"] == 0 and form["largest_difference"] < 1e-6 for form in found.values())
