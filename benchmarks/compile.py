"""`compile`: a compiled transformer trained data-parallel over a link, in each form of torch.compile.

All forms live in the same rank processes and take turns; `compile_rank.py` is what a rank does.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.compile_rank import (
    BARE,
    BASE,
    BLOCKS,
    FORMS,
    INSIDE,
    ONE_BUCKET,
    OUTSIDE,
    TORCH,
    Measured,
    Plan,
    run_forms,
)
from benchmarks.machine import describe
from benchmarks.models import Shape
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.timing import compare, slowest
from benchmarks.workload import find_device
from benchmarks.world import bar, run_world
from gradwire.errors import UsageError
from gradwire.hooks.named import NAMED_HOOKS

_HEAD = 64
"""Width of an attention head."""
_OVERLAPPED = (INSIDE, OUTSIDE, BLOCKS)


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    device = find_device("compile", args.device)
    heads, rest = divmod(args.width, _HEAD) if args.width >= _HEAD else (1, 0)
    if rest:
        raise UsageError(f"compile --width {args.width}: heads are {_HEAD} wide. Use a multiple of that.")
    if args.bucket_mb < 1 and TORCH in args.forms:
        raise UsageError(
            f"compile --bucket-mb {args.bucket_mb:g}: torch's compiled DDP takes no buckets below 1 MB. Use larger ones, or "
            "omit torch from --forms."
        )
    machine = describe(device)
    plan = Plan(
        shape=Shape(width=args.width, layers=args.blocks, heads=heads, symbols=512, context=args.tokens),
        batch=args.batch,
        hook=args.hook,
        mbit=None if args.no_link else args.link,
        latency_ms=args.latency_ms,
        checkpointing=args.checkpointing,
        backend=args.backend,
        device=args.device,
        bucket_mb=args.bucket_mb,
        bucket_views=args.bucket_views,
        rounds=args.steps,
        forms=tuple(args.forms),
    )
    with bar(console, f"{args.ranks} ranks", plan.rounds) as on_report:
        ranks: list[Measured] = run_world(
            functools.partial(run_forms, plan),
            args.ranks,
            name="compile",
            timeout=args.timeout,
            on_report=on_report,
        )
    figures, lines = figures_of(ranks)
    return Result("compile", machine, _settings(plan, args.ranks, ranks[0].elements), [figures], lines)


def _settings(plan: Plan, ranks: int, elements: int) -> dict[str, str]:
    link = "none" if plan.mbit is None else f"{plan.mbit:g} Mbit/s and {plan.latency_ms:g} ms, simulated"
    model = f"transformer, {plan.shape.layers} blocks, {elements:,} elements ({elements * 4 / 1e6:.1f} MB float32)"
    return {
        "model": model + (", activation checkpoints" if plan.checkpointing else ""),
        "world": f"{ranks} ranks on {plan.device}, batch {plan.batch} x {plan.shape.context} tokens per rank; link: {link}",
        "hook": f"{plan.hook}: {NAMED_HOOKS[plan.hook].words}; buckets of {plan.bucket_mb:g} MB"
        + (", gradients are views of them" if plan.bucket_views else ""),
        "measured": f"{plan.backend}; {plan.rounds} interleaved rounds of {_steps(plan.block)}, each after an untimed one; the "
        "slowest rank counts",
    }


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def figures_of(ranks: Sequence[Measured]) -> tuple[Figures, list[str]]:
    """A row for each form: its step, what communication adds to it, and how it compares with the others."""
    first = ranks[0]
    series = {name: slowest(name, [rank.seconds[name] for rank in ranks]) for name in first.seconds}
    exposed = {form: series[form].minus(series[form + BASE]) for form in FORMS if form + BASE in series}
    unoverlapped = exposed[ONE_BUCKET].median if ONE_BUCKET in exposed else 0.0
    rows: dict[str, dict[str, Any]] = {}
    lines = []
    for form in (form for form in FORMS if form in series):
        rows[form] = row = {
            "name": FORMS[form],
            "step": series[form],
            "graph_breaks": max(rank.graph_breaks[form] for rank in ranks),
            # Without DDP gradients are of one rank, and there is nothing to communicate.
            "largest_difference": max((r.difference[form] for r in ranks if form in r.difference), default=None),
        }
        if form in exposed:
            row |= {"base": series[form + BASE], "exposed": exposed[form]}
        if BARE in series and form in (*_OVERLAPPED, ONE_BUCKET, TORCH):
            row["ratio_to_bare"] = compare(series[form], series[BARE])
        if TORCH in series and form in _OVERLAPPED:
            row["ratio_to_torch"] = compare(series[form], series[TORCH])
        if unoverlapped > 0 and form in (*_OVERLAPPED, TORCH):
            row["exposed_to_no_overlap"] = share = exposed[form].median / unoverlapped
            if form in _OVERLAPPED:
                lines.append(
                    f"{FORMS[form]} exposes {share:.2f} of the communication that a step without overlap waits for."
                )
    ms = fixed(1, 1e3)
    columns = (
        Column("step", "step", ms),
        Column("exposed", "exposed", ms, "exposed_to_no_overlap", fixed(2)),
        Column("ratio_to_bare", "to\nbare", fixed(3)),
        Column("ratio_to_torch", "to\ntorch", fixed(3)),
        Column("graph_breaks", "graph\nbreaks"),
        Column("largest_difference", "differ-\nence", "{:.0e}".format),
    )
    caption = (
        "ms per step: median, and quartiles below it. Exposed: what the link adds (without a link: extra time over "
        "no_sync), and below it the share of that without overlap. Then the ratio to the step without DDP, and to torch's: "
        "of medians, and below it over rounds. Difference: of any gradient from the uncompiled model's, averaged by mean."
    )
    return Figures(rows, columns, caption, first="form"), lines
