"""Handles, callbacks and the emitter: what may be removed when, and what a listener that raises affects."""

import threading

import pytest

from gradwire.events import (
    BucketReduced,
    Callbacks,
    CollectiveFinished,
    Emitter,
    Event,
    GradientReady,
    Handle,
    StepEnded,
)
from helpers.threads import run_threads


def test_a_handle_removes_once() -> None:
    calls: list[str] = []
    handle = Handle(lambda: calls.append("removed"))
    handle.remove()
    handle.remove()
    assert calls == ["removed"]


def test_a_handle_is_a_context_manager_and_lets_errors_through() -> None:
    calls: list[str] = []
    handle = Handle(lambda: calls.append("removed"))
    with pytest.raises(KeyError), handle:
        raise KeyError(calls.copy())
    handle.remove()
    assert calls == ["removed"]


def test_callbacks_keep_registration_order_and_duplicates() -> None:
    callbacks: Callbacks[object] = Callbacks()

    def a() -> None: ...
    def b() -> None: ...

    first, _, _ = callbacks.add(a), callbacks.add(b), callbacks.add(a)
    assert list(callbacks) == [a, b, a]
    assert len(callbacks) == 3
    first.remove()
    assert list(callbacks) == [b, a]
    assert callbacks


def test_no_callbacks_are_false() -> None:
    callbacks: Callbacks[object] = Callbacks()
    assert not callbacks
    callbacks.add(print).remove()
    assert not callbacks
    assert len(callbacks) == 0


def test_iterating_walks_a_snapshot() -> None:
    emitter = Emitter()
    calls: list[str] = []
    handles: dict[str, Handle] = {}

    def first(event: Event) -> None:
        calls.append("first")
        handles["second"].remove()
        handles["third"] = emitter.listen(lambda event: calls.append("third"))
        handles["first"].remove()

    handles["first"] = emitter.listen(first)
    handles["second"] = emitter.listen(lambda event: calls.append("second"))
    emitter.emit(Event(1.0))
    assert calls == ["first", "second"]
    emitter.emit(Event(2.0))
    assert calls == ["first", "second", "third"]


def test_an_emitter_is_false_until_somebody_listens() -> None:
    emitter = Emitter()
    assert not emitter
    with emitter.listen(print):
        assert emitter
    assert not emitter


@pytest.mark.filterwarnings("ignore:the listener")
def test_a_listener_that_raises_disturbs_nobody() -> None:
    emitter, seen = Emitter(), []
    problem = ValueError("bad listener")

    def bad(event: Event) -> None:
        raise problem

    emitter.listen(bad)
    emitter.listen(seen.append)
    emitter.emit(Event(1.0))
    assert seen == [Event(1.0)]
    assert list(emitter.errors) == [problem]


@pytest.mark.filterwarnings("ignore:the listener")
def test_only_the_last_errors_are_kept() -> None:
    emitter = Emitter()

    def bad(event: Event) -> None:
        raise ValueError(event.time)

    emitter.listen(bad)
    for i in range(100):
        emitter.emit(Event(float(i)))
    assert [error.args[0] for error in emitter.errors] == [float(i) for i in range(84, 100)]


def test_events_are_values() -> None:
    facts = ("threads", 0, 7, "all_reduce", "loss", 12)
    event = CollectiveFinished(1.0, *facts, duration=0.5)
    assert event == CollectiveFinished(1.0, *facts, duration=0.5)
    assert (event.group, event.rank, event.seq, event.kind, event.label, event.nbytes) == facts
    with pytest.raises(AttributeError):
        event.seq = 8  # type: ignore[misc]


def test_a_listener_to_some_classes_gets_no_others() -> None:
    events, seen = Emitter(), []
    assert not events.wants(GradientReady)
    with events.listen(seen.append, only=(StepEnded, BucketReduced)):
        assert events.wants(StepEnded)
        assert not events.wants(GradientReady)
        events.emit(StepEnded(1.0, 0, 1))
        events.emit(GradientReady(1.0, 0, "a", 0))
        with events.listen(print):
            assert events.wants(GradientReady)
    assert seen == [StepEnded(1.0, 0, 1)]
    assert not events.wants(StepEnded)


def test_adding_and_removing_from_many_threads_loses_nothing() -> None:
    callbacks: Callbacks[object] = Callbacks()
    start = threading.Barrier(8)
    kept: list[Handle] = []

    def churn() -> None:
        start.wait(100)
        for i in range(200):
            handle = callbacks.add(print)
            if i % 2:
                handle.remove()
            else:
                kept.append(handle)

    run_threads(threading.Thread(target=churn) for _ in range(8))
    assert len(callbacks) == len(kept) == 800
    for handle in kept:
        handle.remove()
    assert not callbacks
