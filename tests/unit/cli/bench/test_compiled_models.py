"""`gradwire bench compile`: figures on known times, wrong arguments, and one real run without a C++ compiler."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.cli.bench import compiled_models
from gradwire.cli.bench.compiled_trial import EAGER, FORMS, INSIDE, ONE_BUCKET, QUIET, TORCH, Measured


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def measured(slower: float = 1.0) -> Measured:
    """Milliseconds: 100 without communication; 110 compiled, 140 without overlap, 120 torch's."""
    steps = dict.fromkeys(FORMS, 110.0) | {ONE_BUCKET: 140.0, TORCH: 120.0}
    seconds = {form: (slower * ms / 1e3,) * 3 for form, ms in steps.items()}
    seconds |= {form + QUIET: (slower * 0.1,) * 3 for form in FORMS}
    breaks = dict.fromkeys(FORMS, 0) | {TORCH: 3}
    return Measured(seconds, dict.fromkeys(FORMS, 1e-8 * slower), breaks, 10)


def test_exposed_communication_is_a_share_of_that_without_overlap() -> None:
    rows = {row.form: row for row in compiled_models.entries([measured(), measured(2.0)])}
    assert list(rows) == list(FORMS)
    assert rows[INSIDE].exposed.median == pytest.approx(0.02)  # the slowest rank
    assert rows[INSIDE].to_none_overlapped == pytest.approx(0.25)
    assert rows[TORCH].to_none_overlapped == pytest.approx(0.5)
    assert rows[EAGER].to_none_overlapped is None
    assert rows[INSIDE].to_torch is not None
    assert rows[INSIDE].to_torch.of_medians == pytest.approx(11 / 12)
    assert rows[TORCH].graph_breaks == 3
    assert rows[INSIDE].difference == 2e-8


def test_the_table_fits_80_columns() -> None:
    rows = compiled_models.entries([measured()])
    out = StringIO()
    Console(file=out, width=80).print(compiled_models._table(rows))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert re.search(r"│ DDP\(compile\(m\)\) +│ +110\.0 │ +10\.0 │ +0\.917 │ +0 │ +1e-08 │", out.getvalue())
    assert compiled_models._lines(rows)[0] == (
        "DDP(compile(m)) exposes 0.25 of the communication that a step without overlap waits for."
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--link", "0"], "argument --link: "),
        (["--link", "10", "--no-link"], "argument --no-link: not allowed with argument --link"),
        (["--forms", "all"], "argument --forms: unknown name 'all'; known names: inside, outside"),
        (["--hook", "diloco"], "argument --hook: invalid choice: 'diloco'"),
    ],
)
def test_a_wrong_argument_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["bench", "compile", *argv])
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
    assert main(["bench", "compile", *argv]) != 0
    assert message in capsys.readouterr().err


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    size = ["--blocks", "1", "--width", "8", "--tokens", "4", "--batch", "1", "--steps", "2", "--backend", "aot_eager"]
    forms = ["--forms", "inside,one bucket", "--hook", "quantize8", "--checkpointing", "--json", str(file)]
    assert main(["bench", "compile", *size, *forms]) == 0
    assert "DDP(compile(m)), no overlap" in capsys.readouterr().out
    found = json.loads(file.read_text())["forms"]
    assert list(found) == [EAGER, INSIDE, ONE_BUCKET]
    assert all(form["graph_breaks"] == 0 and form["largest_difference"] < 1e-6 for form in found.values())
