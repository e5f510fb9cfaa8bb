"""`gradwire bench WHAT`: one module a benchmark, each with `add_parser(subparsers)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Protocol

from gradwire.cli.arguments import add_debug
from gradwire.cli.bench import collectives, hooks, overhead, overlap, training


class Benchmark(Protocol):
    """What the module of a benchmark holds."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
        """Declare the benchmark and its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Measure and show, and return the exit code."""


_BENCHMARKS: Mapping[str, Benchmark] = {
    "collectives": collectives,
    "hooks": hooks,
    "overhead": overhead,
    "overlap": overlap,
    "training": training,
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench` and the benchmarks."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        description="Measure gradwire beside its peers, interleaved in one run, so that what else the machine does hits all "
        "alike. Every figure comes as a median with its quartiles; ratios are taken of medians and, round by round, before "
        "the median. The two agree unless the machine was too busy to tell.",
        epilog="gradwire bench WHAT --help tells the options of a benchmark.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True, title="benchmarks")
    for benchmark in _BENCHMARKS.values():
        add_debug(benchmark.add_parser(benchmarks))
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for, and return its exit code."""
    return _BENCHMARKS[args.benchmark].run(args)
