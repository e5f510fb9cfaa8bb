"""`hooks`: computing time, bytes and error of each communication hook, over bucket sizes, next to torch's own.

`hook_timing.py` measures one hook.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks import peers, plot
from benchmarks.hook_timing import Ours, Torchs, bucket, gradients
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed, size_words, time_words
from benchmarks.timing import Rounds, Series, compare, interleave
from benchmarks.torch_hooks import DENSE_STEPS, LEFT_OUT, NCCL_HOOKS, TORCH_HOOKS
from benchmarks.workload import find_device, settled
from benchmarks.world import bar
from gradwire.errors import UsageError
from gradwire.hooks.named import NAMED_HOOKS

_WARM_UP = 3
PEERS = {
    "mean": "torch-allreduce",
    "bf16": "torch-bf16",
    "fp16": "torch-fp16",
    "quantize8": "torch-quantize",
    "power_sgd": "torch-powersgd",
}
"""The torch hook that corresponds to one of ours."""
PARTS = ("compress", "middle", "decompress")


@dataclass(frozen=True, slots=True)
class Measured:
    """All hooks at one size: by name, the series of each part and of the total, bytes and error."""

    nbytes: int
    hooks: Mapping[str, Mapping[str, Any]]


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    device = find_device("hooks", args.device)
    odd = [size for size in args.sizes if size % 4]
    if odd:
        raise UsageError(
            f"hooks --sizes: {odd[0]} bytes are not a whole number of float32 elements. Use multiples of 4."
        )
    plot.check_plot("--plot", args.plot)
    names, machine = _names(args.hooks, args.device), describe(device)
    world = peers.world_of_one(device) if set(names) & set(NCCL_HOOKS) else nullcontext()
    with settled(one_thread=True), world:
        measured = [_measure(size, names, args.ranks, args.rounds, device, console) for size in args.sizes]
    settings = {
        "bucket": "float32 matrices of 1024 columns, normal random numbers; one CPU thread",
        "ranks": f"{args.ranks} simulated, the first is timed; torch's hooks on one rank, bytes as for {args.ranks}",
        "measured": f"{args.rounds} interleaved rounds after {_WARM_UP} of warm-up; medians; "
        + ("events on the stream" if device.type == "cuda" else "wall time"),
    }
    if args.plot is not None:
        draw(args, measured, machine)
    figures = [figures_of(one) for one in measured]
    lines = [*lines_of(figures), *([] if args.device == "cuda" else [LEFT_OUT])]
    return Result("hooks", machine, settings, figures, lines)


def _known() -> list[str]:
    """Hooks that process gradients; those that act on parameters have nothing to measure here."""
    return [*(name for name, hook in NAMED_HOOKS.items() if not hook.needs_optimizer), *TORCH_HOOKS, *NCCL_HOOKS]


def _names(asked: Sequence[str] | None, device: str) -> list[str]:
    names = _known() if asked is None else list(asked)
    if device == "cpu":
        if asked is not None and set(names) & set(NCCL_HOOKS):
            raise UsageError(f"hooks --hooks {','.join(asked)}: {LEFT_OUT} Pass --device cuda, or omit them.")
        names = [name for name in names if name not in NCCL_HOOKS]
    return names


def _measure(
    nbytes: int, names: Sequence[str], ranks: int, rounds: int, device: torch.device, console: Console
) -> Measured:
    spec = bucket(nbytes, device)
    brought = gradients(spec, ranks)
    with ExitStack() as stack, bar(console, size_words(nbytes), rounds) as on_report:
        runs: dict[str, Ours | Torchs] = {}
        for name in names:
            if name in NAMED_HOOKS:
                runs[name] = Ours(NAMED_HOOKS[name].build(), spec, brought)
                continue
            if name in NCCL_HOOKS:
                register, sent = NCCL_HOOKS[name]
                run = Torchs(register, spec, brought, nccl_bytes=(ranks - 1) * sent(spec.numel))
            else:
                late = DENSE_STEPS if name == "torch-powersgd" else 0
                run = Torchs(TORCH_HOOKS[name], spec, brought, lossy_after=late)
            stack.callback(run.close)
            runs[name] = run
        interleave(runs, Rounds(rounds, warm_up=_WARM_UP), after_round=on_report)
        return Measured(nbytes, {name: _row(name, run, rounds) for name, run in runs.items()})


def _row(name: str, run: Ours | Torchs, rounds: int) -> dict[str, Any]:
    assert run.outcome is not None  # every run has made at least `_WARM_UP` reductions
    splits = run.splits[-rounds:]
    return {part: Series(name, tuple(getattr(split, part) for split in splits)) for part in (*PARTS, "total")} | {
        "wire_bytes": run.outcome.wire_bytes,
        "error": run.outcome.error,
    }


def figures_of(measured: Measured) -> Figures:
    """One row per hook, with the ratio to torch's corresponding hook."""
    hooks = measured.hooks
    rows = {
        name: {
            **row,
            **{f"{part}_median": row[part].median or None for part in PARTS},
            "ratio_to_torch": compare(row["total"], hooks[PEERS[name]]["total"]) if PEERS.get(name) in hooks else None,
        }
        for name, row in hooks.items()
    }
    columns = (
        Column("compress_median", "com-\npress", _ms),
        Column("middle_median", "middle", _ms),
        Column("decompress_median", "decom-\npress", _ms),
        Column("total", "total", _ms),
        Column("wire_bytes", "wire\nerror", _bytes, "error", "{:.1e}".format),
        Column("ratio_to_torch", "of\ntorch's", fixed(2)),
    )
    caption = (
        "ms: medians, and the quartiles of the total below it. Wire: bytes that a rank sends, below it the error of the "
        "first step, relative to the true mean. Of torch's: our total divided by that of torch's corresponding hook, of medians "
        "and below it the median over rounds."
    )
    return Figures(rows, columns, caption, title=f"a bucket of {size_words(measured.nbytes)}", first="hook")


