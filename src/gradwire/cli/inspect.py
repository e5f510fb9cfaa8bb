"""`gradwire inspect`: where every rank of a job is now, whatever has started it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradwire.cli.arguments import run_directory
from gradwire.errors import UsageError
from gradwire.observe.inspection import inspection


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire inspect` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        description="Show where every rank of a job is: the state of its process, its step, the collective that it waits in, and "
        "the line of its code. If ranks wait for others, these are named, with their stacks. The job goes on (a signal asks "
        "each rank for its stacks, which ends a sleep() in C code), and need not have been started by gradwire run: its ranks must "
        "be recorded, on this host.",
    )
    add = parser.add_argument
    which = "the directory of a run, or the process id of a rank (default: the latest run)"
    add("run", nargs="?", metavar="RUN", help=which)
    add("--stacks", action="store_true", help="show the whole stack of every rank")
    return parser


def run(args: argparse.Namespace) -> int:
    """Look once, and print."""
    print("\n".join(inspection(_directory(args.run), whole=args.stacks)))
    return 0


def _directory(given: str | None) -> Path:
    if given is None or not given.isdigit() or Path(given).is_dir():
        return run_directory(given)
    try:
        maps = Path(f"/proc/{given}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(f"gradwire inspect {given}: there is no process {given}, and no such directory.") from None
    except OSError as error:
        raise UsageError(f"gradwire inspect {given}: process {given}: {error.strerror}.") from None
    rings = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if line.endswith(".ring")]
    if not rings:
        raise UsageError(f"gradwire inspect {given}: process {given} is not recorded.")
    return Path(rings[0]).parent
