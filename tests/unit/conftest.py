"""Unit tests start no processes, so that they are quick and can be debugged in place: `tests/ranks` has those that do."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from gradwire.runtime.fork_server import ForkServer
from gradwire.testing import RankPool
from gradwire.testing.mpi import MPIWorlds

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
"""The audit events of Python that a new process begins with."""

started: list[str] | None = None
"""What the unit test that runs now has started; None between tests."""


def _record(event: str, args: tuple[Any, ...]) -> None:
    if started is not None and event in STARTS and not _compiles(sys._getframe()):
        started.append(f"{event}{args[:1]}")


def _compiles(frame: FrameType | None) -> bool:
    """Whether inductor is among the callers: it runs a C++ compiler where its cache is cold."""
    while frame is not None and "/torch/_inductor/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


sys.addaudithook(_record)


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if started is not None:
            started.append(method.__qualname__)
        return method(*args, **kwargs)

    return call


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the test has started so far: processes, and jobs for warm ones."""
    global started
    for owner, name in ((RankPool, "run"), (MPIWorlds, "run"), (ForkServer, "start")):
        monkeypatch.setattr(owner, name, _recorded(getattr(owner, name)))
    started = []
    yield started
    started = None


@pytest.fixture(autouse=True)
def starts_no_process(processes: list[str]) -> Iterator[None]:
    """Fail a unit test that has started a process, or had a warm one work for it."""
    yield
    if processes:
        pytest.fail(
            f"a unit test used processes ({', '.join(processes)}): move this file to tests/ranks", pytrace=False
        )
