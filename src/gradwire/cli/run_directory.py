"""The directory of the run that a command reads: the argument RUN, or the latest run, which is then named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradwire.observe.rings.runs import find_run, start_time


def run_directory(given: str | None) -> Path:
    """The directory `given`, or that of the latest run; which one that is, is written to stderr."""
    directory = find_run(given, os.environ)
    if given is None:
        began = start_time(directory)
        print(f"gradwire: the latest run: {directory}{f', started {began}' if began else ''}", file=sys.stderr)
    return directory
