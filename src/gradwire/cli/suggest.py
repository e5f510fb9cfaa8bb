"""`gradwire suggest`: which hook to use, from what a run has recorded.

Predict what a step of a recorded run would take with each of a few hooks, from the time in which its ranks only wait, from what
its link carries and from what hooks compute, and suggest one, with the line to paste; or none, where none would save a tenth of
a step (a third on one host). The run must have had no hook, on the ranks and the link to decide for.
"""

from __future__ import annotations

import argparse

from gradwire.cli.arguments import add_run, run_directory
from gradwire.cli.report import load
from gradwire.observe.report.suggest import suggest_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Within one machine that is usually none. docs/hook-catalog.md has the costs of each."
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    print(suggest_text(load(run_directory(args.run_dir), who="suggest")), end="")
    return 0
