"""Checks of completion hooks and events."""

from __future__ import annotations

import threading
from functools import partial

import torch

from gradwire.collectives import Collective, build
from gradwire.errors import HookError, UsageTypeError
from gradwire.events import (
    CollectiveEvent,
    CollectiveFinished,
    CollectiveStarted,
    CollectiveSubmitted,
    Handle,
)
from gradwire.groups.base import Group
from gradwire.groups.work import WorkInfo
from gradwire.testing.conformance.compare import Problems, holds, raises, same
from gradwire.testing.conformance.side import PATIENCE, SHORT, beside, meet


class _Notes:
    """A hook that notes the operations whose label begins with `about`: a wrapper may submit others of its own."""

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
    """One call per operation, in completion order, off the caller's thread, with the facts."""
    notes = _Notes("once")
    t = torch.ones(5)
    with group.on_completion(notes):
        works = [group.all_reduce(t, label=f"once {i}") for i in range(3)]
        works.append(group.barrier(label="once 3"))
        yield from same("flush_completions()", group.flush_completions(), True)
        works[0].wait()
        group.flush_completions()
    yield from same("labels that hooks were told", [i.label for i in notes.infos], [f"once {i}" for i in range(4)])
    yield from same("numbers that hooks were told", [i.seq for i in notes.infos], [w.seq for w in works])
    yield from same("kinds that hooks were told", [i.kind for i in notes.infos], ["all_reduce"] * 3 + ["barrier"])
    yield from same("bytes that hooks were told", [i.bytes for i in notes.infos], [20, 20, 20, 0])
    for info, work in zip(notes.infos, works, strict=False):
        yield from same("WorkInfo.op", info.op, work.op.signature)
        yield from same("WorkInfo.rank and group", (info.rank, info.group), (group.rank, group.ledger.name))
        yield from same("WorkInfo.error", info.error, None)
        yield from holds(0 <= info.duration == info.finished - info.started, f"duration does not add up: {info}")
    yield from holds(threading.get_ident() not in notes.threads, "a completion hook ran in the caller's thread")
    group.barrier(label="once more")
    group.flush_completions()
    yield from same("calls of a hook after it was removed", len(notes.infos), 4)


def check_hooks_several(group: Group) -> Problems:
    """Hooks run in registration order; one may remove itself, and one may add another, while they run."""
    calls: list[str] = []
    handles: list[Handle] = []

    def first(info: WorkInfo) -> None:
        if info.label.startswith("several"):
            calls.append(f"first {info.label[-1]}")

    def only_once(info: WorkInfo) -> None:
        if info.label.startswith("several"):
            calls.append(f"only once {info.label[-1]}")
            handles[1].remove()
            handles.append(group.on_completion(later))

    def later(info: WorkInfo) -> None:
        if info.label.startswith("several"):
            calls.append(f"later {info.label[-1]}")

    handles += [group.on_completion(first), group.on_completion(only_once)]
    for i in range(2):
        group.barrier(label=f"several {i}")
        group.flush_completions()
    for handle in handles:
        handle.remove()
    yield from same("calls of the hooks", calls, ["first 0", "only once 0", "first 1", "later 1"])
    yield from raises(UsageTypeError, "on_completion(3)", lambda: group.on_completion(3))  # type: ignore[arg-type]


def _raise_once(about: str) -> tuple[_Notes, type[Exception]]:
    class Boom(Exception):
        """What the hook raises."""

    class Raising(_Notes):
        def __call__(self, info: WorkInfo) -> None:
            super().__call__(info)
            if info.label == about and len(self.infos) == 1:
                raise Boom("the hook went wrong")

    return Raising(about), Boom


def _about_the_hook(error: HookError | None, cause: type[Exception]) -> Problems:
    if error is not None:
        yield from holds(isinstance(error.__cause__, cause), f"the HookError's cause is {error.__cause__!r}")
        yield from holds("the hook went wrong" in str(error), f"the HookError does not say what was raised: {error}")
        yield from holds("Raising" in error.hook, f"the HookError names the hook {error.hook!r}")


