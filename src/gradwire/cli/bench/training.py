"""`gradwire bench training`: a transformer trained data-parallel by gradwire over shared memory and by torch over gloo.

Both live in the same rank processes and take turns; `trial.py` is what a rank does. In addition to the time of a step it reports
the exposed communication: the extra time over the same step under `no_sync`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.cli.arguments import at_least
from gradwire.cli.bench.models import SIZES
from gradwire.cli.bench.trial import QUIET, Times, Trial, run_trial
from gradwire.cli.experiment import peers
from gradwire.cli.experiment.bar import bar
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.report import MS, add_json_option, new_table, present
from gradwire.cli.experiment.timing import Ratio, Series, compare, slowest
from gradwire.cli.experiment.world import TIMEOUT, TIMEOUT_HELP, run_world
from gradwire.errors import UsageError

_BLOCK = 2
_TOKENS = 16
"""Tokens per sequence. Few, as when many ranks share a batch: communication is then significant compared with computation."""
_WORDS = {
    peers.BARE: "bare model, 1 rank",
    peers.TORCH: "torch DDP, gloo",
    peers.OURS: "gradwire DDP, shm",
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench training` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "training",
        help="a training step: gradwire over shared memory, torch over gloo",
        description="Steps of a transformer on ranks of this machine, one thread each, float32: gradwire's "
        "DistributedDataParallel over shared memory and torch's over gloo, with default flags and with "
        "gradient_as_bucket_view, and each of them also without communication, under no_sync.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add(
        "--size",
        choices=tuple(SIZES),
        default="10m",
        metavar="SIZE",
        help="size of the model, of GPT-2's shape: %(choices)s (default: %(default)s)",
    )
    add("--ranks", type=at_least(2), default=2, help="number of ranks (default: %(default)s)")
    add("--batch", type=at_least(1), default=1, help="sequences per rank and step (default: %(default)s)")
    add("--tokens", type=at_least(1), default=_TOKENS, help="tokens per sequence (default: %(default)s)")
    add("--steps", type=at_least(4), default=30, help="timed steps of each variant (default: %(default)s)")
    add("--timeout", type=at_least(1), default=TIMEOUT, metavar="SECONDS", help=TIMEOUT_HELP)
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and show the results."""
    machine, console = describe(), Console(highlight=False)
    context = SIZES[args.size].context
    if args.tokens > context:
        raise UsageError(
            f"bench training --size {args.size} --tokens {args.tokens}: the model's context is {context} tokens. "
            "Use fewer tokens, or a larger model."
        )
    trial = Trial(size=args.size, batch=args.batch, tokens=args.tokens, rounds=args.steps // _BLOCK, block=_BLOCK)
    with bar(console, f"{args.ranks} ranks", trial.rounds) as on_report:
        times: list[Times] = run_world(
            functools.partial(run_trial, trial),
            args.ranks,
            name=f"bench training --size {args.size}",
            timeout=args.timeout,
            on_report=on_report,
        )
    series = {name: slowest(name, [rank.seconds[name] for rank in times]) for name in times[0].seconds}
    settings = _settings(trial, args.ranks, times[0])
    rows = entries(series)
    present(
        {**machine, **settings},
        [_table(rows)],
        _lines(rows),
        data=_as_json(machine, settings, rows),
        json_file=args.json,
        console=console,
    )
    return 0


def _settings(trial: Trial, ranks: int, times: Times) -> dict[str, str]:
    return {
        "model": f"transformer, {times.elements:,} elements in {times.parameters} parameters, float32",
        "world": f"{ranks} ranks, one thread each, batch {trial.batch} x {trial.tokens} tokens per rank",
        "step": "zero_grad(), forward, backward, SGD",
        "measured": f"{trial.rounds} interleaved rounds of {trial.block} steps each, after one untimed step; the slowest rank "
        "counts",
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """One variant: its step, the same step under no_sync, and how it compares with torch's with the same flags."""

    name: str
    step: Series
    quiet: Series | None = None
    to_torch: Ratio | None = None

    @property
    def words(self) -> str:
        """The variant's display name."""
        kind, views, _ = self.name.partition(peers.VIEWS)
        return _WORDS[kind] + views

    @property
    def exposed(self) -> Series | None:
        """What communication adds to the step, round by round."""
        if self.quiet is None:
            return None
        pairs = zip(self.step.seconds, self.quiet.seconds, strict=True)
        return Series(self.name, tuple(step - quiet for step, quiet in pairs))


def entries(series: Mapping[str, Series]) -> list[Entry]:
    """The rows of the table."""
    rows = [Entry(peers.BARE, series[peers.BARE])]
    for flags in ("", peers.VIEWS):
        theirs, ours = peers.TORCH + flags, peers.OURS + flags
        rows.append(Entry(theirs, series[theirs], series[theirs + QUIET]))
        rows.append(Entry(ours, series[ours], series[ours + QUIET], compare(series[ours], series[theirs])))
    return rows


def _table(rows: Sequence[Entry]) -> Table:
    caption = (
        "ms per step: median, and quartiles below it; shm is shared memory. Exposed: extra time over the step under "
        "no_sync, computed per round. Ratio: our step to torch's; of medians, and below it the median over rounds."
    )
    table = new_table("variant", "step", "under\nno_sync", "exposed", "ratio", caption=caption)
    for row in rows:
        ratio = "" if row.to_torch is None else row.to_torch.cell(3)
        table.add_row(row.words, *(_cell(s) for s in (row.step, row.quiet, row.exposed)), ratio)
    return table


def _cell(series: Series | None) -> str:
    if series is None:
        return ""
    low, high = series.quartiles
    return f"{series.median * MS:.1f}\n[dim]{low * MS:.1f}…{high * MS:.1f}[/dim]"


def _lines(rows: Sequence[Entry]) -> list[str]:
    lines = []
    by_name = {row.name: row for row in rows}
    for flags, words in (("", "default flags"), (peers.VIEWS, "bucket views")):
        theirs, ours = by_name[peers.TORCH + flags], by_name[peers.OURS + flags]
        if ours.to_torch is None or ours.exposed is None or theirs.exposed is None:
            continue
        lines.append(
            f"With {words} gradwire's step takes {ours.to_torch.of_medians:.2f} of torch's; exposed communication "
            f"takes {ours.exposed.median * MS:.1f} ms of it, torch's {theirs.exposed.median * MS:.1f} ms."
        )
    return lines


def _as_json(machine: Mapping[str, str], settings: Mapping[str, str], rows: Sequence[Entry]) -> dict[str, Any]:
    return {
        "benchmark": "training",
        "machine": dict(machine),
        "settings": dict(settings),
        "variants": {row.name: _entry_as_json(row) for row in rows},
    }


def _entry_as_json(row: Entry) -> dict[str, Any]:
    data: dict[str, Any] = {
        key: series.as_json("ms", MS)
        for key, series in (("step", row.step), ("no_sync", row.quiet), ("exposed", row.exposed))
        if series is not None
    }
    if row.to_torch is not None:
        data["ratio_to_torch"] = row.to_torch.as_json()
    return data
