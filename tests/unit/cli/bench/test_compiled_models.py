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
from gradwire.cli.bench.compiled_trial import BARE, BASE, EAGER, FORMS, INSIDE, ONE_BUCKET, TORCH, Measured


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
    rows = {row.form: row for row in compiled_models.entries([measured(), measured(2.0)])}
    assert list(rows) == list(FORMS)
    inside = rows[INSIDE]
    assert inside.exposed is not None
    assert inside.exposed.median == pytest.approx(0.02)  # the slowest rank
    assert inside.to_none_overlapped == pytest.approx(0.25)
    assert rows[TORCH].to_none_overlapped == pytest.approx(0.5)
    assert rows[EAGER].to_none_overlapped is None
    assert inside.to_torch is not None
    assert inside.to_torch.of_medians == pytest.approx(11 / 12)
    assert inside.to_bare is not None
    assert inside.to_bare.of_medians == pytest.approx(1.25)
    assert rows[BARE].exposed is None
    assert rows[BARE].difference is None
    assert rows[TORCH].graph_breaks == 3
    assert rows[INSIDE].difference == 2e-8


def test_the_table_fits_80_columns() -> None:
    rows = compiled_models.entries([measured()])
    out = StringIO()
    Console(file=out, width=80).print(compiled_models._table(rows))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert re.search(r"│ DDP\(compile\(m\)\) +│ +110\.0 │ +10\.0 │ 1\.250 │ 0\.917 │ +0 │ +1e-08 │", out.getvalue())
    assert compiled_models._lines(rows)[0] == (
        "DDP(compile(m)) exposes 0.25 of the communication that a step without overlap waits for."
    )


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
    forms = ["--forms", "bare,inside,one bucket", "--hook", "quantize8", "--checkpointing", "--json", str(file)]
    assert main(["bench", "compile", *size, *forms]) == 0
    assert "compile(m)" in capsys.readouterr().out  # the whole name is wrapped where times are long
    found = json.loads(file.read_text())["forms"]
    bare = found.pop(BARE)
    assert set(bare) == {"step", "graph_breaks", "largest_difference"}
    assert bare["largest_difference"] is None  # its gradients are of one rank
    assert list(found) == [EAGER, INSIDE, ONE_BUCKET]
    assert all(form["graph_breaks"] == 0 and form["largest_difference"] < 1e-6 for form in found.values())
