"""`gradwire trace`: what all ranks of a run did, as one picture.

Merge what the flight recorders of all ranks have written into one trace: steps, buckets and collectives of every rank on one
clock. Open it in ui.perfetto.dev or chrome://tracing. The job may still run, hang, or have been killed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from gradwire.cli.arguments import add_run, run_directory
from gradwire.errors import UsageError
from gradwire.observe.rings.clocks import align
from gradwire.observe.rings.ring import load_rings
from gradwire.observe.trace import ProfilerTraces, fault_events, write_trace
from gradwire.observe.units import plural


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="the file (default: trace.json)")
    profiler = (
        "add what torch.profiler has written for ranks of the run: a trace, or a directory of traces; may be repeated"
    )
    add("--profiler", action="append", default=[], type=Path, metavar="PATH", help=profiler)


def run(args: argparse.Namespace) -> int:
    directory = run_directory(args.run_dir)
    rings, damage = load_rings(directory)
    for name, what in damage.items():
        print(f"warning: {directory / name}: {what}", file=sys.stderr)
    output: Path = args.output
    profiles = ProfilerTraces(rings, args.profiler)
    try:
        more = itertools.chain(fault_events(directory, rings), profiles.events() if args.profiler else ())
        events = write_trace(rings, output, more)
    except OSError as error:
        raise UsageError(f"gradwire trace -o {output}: {error.strerror}.") from None
    records = plural(sum(len(ring.records) for ring in rings), "record")
    print(f"{output}: {plural(events, 'event')} from {records} of {plural(len(rings), 'rank')} in {directory}")
    if args.profiler:
        print(f"With {plural(profiles.files, 'trace')} of torch.profiler.")
    for name, why in profiles.skipped.items():
        print(f"warning: {name}: left out: {why}", file=sys.stderr)
    lost = max(ring.lost for ring in rings)
    if lost:
        print(f"The rings hold the last records only: up to {lost} earlier ones of a rank were overwritten.")
    for host, alignment in align(rings).items():
        if alignment.error < 0:
            print(f"The clock of {host} is its wall clock: its ranks have no collective in common with the others.")
        elif alignment.error:
            print(f"The clock of {host} was aligned to within {alignment.error / 1e6:.3f} ms{_drift(alignment.drift)}.")
    return 0


def _drift(drift: float) -> str:
    """How much a clock that needs so much more time added drifts, if that is noticeable."""
    ppm = abs(drift) * 1e6
    return f", and runs {ppm:.1f} ppm {'slow' if drift > 0 else 'fast'}" if ppm >= 0.05 else ""
