"""The command line of benchmarks: choices that are repeated in `options.py`, and help that imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import compile_rank, models, options, parity_rank, slowlink_contenders, slowlink_rank, torch_hooks
from benchmarks.__main__ import main
from benchmarks.collective_contenders import OPERATIONS
from gradwire.hooks.named import NAMED_HOOKS


def test_repeated_choices_are_those_of_the_benchmarks():
    local = {name for name, hook in NAMED_HOOKS.items() if hook.needs_optimizer}
    assert tuple(name for name in NAMED_HOOKS if name not in local) == options.HOOKS
    assert set(options.LOCAL_HOOKS) == local
    assert tuple(torch_hooks.TORCH_HOOKS) == options.TORCH_HOOKS
    assert tuple(torch_hooks.NCCL_HOOKS) == options.NCCL_HOOKS
    assert tuple(models.SIZES) == options.SIZES
    assert tuple(slowlink_rank.SIZES) == options.LEARNER_SIZES
    assert tuple(form for form in compile_rank.FORMS if form != compile_rank.EAGER) == options.FORMS
    assert options.OPERATIONS == OPERATIONS
    assert {task: made.steps for task, made in parity_rank.TASKS.items()} == options.TASKS
    assert (options.REFERENCE, *options.CONTENDERS) == tuple(slowlink_contenders.CONTENDERS)


def test_the_reference_runs_first():
    names = slowlink_contenders.default_names()
    assert names[0] == slowlink_contenders.REFERENCE
    assert set(names) <= set(slowlink_contenders.CONTENDERS)


@pytest.mark.parametrize("command", ["", *options.BENCHMARKS])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ending:
        main([*filter(None, [command]), "--help"])
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) < 80
    assert "%%" not in out  # argparse formats help texts, and not descriptions


def test_help_imports_nothing_heavy():
    code = "import sys, benchmarks.__main__ as m; m.parser().format_help(); print(*{'torch', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
