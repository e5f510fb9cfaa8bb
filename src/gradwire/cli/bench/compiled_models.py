"""`gradwire bench compile`: a compiled transformer trained data-parallel over a link, in each form of torch.compile.

All forms live in the same rank processes and take turns; `compiled_trial.py` is what a rank does.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.cli.arguments import at_least, positive
from gradwire.cli.bench.compiled_trial import (
    BARE,
    BASE,
    BLOCKS,
    EAGER,
    FORMS,
    INSIDE,
    ONE_BUCKET,
    OUTSIDE,
    TORCH,
    Measured,
    Plan,
    run_forms,
)
from gradwire.cli.bench.models import Shape
from gradwire.cli.experiment.bar import bar
from gradwire.cli.experiment.bench_device import add_device_option, find_device
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.recipes import RECIPES, names_of
from gradwire.cli.experiment.report import MS, add_json_option, new_table, present
from gradwire.cli.experiment.timing import Ratio, Series, compare, slowest
from gradwire.cli.experiment.world import TIMEOUT_HELP, run_world
from gradwire.errors import UsageError

_TIMEOUT = 600
_HEAD = 64
"""Width of an attention head."""
_OVERLAPPED = (INSIDE, OUTSIDE, BLOCKS)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench compile` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compile",
        help="a compiled model over a link: step, exposed communication, graph breaks",
        description="Steps of a transformer compiled by torch.compile, on ranks of this machine joined by a simulated link, in "
        "each form: compiled inside gradwire's DDP, around it, and block by block, each with fullgraph=True; torch's DDP, "
        "compiled; and for comparison the uncompiled model, a compiled one whose gradients are reduced after backward, and one "
        "without DDP. Compiling takes minutes at first.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add("--blocks", type=at_least(1), default=12, help="blocks of the model (default: %(default)s)")
    add("--width", type=at_least(1), default=256, help="its width (default: %(default)s)")
    add("--tokens", type=at_least(1), default=128, help="tokens per sequence (default: %(default)s)")
    add("--batch", type=at_least(1), default=4, help="sequences per rank and step (default: %(default)s)")
    add("--ranks", type=at_least(1), default=2, help="number of ranks (default: %(default)s)")
    link = parser.add_mutually_exclusive_group()
    link.add_argument(
        "--link", type=positive, default=1000.0, metavar="MBIT", help="megabits per second (default: %(default)g)"
    )
    link.add_argument("--no-link", action="store_true", help="as fast as shared memory, or NCCL on cuda, allows")
    add("--latency-ms", type=positive, default=0.2, metavar="MS", help="of the link (default: %(default)g)")
    hooks = [name for name, recipe in RECIPES.items() if not recipe.steps_on_its_own]
    parser.add_argument(
        "--hook", choices=hooks, default="mean", metavar="HOOK", help="%(choices)s (default: %(default)s)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of every block")
    parser.add_argument(
        "--forms",
        type=names_of([form for form in FORMS if form != EAGER]),
        default=[form for form in FORMS if form != EAGER],
        metavar="A,B",
        help=f"{', '.join(form for form in FORMS if form != EAGER)} (default: all)",
    )
    parser.add_argument("--backend", default="inductor", metavar="NAME", help="of torch.compile (default: %(default)s)")
    add("--bucket-mb", type=positive, default=4.0, metavar="MB", help="size of buckets (default: %(default)g)")
    parser.add_argument("--bucket-views", action="store_true", help="gradient_as_bucket_view=True for every DDP")
    add("--steps", type=at_least(2), default=8, help="timed steps of each form (default: %(default)s)")
    add_device_option(parser)
    add("--timeout", type=at_least(1), default=_TIMEOUT, metavar="SECONDS", help=TIMEOUT_HELP)
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and show the results."""
    device = find_device("bench compile", args.device)
    heads, rest = divmod(args.width, _HEAD) if args.width >= _HEAD else (1, 0)
    if rest:
        raise UsageError(f"bench compile --width {args.width}: heads are {_HEAD} wide. Use a multiple of that.")
    if args.bucket_mb < 1 and TORCH in args.forms:
        raise UsageError(
            f"bench compile --bucket-mb {args.bucket_mb:g}: torch's compiled DDP takes no buckets below 1 MB. Use larger ones, or "
            "omit torch from --forms."
        )
    machine, console = describe(device), Console(highlight=False)
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
            name="bench compile",
            timeout=args.timeout,
            on_report=on_report,
        )
    rows = entries(ranks)
    settings = _settings(plan, args.ranks, ranks[0].elements)
    present(
        {**machine, **settings},
        [_table(rows)],
        _lines(rows),
        data={
            "benchmark": "compile",
            "machine": dict(machine),
            "settings": settings,
            "forms": {row.form: _as_json(row) for row in rows},
        },
        json_file=args.json,
        console=console,
    )
    return 0


