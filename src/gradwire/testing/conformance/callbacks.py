"""Checks of exceptions in users' callbacks: they affect no operation, and end no thread that later operations need."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch

from gradwire.collectives import build
from gradwire.events import CollectiveEvent
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.testing.conformance.compare import Problems, same
from gradwire.testing.conformance.second_group import PATIENCE, SOON, meet, side_group


class _Halt(BaseException):
    """A BaseException that is not an Exception, like SystemExit and KeyboardInterrupt."""


def _in_thread(fn: Callable[[], None]) -> list[BaseException]:
    """Run `fn()` outside the main thread, where SystemExit would end the program; returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as error:  # reported by the rank's main thread
            raised.append(error.with_traceback(None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    return raised


def check_callbacks_raising(group: Group) -> Problems:
    """What a listener or a done-callback raises on one rank, even SystemExit, affects no operation, now or later."""
    side = side_group(group)
    for kind in (ValueError, SystemExit, _Halt):
        yield from _raising(group, side, kind)
    side.close()


def _raising(group: Group, side: Group, kind: type[BaseException]) -> Problems:
    last = group.size - 1

    def listener(event: object) -> None:
        if isinstance(event, CollectiveEvent) and event.label == "watched":
            raise kind("a listener went wrong")

    def callback(work: Work) -> None:
        raise kind("a done-callback went wrong")

    outputs, mine, t = [torch.zeros(5) for _ in range(group.size)], torch.ones(5), torch.ones(3)
    op = build.all_gather(outputs, mine, label="watched").within(SOON)

    def operate() -> None:
        if group.rank == last:
            meet(side)
            work = group.submit(op)
        else:
            work = group.submit(op)
            if group.rank == 0:
                work.add_done_callback(callback)
            meet(side)
        work.wait()
        for _ in range(2):
            group.submit(build.all_reduce(t, label="the next").within(SOON)).wait()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handles = [group.events.listen(listener)] if group.rank == 0 else []
        raised = _in_thread(operate)
    for handle in handles:
        handle.remove()
    when = f"after callbacks had raised {kind.__name__}"
    yield from same(f"what operations raised {when}", raised, [])
    yield from same(f"the sum of an all_gather {when}", torch.stack(outputs).sum().item(), 5.0 * group.size)
    yield from same(f"all_reduce {when}", t.tolist(), [float(group.size) ** 2] * 3)
