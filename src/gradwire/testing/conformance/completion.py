"""Checks of completion hooks and events."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch

from gradwire.collectives import build
from gradwire.errors import HookError, UsageTypeError
from gradwire.events import CollectiveEvent, CollectiveFinished, CollectiveStarted, CollectiveSubmitted, Handle
from gradwire.groups.base import Group
from gradwire.groups.completion import WorkInfo
from gradwire.groups.work import Work
from gradwire.testing.conformance.compare import PATIENCE, SOON, Problems, beside, holds, meet, raises, same


class _Notes:
    """A hook that records the operations whose label begins with `about`: a wrapper may submit additional ones."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.infos: list[WorkInfo] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, info: WorkInfo) -> None:
        if info.label.startswith(self.about):
            self.gate.wait(PATIENCE)
            self.infos.append(info)
            self.threads.add(threading.get_ident())


def check_hooks_once(group: Group) -> Problems:
    """One call per operation, in completion order, off the caller's thread, with correct data."""
    notes = _Notes("once")
    t = torch.ones(5)
    with group.on_completion(notes):
        works = [group.all_reduce(t, label=f"once {i}") for i in range(3)]
        works.append(group.barrier(label="once 3"))
        yield from same("flush_completions()", group.flush_completions(), True)
        works[0].wait()
        group.flush_completions()
    yield from same("what was passed to hooks", notes.infos, [work.info for work in works])
    yield from holds(threading.get_ident() not in notes.threads, "a completion hook ran in the caller's thread")
    group.barrier(label="once more")
    group.flush_completions()
    yield from same("calls of a hook after it was removed", len(notes.infos), 4)


def check_hooks_several(group: Group) -> Problems:
    """Hooks run in registration order; one may remove itself, and one may add another, while they run."""
    calls: list[str] = []
    handles: list[Handle] = []

    def hook(name: str) -> Callable[[WorkInfo], None]:
        def call(info: WorkInfo) -> None:
            if info.label.startswith("several"):
                calls.append(f"{name} {info.label[-1]}")
                if name == "only once":
                    handles[1].remove()
                    handles.append(group.on_completion(hook("later")))

        return call

    handles += [group.on_completion(hook("first")), group.on_completion(hook("only once"))]
    for i in range(2):
        group.barrier(label=f"several {i}")
        group.flush_completions()
    for handle in handles:
        handle.remove()
    yield from same("calls of the hooks", calls, ["first 0", "only once 0", "first 1", "later 1"])
    yield from raises(UsageTypeError, "on_completion(3)", lambda: group.on_completion(3))  # type: ignore[arg-type]


class _HookFailure(Exception):
    """What a hook raises."""


class _Raising(_Notes):
    """A hook that raises for the first operation labeled `about`."""

    def __call__(self, info: WorkInfo) -> None:
        super().__call__(info)
        if info.label == self.about and len(self.infos) == 1:
            raise _HookFailure("the hook went wrong")


def _about_the_hook(error: HookError | None) -> Problems:
    if error is not None:
        right = isinstance(error.__cause__, _HookFailure) and "the hook went wrong" in str(error)
        yield from holds(right, f"the HookError does not contain what was raised: {error}, {error.__cause__!r}")
        yield from holds("Raising" in error.hook, f"the HookError names the hook {error.hook!r}")


@beside
def check_hook_raising(group: Group, side: Group) -> Problems:
    """What a hook raises on one rank is raised, chained, by its next wait, once. No operation is refused: ranks stay in step."""
    for step, moment in enumerate(("before submit", "in flight", "before split")):
        hook = _Raising(f"watched {moment}")
        handles = [group.on_completion(hook)] if group.rank == 0 else []
        hook.gate.clear()
        group.barrier(label=f"watched {moment}")
        t = torch.full((3,), 10.0**step)
        op = build.all_reduce(t, label="the next step")
        works = [group.submit(op)] if moment == "in flight" and group.rank == 0 else []
        hook.gate.set()
        group.flush_completions()
        # The others submit when rank 0 waits, so that a wait that does not wait finds it in flight.
        helper = threading.Thread(target=meet, args=(side,), daemon=True)
        helper.start()
        if not works:
            helper.join(PATIENCE)
        part = group.split(0) if moment == "before split" else None
        work = works[0] if works else group.submit(op)
        if group.rank == 0:
            error = yield from raises(HookError, f"wait after a hook raised {moment}", work.wait)
            yield from _about_the_hook(error)
            yield from holds(work.is_completed(), f"wait after a hook raised {moment} returned in flight")
        helper.join(PATIENCE)
        yield from same(f"a second wait, after a hook raised {moment}", work.wait(), True)
        yield from same(f"all_reduce after a hook raised {moment}", t.tolist(), [10.0**step * group.size] * 3)
        if part is not None:
            part.barrier()
            part.close()
        for handle in handles:
            handle.remove()