def _ms(seconds: float) -> str:
    """
    >>> _ms(0.0123456), _ms(0.1234), _ms(12e-6)
    ('12.3', '123', '0.012')
    """
    value = seconds * 1e3
    return f"{value:.{3 - sum(value >= limit for limit in (1, 10, 100))}f}"


def _bytes(count: float) -> str:
    """
    >>> _bytes(26214400), _bytes(2104)
    ('26.2 MB', '2.1 kB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def lines_of(figures: Sequence[Figures]) -> list[str]:
    """The ratios to torch's hooks, as sentences."""
    return [
        f"{one.title.removeprefix('a bucket of ')}: {name} computes {ratio.of_medians:.2f} times as long as {PEERS[name]}."
        for one in figures
        for name, row in one.rows.items()
        if (ratio := row["ratio_to_torch"]) is not None
    ]


def draw(args: argparse.Namespace, measured: Sequence[Measured], machine: Mapping[str, str]) -> None:
    """For each size one bar per hook, in three parts, with the bytes that it sends next to it."""
    panels = []
    for one in measured:
        dense = one.hooks["mean"]["wire_bytes"] if "mean" in one.hooks else None
        bars = []
        for name, row in one.hooks.items():
            parts, end = [], 0.0
            for part in PARTS:
                begin, end = end, end + row[part].median * 1e3
                parts.append((begin, end, part))
            note = time_words(row["total"].median)
            note += "" if dense is None else f", sends {row['wire_bytes'] / dense * 100:.3g} %"
            bars.append(plot.Bar(name, parts, note))
        panels.append(plot.Panel(f"a bucket of {size_words(one.nbytes)}", "ms of computing (medians)", bars=bars))
    footer = f"{machine.get('gpu', machine['cpu'])}; {machine['software']}"
    plot.draw(args.plot, panels, title="computing time of hooks", footer=footer)
