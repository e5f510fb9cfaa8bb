"""`training`: a transformer trained data-parallel by gradwire over shared memory and by torch over gloo.

Both live in the same rank processes and take turns; `training_rank.py` is what a rank does. Exposed communication is the extra time
of a step over the same step under `no_sync`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks import peers
from benchmarks.machine import describe
from benchmarks.models import SIZES
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.timing import Series, compare, slowest
from benchmarks.training_rank import QUIET, Times, Trial, run_trial
from benchmarks.world import bar, run_world
from gradwire.errors import UsageError

_BLOCK = 2
_WORDS = {
    peers.BARE: "bare model, 1 rank",
    peers.TORCH: "torch DDP, gloo",
    peers.OURS: "gradwire DDP, shm",
}


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    machine, context = describe(), SIZES[args.size].context
    if args.tokens > context:
        raise UsageError(
            f"training --size {args.size} --tokens {args.tokens}: the model's context is {context} tokens. "
            "Use fewer tokens, or a larger model."
        )
    trial = Trial(size=args.size, batch=args.batch, tokens=args.tokens, rounds=args.steps // _BLOCK, block=_BLOCK)
    with bar(console, f"{args.ranks} ranks", trial.rounds) as on_report:
        times: list[Times] = run_world(
            functools.partial(run_trial, trial),
            args.ranks,
            name=f"training --size {args.size}",
            timeout=args.timeout,
            on_report=on_report,
        )
    settings = {
        "model": f"transformer, {times[0].elements:,} elements in {times[0].parameters} parameters, float32",
        "world": f"{args.ranks} ranks, one thread each, batch {trial.batch} x {trial.tokens} tokens per rank",
        "step": "zero_grad(), forward, backward, SGD",
        "measured": f"{trial.rounds} interleaved rounds of {trial.block} steps each, after one untimed step; the slowest rank "
        "counts",
    }
    figures, lines = figures_of(
        {name: slowest(name, [rank.seconds[name] for rank in times]) for name in times[0].seconds}
    )
    return Result("training", machine, settings, [figures], lines)


def figures_of(series: Mapping[str, Series]) -> tuple[Figures, list[str]]:
    """A row for each variant: its step, the same step under no_sync, what communication adds, and the ratio to torch's."""
    rows: dict[str, dict[str, Any]] = {peers.BARE: {"name": _WORDS[peers.BARE], "step": series[peers.BARE]}}
    lines = []
    for flags, words in (("", "default flags"), (peers.VIEWS, "bucket views")):
        for kind in (peers.TORCH, peers.OURS):
            step, quiet = series[kind + flags], series[kind + flags + QUIET]
            rows[kind + flags] = {
                "name": _WORDS[kind] + flags,
                "step": step,
                "no_sync": quiet,
                "exposed": step.minus(quiet),
            }
        theirs, ours = rows[peers.TORCH + flags], rows[peers.OURS + flags]
        ours["ratio_to_torch"] = compare(ours["step"], theirs["step"])
        lines.append(
            f"With {words} gradwire's step takes {ours['ratio_to_torch'].of_medians:.2f} of torch's; exposed communication "
            f"takes {ours['exposed'].median * 1e3:.1f} ms of it, torch's {theirs['exposed'].median * 1e3:.1f} ms."
        )
    ms = fixed(1, 1e3)
    columns = (
        Column("step", "step", ms),
        Column("no_sync", "under\nno_sync", ms),
        Column("exposed", "exposed", ms),
        Column("ratio_to_torch", "ratio", fixed(3)),
    )
    caption = (
        "ms per step: median, and quartiles below it; shm is shared memory. Exposed: extra time over the step under "
        "no_sync, computed per round. Ratio: our step to torch's; of medians, and below it the median over rounds."
    )
    return Figures(rows, columns, caption), lines
