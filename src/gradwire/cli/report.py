"""`gradwire report`: what a run was, where its time went, and what to look at.

Make a page of what the flight recorders of all ranks have written: what the run was, step times, where a step's time goes,
buckets and collectives of a typical and of the slowest step, bytes, which ranks were late, and warnings with advice. One HTML
file without references to others. The job may still run, hang, or have been killed. With two runs, compare them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradwire.cli.arguments import add_run, run_directory
from gradwire.errors import UsageError
from gradwire.observe.report.render import compare_text, render_page, render_text
from gradwire.observe.report.report_model import RunReport, load_report
from gradwire.observe.units import plural


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    other = "a second run: compare the two, side by side, as text"
    add("other", nargs="?", metavar="OTHER", help=other)
    add("-o", "--output", type=Path, metavar="FILE", help="the file (default: report.html)")
    add("--text", action="store_true", help="write text instead of a page, to the terminal unless -o names a file")


def run(args: argparse.Namespace) -> int:
    directory = run_directory(args.run_dir)
    report = load(directory)
    if args.other is not None:
        text = compare_text(report, load(run_directory(args.other)))
    else:
        text = render_text(report) if args.text else render_page(report)
    if args.output is None and (args.text or args.other is not None):
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), end="")
        return 0
    output = args.output or Path("report.html")
    try:
        output.write_text(text, encoding="utf-8", errors="replace")  # of names of files that are not UTF-8
    except OSError as error:
        raise UsageError(f"gradwire report -o {output}: {error.strerror}.") from None
    records = plural(sum(rank.records for rank in report.ranks), "record")
    print(f"{output}: {records} of {plural(len(report.ranks), 'rank')} in {directory}")
    return 0


def load(directory: Path, *, who: str = "report") -> RunReport:
    """The report of a run that may be removed meanwhile."""
    try:
        return load_report(directory)
    except OSError as error:  # the run is being removed, or its directory used again
        raise UsageError(f"gradwire {who} {directory}: {error.filename or ''}: {error.strerror}.") from None
