"""What the tests of commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from gradwire.cli.experiment import world
from helpers.warm_python import WarmPython

# oneDNN writes every kernel that it makes to /tmp/perf-PID.map, keeps the file open and leaves it there. It asks once, when
# the first kernel is made, so this cannot be a fixture.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

RANK = "import os, runpy; os.setsid(); runpy.run_module('gradwire.cli.experiment.rank_main', run_name='__main__')"


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython) -> None:
    """Ranks of `run_world` that need not import torch. Those under mpirun or on hosts of their own do."""
    start_interpreter = world._World._spawn

    def spawn(
        self: Any, program: str, command: Sequence[str], environment: dict[str, str], ranks: Iterable[int]
    ) -> None:
        if command[0] != sys.executable:
            start_interpreter(self, program, command, environment, ranks)
            return
        module = command.index("gradwire.cli.experiment.rank_main")
        with open(self.folder / "output", "ab") as output, open(os.devnull) as nothing:
            fds = (nothing.fileno(), output.fileno(), output.fileno())
            process = warm_python.start(RANK, *command[module + 1 :], fds=fds, env=environment)
        self.processes[os.pidfd_open(process.pid)] = world._Process(program, process, frozenset(ranks))  # type: ignore[arg-type]

    monkeypatch.setattr(world._World, "_spawn", spawn)
