"""`abort()` in a signal handler, at any moment: nothing hangs, every rank gets the error, and the group recovers."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch

from gradwire.errors import GroupAborted, GroupError
from gradwire.groups import Group, HierarchicalGroup, NanCheck, ThreadGroup
from gradwire.testing import run_ranks
from gradwire.testing.mpi import missing

ROUNDS = {"shared_memory": 40, "gloo": 8, "hierarchical": 8, "mpi": 20}


def rank_with_alarms(group: Group) -> int:
    """Sum until the alarm of rank 0 aborts the group, recover, and again. How often the alarm was the reason."""
    alarmed = 0
    draw = random.Random(0)
    t, large = torch.ones(8), torch.ones(20_000)

    def on_alarm(number: int, frame: FrameType | None) -> None:
        group.abort("alarm")

    for _ in range(ROUNDS[KIND_OF[type(group).__name__]]):
        if group.rank == 0:
            assert threading.current_thread() is threading.main_thread()
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.01))
        until = time.monotonic() + 30
        try:
            while time.monotonic() < until:
                group.all_reduce(t.fill_(1.0))
                works = [group.all_reduce(x, async_op=True) for x in (t, large)]
                for work in works:
                    work.wait()
        except GroupError as error:
            alarmed += isinstance(error, GroupAborted) and "alarm" in error.reason
        group.recover(30)
    if group.rank == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the handler keeps the group
    group.all_reduce(t.fill_(1.0))
    assert t.tolist() == [float(group.size)] * 8
    return alarmed


KIND_OF = {
    "SharedMemoryGroup": "shared_memory",
    "C10dGroup": "gloo",
    "HierarchicalGroup": "hierarchical",
    "MPIGroup": "mpi",
}


@pytest.mark.parametrize("kind", ROUNDS)
def test_abort_by_a_signal_at_random_moments(kind: str) -> None:
    if kind == "mpi" and missing() is not None:
        pytest.skip(str(missing()))
    alarmed = run_ranks(rank_with_alarms, 4 if kind == "hierarchical" else 2, kind=kind)
    assert alarmed[0] == ROUNDS[kind]


class AfterLines:
    """Calls `act` before the n-th line that the current thread executes in gradwire: as a signal handler would, at every n."""

    def __init__(self, n: int, act: Any) -> None:
        self.left = n
        self.act = act
        self.trace = self._trace  # one object for all events: CPython 3.11 borrows it while it calls it

    def __enter__(self) -> AfterLines:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/gradwire/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.act()
        return self.trace


@pytest.mark.parametrize("wrap", [lambda group: group, NanCheck], ids=["bare", "NanCheck"])
def test_abort_at_every_line_of_an_operation(wrap: Any) -> None:
    """The operation succeeds or fails with the abort, and a second wait has the same outcome."""
    fired = 0
    for n in range(1, 10_000):
        a, b = (wrap(group) for group in ThreadGroup.world(2, timeout=30))
        a.on_completion(lambda info: None)
        works = [b.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        lines = AfterLines(n, lambda a=a: a.abort("signal"))
        mine = []
        try:
            with lines:
                for _ in works:
                    mine.append(a.all_reduce(torch.ones(2), async_op=True))
                    mine[-1].get_future()
                    mine[-1].wait()
        except GroupAborted:
            pass
        for work in (*mine, *works):
            try:
                work.wait(100)
            except GroupAborted:
                assert isinstance(work.exception(), GroupAborted)
            assert work.is_completed()
        for group in (a, b):
            group.close()
        if lines.left > 0:
            break
        fired += 1
    assert fired > 50


def rank_interrupted(group: Group) -> tuple[bool, list[float]]:
    """Rank 0 is interrupted while it waits for the others. Whether it was, and a sum after all have recovered."""
    interrupted, side = False, group.split(0)
    assert side is not None
    if group.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            group.all_reduce(torch.ones(5000), label="interrupted")
        except KeyboardInterrupt:
            interrupted = True
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        side.barrier()
        # What is still in flight is settled by the others; what this rank has aborted is no longer in flight.
        until = time.monotonic() + 30
        joined = threading.Event()
        for work in list(group.ledger.pending.values()):
            assert not isinstance(group, HierarchicalGroup), f"{work} is in flight, and nobody takes its steps"
            work.add_done_callback(lambda _: joined.set())
            assert joined.wait(until - time.monotonic())
    else:
        side.barrier()  # until rank 0 has been interrupted: it waits for this rank
        with contextlib.suppress(GroupError):
            group.all_reduce(torch.ones(5000), label="interrupted")
    group.recover(30)
    t = torch.ones(3)
    group.all_reduce(t)
    return interrupted, t.tolist()


@pytest.mark.parametrize("kind", ["shared_memory", "gloo", "hierarchical"])
def test_an_operation_that_is_interrupted_is_not_left_in_flight(kind: str) -> None:
    answers = run_ranks(rank_interrupted, 4, kind=kind)
    assert [interrupted for interrupted, _ in answers] == [True, False, False, False]
    assert [total for _, total in answers] == [[4.0] * 3] * 4
