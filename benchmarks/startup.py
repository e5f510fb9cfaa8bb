"""`startup`: how long ranks of `gradwire run` take to start, against one `python script.py`, of a script that only imports.

Whole commands in turns: the script by `python`, by `gradwire run`, and with `--no-preload`, where every rank imports torch.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed, time_words
from benchmarks.timing import Rounds, Series, compare, interleave
from benchmarks.world import bar

ALONE = "python script.py"
_SCRIPT = "import time\nimport torch, gradwire\nprint(time.monotonic(), flush=True)\n"


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    machine, begin = describe(), f"gradwire run --nproc {args.ranks}"
    options = ["-m", "gradwire", "run", "--nproc", str(args.ranks)]
    commands = {ALONE: [], begin: options, f"{begin} --no-preload": [*options, "--no-preload"]}
    apart: dict[str, list[float]] = {name: [] for name in commands}

    def start(name: str) -> None:
        command = [sys.executable, *commands[name], str(script)]
        env = {**os.environ, "XDG_STATE_HOME": folder}  # where runs are kept
        pipe = subprocess.PIPE
        written = subprocess.run(command, env=env, stdout=pipe, text=True, check=True, timeout=args.timeout).stdout
        times = [float(line.split()[-1]) for line in written.splitlines()]
        apart[name].append(max(times) - min(times))

    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder, bar(console, "starting", args.rounds) as show:
        script = Path(folder) / "script.py"
        script.write_text(_SCRIPT)
        variants = {name: functools.partial(start, name) for name in commands}
        series = interleave(variants, Rounds(args.rounds, warm_up=1), after_round=show)
    rows: dict[str, dict[str, Any]] = {name: {"whole": one} for name, one in series.items()}
    for name in list(rows)[1:]:
        rows[name]["ratio"] = compare(series[name], series[ALONE])
        rows[name]["apart"] = Series(name, tuple(apart[name][1:]))
    columns = [
        Column("whole", "whole", time_words),
        Column("ratio", "to python", fixed(2)),
        Column("apart", "first to last rank", time_words),
    ]
    caption = "Median, and quartiles below it. Ratio: of medians, and below it the median over rounds."
    settings = {
        "script": "imports torch and gradwire, and writes a line",
        "measured": f"{args.rounds} interleaved rounds",
    }
    return Result("startup", machine, settings, [Figures(rows, columns, caption, first="command")])
