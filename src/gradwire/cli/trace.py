"""`gradwire trace`: what all ranks of a run did, as one picture."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.observe.clocks import align
from gradwire.observe.ring import read_rings
from gradwire.observe.runs import find_run
from gradwire.observe.trace import write_trace


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire trace` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        description="Merge what the flight recorders of all ranks have written into one trace: steps, buckets and collectives of "
        "every rank on one clock. Open it in ui.perfetto.dev or chrome://tracing. The job may still run, hang, or be gone.",
    )
    add = parser.add_argument
    add("run_dir", nargs="?", metavar="RUN", help="the directory of a run (default: the latest)")
    add("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="(default: %(default)s)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the trace, and say what is in it."""
    directory = find_run(args.run_dir, os.environ)
    rings = read_rings(directory)
    try:
        number = write_trace(rings, args.output)
    except OSError as error:
        raise UsageError(f"gradwire trace -o {args.output}: {error.strerror}.") from None
    records = sum(len(ring.records) for ring in rings)
    print(f"{args.output}: {number} events from {records} records of {len(rings)} ranks in {directory}")
    lost = max(ring.lost for ring in rings)
    if lost:
        print(f"The rings hold the last records only: up to {lost} earlier ones of a rank were overwritten.")
    for host, alignment in align(rings).items():
        if alignment.error < 0:
            print(
                f"The clock of {host} is taken from its wall clock: its ranks have no collective in common with the others."
            )
        elif alignment.error:
            print(f"The clock of {host} was aligned to within {alignment.error / 1e6:.3f} ms.")
    return 0
