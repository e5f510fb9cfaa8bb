"""`gradwire run`: its options, and what they mean to the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from gradwire.cli.arguments import at_least
from gradwire.errors import UsageError
from gradwire.groups.tcp_store import LOOPBACK, host_store
from gradwire.launch.environment import rank_environment
from gradwire.launch.supervise import Run, supervise
from gradwire.launch.world import Address


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire run` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        usage="gradwire run [options] [-m] SCRIPT [arguments of the script]",
        help="start a script on several ranks of this machine",
        description="Start N processes of a script on this machine; gw.init() makes them ranks of one world. Each line of "
        "their output is shown with its rank. When one fails the others are stopped, its traceback is shown last, and its "
        "exit code is returned. Signals are passed on to all ranks; a second Ctrl-C kills them. Rank 0 reads what is piped "
        "in; nobody reads the terminal.",
        epilog="For several hosts use torchrun, mpirun or srun: gw.init() works under each.",
    )
    add = parser.add_argument
    add("-n", "--nproc", type=at_least(1), metavar="N", help="how many ranks (default: one per GPU, else one per core)")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as after python -m")
    add(
        "--env",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="set a variable for the ranks; may be given again",
    )
    add("--no-prefix", action="store_true", help="show lines as they are, without the rank")
    add("--log-dir", type=Path, metavar="DIR", help="also write each rank's output to DIR/rank-N.log")
    add(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long ranks may take to end after SIGTERM before they are killed (default: %(default)g)",
    )
    add("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed to the script as they are")
    return parser


def run(args: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and return the exit code."""
    if not args.module and not Path(args.script).is_file():
        raise UsageError(
            f"gradwire run {args.script}: there is no such file. Options of gradwire run go before the script; "
            "-m runs a module by its name."
        )
    cpus = len(os.sched_getaffinity(0))
    size = args.nproc or torch.cuda.device_count() or cpus
    store = host_store()
    environments = [
        rank_environment(
            os.environ, dict(args.env), rank=rank, size=size, store=Address(LOOPBACK, store.port), cpus=cpus
        )
        for rank in range(size)
    ]
    command = [sys.executable, *(["-m"] if args.module else []), args.script, *args.arguments]
    return supervise(
        Run(
            command,
            environments,
            grace=args.timeout,
            prefix=not args.no_prefix,
            log_dir=args.log_dir,
            all_tracebacks=args.debug,
        )
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value
