"""`gradwire demo`: a small transformer trained data-parallel on real text, on this machine.

Train a small character-level transformer data-parallel on the source code of the Python standard library. Every rank reads its
own part of the text and gradients are averaged each step. At the end all ranks compare their parameters bit for bit; the exit
code is 1 if they differ. Then the same model is trained for a few steps with torch's DDP and with gradwire, on this machine and
over a simulated slow link, and the times are compared.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from gradwire.cli.arguments import at_least, positive


def add_options(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(parser.add_argument, metavar="N")
    add("--ranks", type=at_least(1), help="number of ranks (default: one per core)")
    kinds = "kind of group: threads, shared_memory, hierarchical, gloo, mpi (default: %(default)s)"
    add("--kind", default="shared_memory", metavar="KIND", help=kinds)
    add("--steps", type=at_least(1), default=400, help="optimizer steps (default: %(default)s)")
    add("--batch-size", type=at_least(1), default=16, help="sequences per rank and step (default: %(default)s)")
    size = "size of the model: %(choices)s (default: %(default)s)"
    add("--size", choices=("tiny", "small"), default="small", metavar="SIZE", help=size)
    add("--seed", type=at_least(0), default=0, help="seed of weights, batches and sample (default: %(default)s)")
    mbit = "megabits per second of the simulated link of the comparison (default: %(default)g)"
    add("--mbit", type=positive, default=100.0, help=mbit)
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="only train")
    add("--svg", type=Path, metavar="FILE", help="also write what is printed at the end as a picture")
    timeout = "give up after this long (default: %(default)s)"
    add("--timeout", type=at_least(1), default=3600, metavar="SECONDS", help=timeout)


def run(args: argparse.Namespace) -> int:
    from gradwire.cli.demo import session  # which imports torch

    return session.run(args)