def check_hooks_at_close(group: Group) -> Problems:
    """`close` calls the hooks for what is left in the queue, and raises what one of them raised."""
    notes = _Notes("late")
    notes.gate.clear()
    group.on_completion(notes)
    group.on_completion(_Raising("late 9"))
    for i in range(10):
        group.barrier(label=f"late {i}")
    told = len(notes.infos)
    notes.gate.set()
    error = yield from raises(HookError, "close after a hook raised", group.close)
    yield from _about_the_hook(error)
    yield from same("hook calls before the first could continue", told, 0)
    yield from same("operations passed to hooks at close", len(notes.infos), 10)
    yield from same("closed, after close raised the hook's error", group.closed, True)


def check_events(group: Group) -> Problems:
    """Submitted, perhaps started, finished: in this order for each operation, with its number. No events without a listener."""
    yield from same("bool(events) with no listener", bool(group.events), False)
    events: list[CollectiveEvent] = []

    def listen(event: CollectiveEvent) -> None:
        if isinstance(event, CollectiveEvent) and event.label.startswith("told"):
            if isinstance(event, CollectiveFinished):
                time.sleep(0.02)  # a waiter wakes only after the listeners were called, however slow they are
            events.append(event)

    t = torch.ones(4)
    with group.events.listen(listen):
        yield from same("bool(events) with a listener", bool(group.events), True)
        works = [group.all_reduce(t, async_op=True, label=f"told {i}") for i in range(3)]
        for work in works:
            work.wait()
            told = [event.seq for event in events if isinstance(event, CollectiveFinished)]
            yield from holds(work.seq in told, f"wait() returned before listeners were called for the end of {work}")
    yield from same("bool(events) after the listener was removed", bool(group.events), False)
    group.barrier(label="told nobody")
    for i, work in enumerate(works):
        mine = [event for event in events if event.seq == work.seq]
        kinds = [type(event) for event in mine if not isinstance(event, CollectiveStarted)]
        yield from same("events of an operation, except Started", kinds, [CollectiveSubmitted, CollectiveFinished])
        order = [type(event) for event in mine]
        started = CollectiveStarted not in order[:1] + order[-1:] and order.count(CollectiveStarted) <= 1
        yield from holds(started, f"events came in the order {[kind.__name__ for kind in order]}")
        for event in mine:
            facts = (event.label, event.kind, event.rank, event.nbytes, event.group)
            yield from same("fields of an event", facts, (f"told {i}", "all_reduce", group.rank, 16, group.ledger.name))
        times = [event.time for event in mine]
        yield from holds(times == sorted(times), f"times of an operation's events are {times}")
    removed = all(event.label != "told nobody" for event in events)
    yield from holds(removed, "an event was emitted after the listener was removed")


class _Halt(BaseException):
    """A BaseException that is not an Exception, like SystemExit and KeyboardInterrupt."""


@beside
def check_callbacks_raising(group: Group, side: Group) -> Problems:
    """What a listener or a done-callback raises on one rank, even SystemExit, affects no operation, now or later."""
    for kind in (ValueError, SystemExit, _Halt):
        yield from _raising(group, side, kind)


def _raising(group: Group, side: Group, kind: type[BaseException]) -> Problems:
    last = group.size - 1

    def callback(told: object) -> None:
        if isinstance(told, Work) or (isinstance(told, CollectiveEvent) and told.label == "watched"):
            raise kind("a listener or a done-callback went wrong")

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

    raised: list[BaseException] = []

    def run() -> None:
        try:
            operate()
        except BaseException as error:
            raised.append(error.with_traceback(None))

    with warnings.catch_warnings(), group.events.listen(callback) if group.rank == 0 else nullcontext():
        warnings.simplefilter("ignore")
        thread = threading.Thread(target=run, daemon=True)  # in the main thread SystemExit would end the program
        thread.start()
        thread.join(2 * PATIENCE)
    when = f"after callbacks had raised {kind.__name__}"
    yield from same(f"what operations raised {when}", raised, [])
    yield from same(f"the sum of an all_gather {when}", torch.stack(outputs).sum().item(), 5.0 * group.size)
    yield from same(f"all_reduce {when}", t.tolist(), [float(group.size) ** 2] * 3)