def _settings(plan: Plan, ranks: int, elements: int) -> dict[str, str]:
    link = "none" if plan.mbit is None else f"{plan.mbit:g} Mbit/s and {plan.latency_ms:g} ms, simulated"
    model = f"transformer, {plan.shape.layers} blocks, {elements:,} elements ({elements * 4 / 1e6:.1f} MB float32)"
    return {
        "model": model + (", activation checkpoints" if plan.checkpointing else ""),
        "world": f"{ranks} ranks on {plan.device}, batch {plan.batch} x {plan.shape.context} tokens per rank; link: {link}",
        "hook": f"{plan.hook}: {RECIPES[plan.hook].words}; buckets of {plan.bucket_mb:g} MB"
        + (", gradients are views of them" if plan.bucket_views else ""),
        "measured": f"{plan.backend}; {plan.rounds} interleaved rounds of {_steps(plan.block)}, each after an untimed one; the "
        "slowest rank counts",
    }


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


@dataclass(frozen=True, slots=True)
class Entry:
    """One form: its step, and how it compares."""

    form: str
    step: Series
    base: Series | None
    """The step that exposed communication is counted from; None without DDP."""
    graph_breaks: int
    difference: float | None
    """None without DDP: gradients are of one rank."""
    to_bare: Ratio | None = None
    to_torch: Ratio | None = None
    to_none_overlapped: float | None = None
    """Exposed communication, as a fraction of that without overlap."""

    @property
    def exposed(self) -> Series | None:
        """What communication adds to the step, round by round."""
        if self.base is None:
            return None
        pairs = zip(self.step.seconds, self.base.seconds, strict=True)
        return Series(self.form, tuple(step - base for step, base in pairs))


def entries(ranks: Sequence[Measured]) -> list[Entry]:
    """The rows of the table."""
    first = ranks[0]
    series = {name: slowest(name, [rank.seconds[name] for rank in ranks]) for name in first.seconds}
    forms = [form for form in FORMS if form in series]
    rows = {
        form: Entry(
            form,
            series[form],
            series.get(form + BASE),
            max(rank.graph_breaks[form] for rank in ranks),
            max((rank.difference[form] for rank in ranks if form in rank.difference), default=None),
        )
        for form in forms
    }
    return [_compared(row, rows) for row in rows.values()]


def _compared(row: Entry, rows: Mapping[str, Entry]) -> Entry:
    def to(peer: str, forms: Sequence[str]) -> Ratio | None:
        return compare(row.step, rows[peer].step) if peer in rows and row.form in forms else None

    share = None
    unoverlapped = rows[ONE_BUCKET].exposed if ONE_BUCKET in rows else None
    if unoverlapped and row.exposed and row.form in (*_OVERLAPPED, TORCH) and unoverlapped.median > 0:
        share = row.exposed.median / unoverlapped.median
    return replace(
        row,
        to_bare=to(BARE, (*_OVERLAPPED, ONE_BUCKET, TORCH)),
        to_torch=to(TORCH, _OVERLAPPED),
        to_none_overlapped=share,
    )


def _table(rows: Sequence[Entry]) -> Table:
    caption = (
        "ms per step: median, and quartiles below it. Exposed: what the link adds (without a link: extra time over "
        "no_sync), and below it the share of that without overlap. Then the ratio to the step without DDP, and to torch's: "
        "of medians, and below it over rounds. Difference: of any gradient from the uncompiled model's, averaged by mean."
    )
    columns = ("form", "step", "exposed", "to\nbare", "to\ntorch", "graph\nbreaks", "differ-\nence")
    table = new_table(*columns, caption=caption)
    for row in rows:
        low, high = row.step.quartiles
        share = "" if row.to_none_overlapped is None else f"\n[dim]{row.to_none_overlapped:.2f}[/dim]"
        table.add_row(
            FORMS[row.form],
            f"{row.step.median * MS:.1f}\n[dim]{low * MS:.1f}…{high * MS:.1f}[/dim]",
            "" if row.exposed is None else f"{row.exposed.median * MS:.1f}{share}",
            *("" if ratio is None else ratio.cell(3) for ratio in (row.to_bare, row.to_torch)),
            str(row.graph_breaks),
            "" if row.difference is None else f"{row.difference:.0e}",
        )
    return table


def _lines(rows: Sequence[Entry]) -> list[str]:
    shares = [(row, row.to_none_overlapped) for row in rows if row.form in _OVERLAPPED]
    return [
        f"{FORMS[row.form]} exposes {share:.2f} of the communication that a step without overlap waits for."
        for row, share in shares
        if share is not None
    ]


def _as_json(row: Entry) -> Mapping[str, Any]:
    data: dict[str, Any] = {
        "step": row.step.as_json("ms", MS),
        "graph_breaks": row.graph_breaks,
        "largest_difference": row.difference,
    }
    for name, series in (("base", row.base), ("exposed", row.exposed)):
        if series is not None:
            data[name] = series.as_json("ms", MS)
    for name, ratio in (("ratio_to_bare", row.to_bare), ("ratio_to_torch", row.to_torch)):
        if ratio is not None:
            data[name] = ratio.as_json()
    if row.to_none_overlapped is not None:
        data["exposed_to_no_overlap"] = row.to_none_overlapped
    return data
