"""The `gradwire` command: one module per subcommand, each with `add_options(parser)` and `run(args) -> exit code`. Its help shows
what follows the first line of the module's docstring.

This layer is the user interface: it parses arguments and prints. Except for `launch`, only this layer may read environment
variables. Only the module of the requested subcommand is imported: most of them import torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gradwire
from gradwire.cli.arguments import DEBUG, Parser, add_debug
from gradwire.errors import GradwireError, UsageError

COMMANDS: Mapping[str, str] = {
    "demo": "train a small transformer data-parallel on this machine",
    "doctor": "find what is wrong with this machine, and how to fix it",
    "hub": "serve the records of an elastic run of several hosts",
    "inspect": "show where every rank is, and which one the others wait for",
    "report": "make a page about a run: where its time went, what to look at",
    "run": "start a script on several ranks of this machine",
    "suggest": "suggest a hook for a run, or none, with the predicted step time",
    "top": "show all ranks of a job while it runs",
    "trace": "merge what all ranks of a run did into one trace",
}
"""The modules of this package that are subcommands, and what each does."""
_USAGE = 2  # as in argparse
_INTERRUPTED = 130  # 128 + SIGINT, as in shells
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Errors of writing; with the name of a file they are not of the output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run(args: argparse.Namespace) -> int:
        parser, command = _parser(words)
        parser.parse_args(words, args)
        code: int = command.run(args)
        return code

    return guarded(run)


def guarded(run: Callable[[argparse.Namespace], int], *, prog: str = "gradwire") -> int:
    """Call `run` with a namespace for its arguments and return its exit code, or that of the error, which is shown in a line."""
    args = argparse.Namespace(debug=False)
    _open_closed_outputs()
    try:
        try:
            code = run(args)
        except SystemExit as ending:
            if isinstance(ending.__context__, BrokenPipeError):  # rich ends the process then, with 1
                return _BROKEN_PIPE
            sys.stdout.flush()  # argparse's, after its help
            raise
        sys.stdout.flush()  # what cannot be written fails here, not at the interpreter's end
        return code
    except KeyboardInterrupt:
        _show_cursor()
        print("\ngradwire: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (GradwireError, OSError) as error:
        _show_cursor()
        if args.debug:
            raise
        if isinstance(error, OSError) and error.filename is None and error.errno in _WRITING:
            return _output_failed(error)
        notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
        print("\n".join([f"{prog}: {type(error).__name__}: {error}", *notes]), file=sys.stderr)
        if isinstance(error, UsageError):
            return _USAGE
        print("(--debug shows the traceback)", file=sys.stderr)
        return 1


def _open_closed_outputs() -> None:
    """Where the command was started with `<&-` or `>&-`: another file would get the descriptor, and then the output."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process, without an exception, while modules are imported: some of torch's catch it, and go on."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _output_failed(error: OSError) -> int:
    """The exit code if the output cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again at its end
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # as of `| head -1`: who reads has read enough
        return _BROKEN_PIPE
    print(f"gradwire: writing the output: {error.strerror}", file=sys.stderr)
    return 1


def _show_cursor() -> None:
    """Rank 0 may have been stopped while drawing, with the cursor hidden."""
    if "rich" in sys.modules:
        importlib.import_module("rich.console").Console().show_cursor(True)


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the whole command, complete for the subcommand in `words`, and that subcommand."""
    parser = Parser(
        prog="gradwire",
        description="Data-parallel training for PyTorch in which everything between autograd and the wire is plain Python.",
        epilog="gradwire COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"gradwire {gradwire.__version__}")
    parser.add_argument("--debug", action="store_true", help=DEBUG)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    named = next((word for word in words if not word.startswith("-")), None)
    command: Any = None
    for name, purpose in COMMANDS.items():
        one = subparsers.add_parser(name, help=purpose)
        if name == named:
            with _ended_by_interrupts():
                command = importlib.import_module(f"gradwire.cli.{name}")
            one.description = (command.__doc__ or "").partition("\n\n")[2]
            command.add_options(one)
            add_debug(one)
    return parser, command
