"""Runs a script in this process as `python` would, after something else was set up."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def run_script(words: Sequence[str]) -> None:
    """Run a file, or with -m a module, with its arguments: `words` are what would follow `python`."""
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
