"""What the tests of commands share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gradwire.cli.experiment import world
from gradwire.testing import RankPool
from gradwire.testing.pool.process import Hold
from helpers.warm_python import WarmPython, WarmWorker

# oneDNN writes every kernel that it makes to /tmp/perf-PID.map, keeps the file open and leaves it there. It asks once, when
# the first kernel is made, so this cannot be a fixture.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython) -> None:
    """Ranks of `run_world` that need not import torch. Those under mpirun or on hosts of their own do."""

    class ForkedPool(RankPool):
        def _start(self, count: int, store: str) -> Iterator[Hold]:
            if self._spawn(0).command is not list:
                yield from super()._start(count, store)
                return
            for rank in range(count):
                yield WarmWorker(warm_python, store, self._spawn(rank))

    monkeypatch.setattr(world, "RankPool", ForkedPool)
