"""The `gradwire` command: one module a subcommand, each with `add_parser(subparsers)` and `run(args) -> exit code`.

This layer is where text meets people: it parses arguments, prints, and, beside `launch`, alone may read environment variables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console

import gradwire
from gradwire.cli import bench, demo, lab, run
from gradwire.errors import GradwireError


class Command(Protocol):
    """What the module of a subcommand holds."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
        """Declare the subcommand and its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


_COMMANDS: Mapping[str, Command] = {"bench": bench, "demo": demo, "lab": lab, "run": run}
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        return _COMMANDS[args.command].run(args)
    except KeyboardInterrupt:
        # Rank 0 may have been stopped in the middle of drawing, with the cursor hidden.
        Console().show_cursor(True)
        print("\ngradwire: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except GradwireError as error:
        Console().show_cursor(True)
        if args.debug:
            raise
        print("\n".join([f"gradwire: {type(error).__name__}: {error}", *_notes(error)]), file=sys.stderr)
        print("(gradwire --debug shows where it came from)", file=sys.stderr)
        return 1


def _notes(error: BaseException) -> list[str]:
    return [f"  {note}" for note in getattr(error, "__notes__", ())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire",
        description="Data-parallel training for PyTorch in which everything between autograd and the wire is plain Python.",
        epilog="gradwire COMMAND --help tells the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"gradwire {gradwire.__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback when a command fails")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for command in _COMMANDS.values():
        # Also after the command, where people write it; without a default there, which would undo the one before.
        command.add_parser(subparsers).add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show a traceback when it fails"
        )
    return parser
