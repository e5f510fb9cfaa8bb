"""`gradwire doctor`: whether this machine, or these hosts, can train, and what to change if not.

Examine this machine: versions, devices, engines, shared memory, limits, network, environment variables, and how fast two ranks
reach each other. Each problem comes with its fix. The exit code is 1 if there is a problem.
"""

from __future__ import annotations

import argparse

from gradwire.cli.arguments import at_least


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Several hosts: start it on each, e.g. torchrun --nnodes 2 --nproc-per-node 1 ... -m gradwire doctor --hosts"
    )
    add = parser.add_argument
    hosts = "examine all hosts of a job that torchrun, mpirun or srun started, and their links"
    add("--hosts", action="store_true", help=hosts)
    add("--quick", action="store_true", help="start no ranks and measure nothing")
    add("--json", action="store_true", help="print all findings as JSON")
    timeout = "how long a measurement may take (default: %(default)s)"
    add("--timeout", type=at_least(1), default=120, metavar="SECONDS", help=timeout)


def run(args: argparse.Namespace) -> int:
    from gradwire.cli.doctor import examination  # which imports torch

    return examination.run(args)
