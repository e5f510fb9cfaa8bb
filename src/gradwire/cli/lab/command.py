"""`gradwire lab WHAT`: one module per experiment, each with `add_parser(subparsers)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Protocol

from gradwire.cli.arguments import add_debug
from gradwire.cli.lab import parity, slowlink


class Experiment(Protocol):
    """The interface of an experiment's module."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
        """Declare the experiment and its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Run it, show the results, and return the exit code."""


_EXPERIMENTS: Mapping[str, Experiment] = {"parity": parity, "slowlink": slowlink}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire lab` and the experiments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lab",
        description="Training experiments on this machine: what communication hooks save over a slow link, and whether a model "
        "trained with them reaches the same loss as one trained without them.",
        epilog="gradwire lab WHAT --help shows the options of an experiment.",
    )
    experiments = parser.add_subparsers(dest="experiment", metavar="WHAT", required=True, title="experiments")
    for experiment in _EXPERIMENTS.values():
        add_debug(experiment.add_parser(experiments))
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the requested experiment, and return its exit code."""
    return _EXPERIMENTS[args.experiment].run(args)
