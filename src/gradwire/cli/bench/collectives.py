"""`gradwire bench collectives`: one collective by every available implementation, over sizes and numbers of ranks, in one run.

Ranks are processes that the command starts, under mpirun if Open MPI takes part; all contenders live in the same processes
and take turns. This module declares the command and puts it together: `measure.py` is what a rank does, `sweep.py` computes the
figures, `plot.py` draws them.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.cli.arguments import at_least, byte_size, list_of
from gradwire.cli.bench import contenders, plot
from gradwire.cli.bench.measure import Race, run_race
from gradwire.cli.bench.sweep import Sweep, as_json, notable, ratio_table, size_words, time_table
from gradwire.cli.experiment import mpi
from gradwire.cli.experiment.bar import bar, warn_if_crowded
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.plot_file import check
from gradwire.cli.experiment.report import add_json_option, present
from gradwire.cli.experiment.timing import slowest
from gradwire.cli.experiment.world import TIMEOUT, TIMEOUT_HELP, run_world
from gradwire.errors import UsageError

_SIZES = "4,256,4KiB,64KiB,1MiB,4MiB,25MiB,64MiB"
_TURN = 0.015
"""Minimum seconds of a contender's turn, if a call is shorter."""
_FLOAT32 = 4


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench collectives` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "collectives",
        help="an all-reduce by gradwire, gloo, Open MPI, and a memcpy",
        description="One collective on ranks of this machine, by gradwire's shared memory (on tensors of group.allocate, the "
        "heap, and on ordinary ones), by gloo through torch.distributed, by Open MPI through mpi4py if that is "
        "installed, and for comparison a memcpy of the same number of bytes by all ranks at once. One thread per rank, float32.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add(
        "--op",
        choices=contenders.OPERATIONS,
        default="all_reduce",
        metavar="OP",
        help="%(choices)s (default: %(default)s)",
    )
    add("--ranks", type=list_of(at_least(2)), default="2,4", metavar="N,N", help="world sizes (default: %(default)s)")
    add(
        "--sizes",
        type=list_of(byte_size),
        default=_SIZES,
        metavar="B,B",
        help="bytes of the operation's larger tensor on a rank; if it is split, rounded up to one element per part "
        "(default: %(default)s)",
    )
    add("--rounds", type=at_least(2), default=20, help="turns of each contender at each size (default: %(default)s)")
    add(
        "--mpi",
        choices=("auto", "none"),
        default="auto",
        metavar="WHEN",
        help="auto: start ranks under mpirun if Open MPI is installed; none: omit it (default: %(default)s)",
    )
    add("--timeout", type=at_least(1), default=TIMEOUT, metavar="SECONDS", help=TIMEOUT_HELP)
    add("--plot", type=Path, metavar="FILE", help="also draw all times into FILE (.png, .svg or .pdf)")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and show the results."""
    if args.plot is not None:
        check("--plot", args.plot)
    sizes = _sizes(args.sizes, args.op, args.ranks)
    warn_if_crowded(max(args.ranks))
    machine, console = describe(), Console(highlight=False)
    launcher = mpi.find() if args.mpi == "auto" else "omitted by --mpi none"
    names = [name for name in contenders.CONTENDERS if name != contenders.MPI or isinstance(launcher, mpi.OpenMPI)]
    race = Race(op=args.op, sizes=sizes, rounds=args.rounds, turn=_TURN, names=tuple(names))
    sweeps = [_measure(race, ranks, launcher, args.timeout, console) for ranks in args.ranks]
    settings = _settings(args.op, race, launcher, args.ranks)
    if args.plot is not None:
        plot.draw(args.plot, args.op, sweeps, machine)
    present(
        {**machine, **settings},
        [table for sweep in sweeps for table in (time_table(sweep, args.op), ratio_table(sweep))],
        notable(sweeps),
        data=as_json(args.op, machine, settings, sweeps),
        json_file=args.json,
        console=console,
    )
    if args.plot is not None:
        console.print(f"The plot is in {args.plot}.", style="dim")
    return 0


def _sizes(sizes: Sequence[int], op: str, ranks: Sequence[int]) -> tuple[int, ...]:
    if op in contenders.GATHERED:
        whole = _FLOAT32 * math.lcm(*ranks)
        return tuple(sorted({-(-size // whole) * whole for size in sizes}))
    odd = [size for size in sizes if size % _FLOAT32]
    if odd:
        raise UsageError(
            f"bench collectives --sizes: {odd[0]} bytes are not a whole number of float32 elements. Use multiples of {_FLOAT32}."
        )
    return tuple(sizes)


def _measure(race: Race, ranks: int, launcher: mpi.OpenMPI | str, timeout: float, console: Console) -> Sweep:
    with bar(console, f"{ranks} ranks", race.rounds) as on_report:
        results = run_world(
            functools.partial(run_race, race),
            ranks,
            name=f"bench collectives --op {race.op}",
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
        contenders.MPI: peer,
        "measured": f"{race.rounds} interleaved rounds; a turn is as many calls in a row as take {race.turn * 1e3:.0f} ms, at "
        "least one, after one untimed call; the slowest rank counts",
        **contenders.settings(),
    }
