"""Elastic runs that start at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.faults_run import Launch, Launcher
from helpers.elastic_hosts import LAUNCH
from helpers.warm_python import WarmPython

REDIRECT = "import os, sys; fd = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT); os.dup2(fd, 1); os.dup2(fd, 2)\n"


@pytest.fixture
def start(warm_python: WarmPython) -> Launch:
    """Start `gradwire run` as a fork of a process that has imported all that it needs."""

    def launch(words: Sequence[str], screen: Path, env: dict[str, str]) -> Launcher:
        screen.touch()
        return warm_python.start(REDIRECT + LAUNCH, str(screen), *words, env=env)

    return launch
