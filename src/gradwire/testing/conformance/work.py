"""Checks of Work: waiting, state, futures."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, build
from gradwire.errors import CollectiveTimeout
from gradwire.groups.base import Group
from gradwire.groups.completion import WorkInfo
from gradwire.groups.work import Work
from gradwire.testing.conformance.compare import PATIENCE, Problems, held_up, holds, raises, same, side_group, unlike
from gradwire.testing.conformance.data import blank, draw


def _sum(group: Group, *key: int) -> Tensor:
    return torch.as_tensor(sum(draw((6,), torch.int64, *key, rank) for rank in range(group.size)))


def check_wait_from_threads(group: Group) -> Problems:
    """Two threads and the caller wait for one operation; all return."""
    answers: list[object] = []

    def wait(work: Work) -> None:
        try:
            answers.append(work.wait())
        except BaseException as error:  # reported below, by the rank's main thread
            answers.append(error)

    threads: list[threading.Thread] = []

    def look(work: Work) -> Problems:
        threads.extend(threading.Thread(target=wait, args=(work,), daemon=True) for _ in range(2))
        for thread in threads:
            thread.start()
        yield from holds(not work.is_completed(), "all_reduce: it is completed, though the last rank has not joined")

    t = draw((6,), torch.int64, 62, group.rank)
    yield from held_up(group, partial(group.submit, build.all_reduce(t)), look)
    for thread in threads:
        thread.join(PATIENCE)
    yield from same("what wait() returned in two threads", answers, [True] * len(threads))
    yield from unlike("all_reduce", t, _sum(group, 62))


def check_wait_timeout(group: Group) -> Problems:
    """A wait whose own timeout passes raises only to that caller and leaves the operation running."""

    def look(work: Work) -> Problems:
        for limit in (0.02, 0.0, timedelta(seconds=0.02)):
            error = yield from raises(CollectiveTimeout, f"wait({limit!r})", partial(work.wait, limit))
            if error is not None:
                yield from same("op of the CollectiveTimeout", error.op, work.op.signature)
                yield from holds("patience" in str(error), f"the CollectiveTimeout does not name the label: {error}")
        state = (work.is_completed(), work.exception())
        yield from same("is_completed() and exception() after a wait that timed out", state, (False, None))

    t = draw((6,), torch.int64, 63, group.rank)
    yield from held_up(group, partial(group.submit, build.all_reduce(t, label="patience")), look)
    yield from unlike("all_reduce after a wait that timed out", t, _sum(group, 63))


def check_work_tells(group: Group) -> Problems:
    """The state that a Work reports, in flight and afterward."""
    t = draw((6,), torch.int64, 64, group.rank)
    op = build.all_reduce(t, label="tell")
    seen: list[Work] = []

    def state(work: Work) -> tuple[object, ...]:
        return work.is_completed(), work.is_success(), work.exception()

    def look(work: Work) -> Problems:
        seen.append(work)
        yield from same("state and duration in flight", (*state(work), work.duration), (False, False, None, None))
        yield from holds("tell" in repr(work) and "in flight" in repr(work), f"repr in flight is {work!r}")

    yield from held_up(group, partial(group.submit, op), look)
    for work in seen:
        yield from same("state of a finished operation", state(work), (True, True, None))
        yield from same("two more waits", (work.wait(), work.wait(timeout=0.001)), (True, True))
        yield from holds(len(work.result()) == 1 and work.result()[0] is t, "result() is not the list of outputs")
        yield from holds("finished" in repr(work), f"repr of a finished operation is {work!r}")
        info = work.info
        facts = (info.op, info.kind, info.label, info.rank, info.group, info.seq, info.bytes, info.error, info.duration)
        name, took = group.ledger.name, info.finished - info.started
        want = (op.signature, "all_reduce", "tell", group.rank, name, work.seq, op.nbytes, None, work.duration)
        yield from same("op, kind, label, rank, group, seq, bytes, error and duration of the info", facts, want)
        yield from holds(0 <= info.duration == took, f"duration does not add up: {info}")
    first, second = group.barrier(), group.barrier()
    yield from holds(first.seq < second.seq, f"operation #{second.seq} followed operation #{first.seq}")


def check_future(group: Group) -> Problems:
    """A future of the outputs, taken early or late, with `then` chained to it."""
    t = draw((6,), torch.int64, 65, group.rank)
    want = _sum(group, 65)
    taken: list[tuple[torch.futures.Future[list[Tensor]], torch.futures.Future[Tensor]]] = []

    def look(work: Work) -> Problems:
        future = work.get_future()
        yield from same("done() of the future of an operation in flight", future.done(), False)
        taken.append((future, future.then(lambda done: done.value()[0] + 1)))

    yield from held_up(group, partial(group.submit, build.all_reduce(t)), look)
    for future, after in taken:
        yield from unlike("the future's value", future.wait()[0], want)
        yield from unlike("what then() made of the future's value", after.wait(), want + 1)
    out = blank((6,), torch.int64)
    late = group.reduce_scatter(out, [draw((6,), torch.int64, 66, group.rank)] * group.size)
    yield from same("done() of the future of a finished operation", late.get_future().done(), True)
    yield from unlike("the value of a future taken late", late.get_future().wait()[0], _sum(group, 66))


def check_future_waits(group: Group) -> Problems:
    """A callback of a future may wait for another operation, or for its future, whose callback waits in turn."""

    def total(key: int, depth: int) -> Tensor:
        """An all-reduce, plus one made in a callback of its future, and so on, `depth` deep."""
        t = drawn[key].clone()
        if depth == 0:
            group.all_reduce(t, label="in a callback")
            return t
        future = group.all_reduce(t, async_op=True, label="in a callback").get_future()
        return torch.as_tensor(future.then(lambda done: done.value()[0] + total(key + 1, depth - 1)).wait())

    # Drawn here: torch's default device is per thread, and callbacks run in others.
    drawn = [draw((6,), torch.int64, 69, key, group.rank) for key in range(4)]
    for depth in (0, 1, 2, 1, 3):
        want = torch.as_tensor(sum(_sum(group, 69, key) for key in range(depth + 1)))
        yield from unlike(f"sums in callbacks {depth} deep", total(0, depth), want)


def check_dropped_group(group: Group) -> Problems:
    """An operation completes even if its group is no longer referenced, as long as its Work is."""
    part = side_group(group)
    t = draw((6,), torch.int64, 70, group.rank)
    if group.rank == group.size - 1:
        group.barrier()  # the others have dropped theirs by now
    work = part.all_reduce(t, async_op=True, label="without a group")
    del part
    gc.collect()
    if group.rank < group.size - 1:
        group.barrier()
    yield from same("wait() for an operation whose group was dropped", work.wait(), True)
    yield from unlike("all_reduce whose group was dropped", t, _sum(group, 70))
    del work
    group.barrier()
    gc.collect()


def check_dropped_work(group: Group) -> Problems:
    """An operation completes even if its Work is no longer referenced."""
    told = threading.Event()

    def hook(info: WorkInfo) -> None:
        if info.label == "dropped":
            told.set()

    t = draw((6,), torch.float64, 68, group.rank)
    with group.on_completion(hook):
        group.all_reduce(t, ReduceOp.MAX, async_op=True, label="dropped")
        gc.collect()
        group.barrier()
        yield from holds(told.wait(PATIENCE), "no hook was called for an operation whose Work was dropped")
    want = torch.stack([draw((6,), torch.float64, 68, rank) for rank in range(group.size)]).amax(0)
    yield from unlike("all_reduce whose Work was dropped", t, want)
