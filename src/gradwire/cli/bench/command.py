"""`gradwire bench WHAT`: one module per benchmark, each with `add_parser(subparsers)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Protocol

from gradwire.cli.arguments import add_debug
from gradwire.cli.bench import collectives, compiled_models, hooks, overhead, overlap, training


class Benchmark(Protocol):
    """The interface of a benchmark's module."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
        """Declare the benchmark and its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Measure, show the results, and return the exit code."""


_BENCHMARKS: Mapping[str, Benchmark] = {
    "collectives": collectives,
    "compile": compiled_models,
    "hooks": hooks,
    "overhead": overhead,
    "overlap": overlap,
    "training": training,
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench` and the benchmarks."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        description="Compare gradwire with its alternatives, interleaved in one run, so that other load on the machine affects all "
        "equally. Every figure is a median with its quartiles; ratios are given of the medians and as the median of the ratios "
        "of single rounds. The two agree unless the machine was too busy.",
        epilog="gradwire bench WHAT --help shows the options of a benchmark.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True, title="benchmarks")
    for benchmark in _BENCHMARKS.values():
        add_debug(benchmark.add_parser(benchmarks))
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the requested benchmark, and return its exit code."""
    return _BENCHMARKS[args.benchmark].run(args)
