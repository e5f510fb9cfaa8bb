"""`collectives`: one collective by every available implementation, over sizes and numbers of ranks, in one run.

Ranks are processes that the command starts, under mpirun if Open MPI takes part; all contenders live in the same processes
and take turns. `collective_contenders.py` is what a rank does.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks import collective_contenders as contenders, mpi, plot
from benchmarks.collective_contenders import FLOAT32, GLOO, HEAP, MEMCPY, MPI, ORDINARY, Key, Race, run_race
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed, size_words, time_words
from benchmarks.timing import Ratio, Series, compare, slowest
from benchmarks.world import bar, run_world, warn_if_crowded
from gradwire.errors import UsageError

RATIOS = ((GLOO, HEAP), (MPI, HEAP), (HEAP, MEMCPY), (GLOO, ORDINARY), (MPI, ORDINARY))
"""What is divided by what."""
_BUCKET = 25 << 20
"""The size whose ratios are stated as sentences: torch DDP's default bucket."""
_TURN = 0.015
"""Minimum seconds of a contender's turn, if a call is shorter."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """All times of a world of `ranks` ranks."""

    ranks: int
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    series: Mapping[Key, Series]
    blocks: Mapping[Key, int]

    @property
    def ratios(self) -> list[tuple[str, str]]:
        """Those of `RATIOS` whose two sides took part."""
        return [(a, b) for a, b in RATIOS if a in self.names and b in self.names]

    def ratio(self, a: str, b: str, nbytes: int) -> Ratio:
        """`a` as a fraction of `b` at one size."""
        return compare(self.series[a, nbytes], self.series[b, nbytes])


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    plot.check_plot("--plot", args.plot)
    sizes = rounded_sizes(args.sizes, args.op, args.ranks)
    warn_if_crowded(max(args.ranks))
    machine = describe()
    launcher = mpi.find() if args.mpi == "auto" else "omitted by --mpi none"
    names = [name for name in contenders.CONTENDERS if name != MPI or isinstance(launcher, mpi.OpenMPI)]
    race = Race(op=args.op, sizes=sizes, rounds=args.rounds, turn=_TURN, names=tuple(names))
    sweeps = [_measure(race, ranks, launcher, args.timeout, console) for ranks in args.ranks]
    if args.plot is not None:
        draw(args, sweeps, machine)
    figures = [one for sweep in sweeps for one in (times_of(sweep, args.op), ratios_of(sweep))]
    return Result("collectives", machine, _settings(args.op, race, launcher, args.ranks), figures, lines_of(sweeps))


def rounded_sizes(sizes: Sequence[int], op: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """The sizes at which `op` is measured: those whose tensor is split are rounded up to one element per part."""
    if op in contenders.GATHERED:
        whole = FLOAT32 * math.lcm(*ranks)
        return tuple(sorted({-(-size // whole) * whole for size in sizes}))
    odd = [size for size in sizes if size % FLOAT32]
    if odd:
        raise UsageError(
            f"collectives --sizes: {odd[0]} bytes are not a whole number of float32 elements. Use multiples of {FLOAT32}."
        )
    return tuple(sizes)


def _measure(race: Race, ranks: int, launcher: mpi.OpenMPI | str, timeout: float, console: Console) -> Sweep:
    with bar(console, f"{ranks} ranks", race.rounds) as on_report:
        results = run_world(
            functools.partial(run_race, race),
            ranks,
            name=f"collectives --op {race.op}",
            on=launcher if isinstance(launcher, mpi.OpenMPI) else (),
            timeout=timeout,
            on_report=on_report,
        )
    series = {key: slowest(key[0], [result.seconds[key] for result in results]) for key in race.keys}
    return Sweep(ranks, race.sizes, race.names, series, results[0].blocks)


def _settings(op: str, race: Race, launcher: mpi.OpenMPI | str, ranks: Sequence[int]) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    if isinstance(launcher, mpi.OpenMPI):
        peer = f"{launcher.version} through mpi4py; all ranks are started by mpirun, not bound to cores"
        if max(ranks) > cores:
            peer += "; with more ranks than cores it yields when idle"
    else:
        peer = f"no column: {launcher}"
    return {
        "operation": f"{op}, {'SUM, ' if 'reduce' in op else ''}float32, one thread per rank, "
        f"{size_words(race.sizes[0])} to {size_words(race.sizes[-1])}",
        MPI: peer,
        "measured": f"{race.rounds} interleaved rounds; a turn is as many calls in a row as take {race.turn * 1e3:.0f} ms, at "
        "least one, after one untimed call; the slowest rank counts",
        "memory": "heap: tensors from group.allocate; all others: ordinary tensors; memcpy: dst.copy_(src) on all ranks at once",
        "values": "zeros, float32, in memory that was touched before; results are checked once before timing",
    }


def times_of(sweep: Sweep, op: str) -> Figures:
    """One row per size, one column per contender."""
    rows = {
        size_words(nbytes): {name: sweep.series[name, nbytes] for name in sweep.names}
        | {"bytes": nbytes, "calls_per_turn": {name: sweep.blocks[name, nbytes] for name in sweep.names}}
        for nbytes in sweep.sizes
    }
    columns = [
        Column(name, name.replace("gradwire ", "gradwire\n").replace("Open MPI", "Open\nMPI"), time_words)
        for name in sweep.names
    ]
    caption = "Time per call: median, and quartiles below it."
    return Figures(rows, columns, caption, title=f"{op}, {sweep.ranks} ranks", first="size")


def ratios_of(sweep: Sweep) -> Figures:
    """One row per size, one column per ratio."""
    rows = {
        size_words(nbytes): {_ratio(a, b): sweep.ratio(a, b, nbytes) for a, b in sweep.ratios} for nbytes in sweep.sizes
    }
    columns = [Column(_ratio(a, b), f"{_short(a)} /\n{_short(b)}", fixed(2)) for a, b in sweep.ratios]
    caption = (
        "Ratio of medians, and below it the median of the ratios of single rounds. Above 1, gradwire is faster; for "
        "heap / memcpy, below."
    )
    return Figures(rows, columns, caption, title=f"ratios, {sweep.ranks} ranks", first="size")


def lines_of(sweeps: Sequence[Sweep]) -> list[str]:
    """The ratios at the size of a bucket, as sentences."""
    lines = []
    for sweep in sweeps:
        if _BUCKET in sweep.sizes:
            ratios = [
                f"{_short(a)} takes {sweep.ratio(a, b, _BUCKET).of_medians:.2f} times as long as {_short(b)}"
                for a, b in sweep.ratios
            ]
            lines.append(f"{size_words(_BUCKET)}, {sweep.ranks} ranks: {'; '.join(ratios)}.")
    return lines


def _short(name: str) -> str:
    return name.removeprefix("gradwire ")


def _ratio(a: str, b: str) -> str:
    return f"{_short(a)} / {_short(b)}"


def draw(args: argparse.Namespace, sweeps: Sequence[Sweep], machine: Mapping[str, str]) -> None:
    """Time against bytes, one panel per number of ranks."""
    panels = []
    for sweep in sweeps:
        lines = []
        for name in sweep.names:
            series = [sweep.series[name, nbytes] for nbytes in sweep.sizes]
            low, high = zip(*(one.quartiles for one in series), strict=True)
            medians = [one.median for one in series]
            lines.append(plot.Line(name, sweep.sizes, medians, band=(low, high), is_reference=name == MEMCPY))
        ticks = {float(nbytes): size_words(nbytes) for nbytes in sweep.sizes}
        panels.append(plot.Panel(f"{sweep.ranks} ranks", "bytes on each rank", lines, x_ticks=ticks))
    title, footer = f"{args.op}, float32, one thread per rank", f"{machine['cpu']}; {machine['software']}"
    label = "time of a call (median, quartiles)"
    plot.draw(args.plot, panels, title=title, footer=footer, y_label=label, log="xy", y_show=time_words)