def _done(group: Group, op: Collective) -> None:
    group.submit(op).wait()


def check_hook_raising(group: Group) -> Problems:
    """What a hook raises comes out, chained, of the next submit or wait, once; the group works on."""
    side = beside(group)
    for moment in ("submit", "wait"):
        work = None
        if group.rank == 0:
            hook, cause = _raise_once(f"before {moment}")
            with group.on_completion(hook):
                hook.gate.clear()
                group.barrier(label=f"before {moment}")
                if moment == "submit":
                    hook.gate.set()
                    group.flush_completions()
                    alone = build.barrier(label="alone").within(SHORT)
                    error = yield from raises(HookError, "submit after a hook raised", partial(_done, group, alone))
                else:
                    work = group.submit(build.barrier(label="in flight"))
                    hook.gate.set()
                    group.flush_completions()
                    error = yield from raises(HookError, "wait after a hook raised", partial(work.wait, SHORT))
                yield from _about_the_hook(error, cause)
            if error is None:  # out of step: an operation went through that should have been refused
                for each in (side, group):
                    each.abort("conformance check hook_raising failed")
                side.close()
                return
        else:
            group.barrier(label=f"before {moment}")
        meet(side)
        if moment == "wait":
            (work or group.submit(build.barrier(label="in flight"))).wait()
        t = torch.ones(3)
        group.all_reduce(t)
        yield from same("all_reduce after a hook raised", t.tolist(), [float(group.size)] * 3)
    side.close()


def check_hooks_at_close(group: Group) -> Problems:
    """`close` tells the hooks what is left to tell, and hands out what one of them raised."""
    notes, (raising, cause) = _Notes("late"), _raise_once("late 9")
    notes.gate.clear()
    group.on_completion(notes)
    group.on_completion(raising)
    for i in range(10):
        group.barrier(label=f"late {i}")
    told = len(notes.infos)
    notes.gate.set()
    error = yield from raises(HookError, "close after a hook raised", group.close)
    yield from _about_the_hook(error, cause)
    yield from same("hooks told before the first could go on", told, 0)
    yield from same("operations hooks were told of at close", len(notes.infos), 10)
    yield from same("closed, after close raised the hook's error", group.closed, True)


def check_events(group: Group) -> Problems:
    """Submitted, perhaps started, finished: in this order for each operation, with its number. Silent with no listener."""
    yield from same("bool(events) with no listener", bool(group.events), False)
    events: list[CollectiveEvent] = []

    def listen(event: CollectiveEvent) -> None:
        if isinstance(event, CollectiveEvent) and event.label.startswith("told"):
            events.append(event)

    t = torch.ones(4)
    with group.events.listen(listen):
        yield from same("bool(events) with a listener", bool(group.events), True)
        works = [group.all_reduce(t, async_op=True, label=f"told {i}") for i in range(3)]
        for work in works:
            work.wait()
    yield from same("bool(events) after the listener was removed", bool(group.events), False)
    group.barrier(label="told nobody")
    for i, work in enumerate(works):
        mine = [event for event in events if event.seq == work.seq]
        kinds = [type(event) for event in mine if not isinstance(event, CollectiveStarted)]
        yield from same("events of an operation, but for Started", kinds, [CollectiveSubmitted, CollectiveFinished])
        order = (CollectiveSubmitted, CollectiveStarted, CollectiveFinished)
        places = [order.index(type(event)) for event in mine if type(event) in order]
        yield from holds(places == sorted(set(places)), f"events came in the order {[type(e).__name__ for e in mine]}")
        for event in mine:
            facts = (event.label, event.kind, event.rank, event.nbytes, event.group)
            yield from same("facts of an event", facts, (f"told {i}", "all_reduce", group.rank, 16, group.ledger.name))
        times = [event.time for event in mine]
        yield from holds(times == sorted(times), f"times of an operation's events are {times}")
    yield from holds(
        all(e.label != "told nobody" for e in events), "an event was emitted after the listener was removed"
    )
