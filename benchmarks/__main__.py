"""`python -m benchmarks WHAT`: the command line. Only the module of the requested benchmark is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from benchmarks.options import BENCHMARKS
from gradwire.cli import guarded
from gradwire.cli.arguments import Parser, add_debug

_PROG = "python -m benchmarks"


def parser() -> argparse.ArgumentParser:
    """The parser of all benchmarks."""
    made = Parser(
        prog=_PROG,
        description="Compare gradwire with its alternatives, interleaved in one run, so that other load on the machine affects all "
        "equally. Every figure is a median with its quartiles; ratios are given of the medians and as the median of the ratios "
        "of single rounds. The two agree unless the machine was too busy. Figures of ours are in benchmarks/RESULTS.md.",
        epilog=f"{_PROG} WHAT --help shows the options of a benchmark.",
    )
    add_debug(made)
    subparsers = made.add_subparsers(dest="benchmark", metavar="WHAT", required=True, title="benchmarks")
    for name, (declare, line, description) in BENCHMARKS.items():
        one = subparsers.add_parser(name, help=line, description=description)
        declare(one)
        add_debug(one)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that `argv` names, show its result, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda args: _run(parser().parse_args(words, args)), prog="benchmarks")


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    result = importlib.import_module(f"benchmarks.{args.benchmark}").run(args, console)
    result.show(console, json_file=args.json, plot=getattr(args, "plot", None))
    if result.error is not None:
        raise result.error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
