"""The watchdog: deadlines that hold though nobody waits, on a clock that the test turns."""

import threading

import pytest
import torch

from gradwire.collectives import build
from gradwire.errors import CollectiveTimeout
from gradwire.groups.failure.watchdog import Watchdog
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work


def enter(ledger: Ledger, *, timeout: float = 30.0) -> Work:
    work = Work(build.all_reduce(torch.ones(2)), ledger, seq=ledger.next_seq(), timeout=timeout)
    ledger.submitted(work)
    return work


def ended(watchdog: Watchdog) -> bool:
    thread = watchdog._thread
    if thread is not None:
        thread.join(100)
    return thread is not None and not thread.is_alive()


def test_a_tick_fails_what_is_overdue_and_nothing_else() -> None:
    watchdog = Watchdog("w")
    ledgers = [Ledger(name="some group", rank=rank, size=2) for rank in range(2)]
    for ledger in ledgers:
        watchdog.watch(ledger)
    early, late = enter(ledgers[0], timeout=10), enter(ledgers[1], timeout=20)
    watchdog.tick(early.started + 9.9)
    assert not early.is_completed()
    watchdog.tick(early.deadline)
    assert isinstance(early.exception(), CollectiveTimeout)
    assert not late.is_completed()
    watchdog.tick(late.deadline + 1)
    assert isinstance(late.exception(), CollectiveTimeout)
    watchdog.tick(late.deadline + 2)


def test_a_tick_sees_a_shortened_deadline() -> None:
    watchdog, ledger = Watchdog("w"), Ledger(name="some group", rank=0, size=1)
    watchdog.watch(ledger)
    work = enter(ledger, timeout=100)
    watchdog.tick(work.started + 5)
    assert not work.is_completed()
    work.limit(4)
    watchdog.tick(work.started + 5)
    assert work.is_completed()


def test_owners_checks_run_with_every_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although one raises, which is reported once."""
    watchdog, calls, reported = Watchdog("w"), [], []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    watchdog.on_tick += [lambda: {}["missing"], lambda: calls.append("checked")]
    watchdog.tick(0.0)
    watchdog.tick(1.0)
    assert calls == ["checked", "checked"]
    assert [one.exc_type for one in reported] == [KeyError]


def test_its_thread_expires_what_nobody_waits_for() -> None:
    watchdog, ledger, called = (
        Watchdog("w", interval=0.005),
        Ledger(name="some group", rank=0, size=1),
        threading.Event(),
    )
    watchdog.watch(ledger)
    work = enter(ledger, timeout=0.02)
    work.add_done_callback(lambda work: called.set())
    watchdog.wake()
    assert called.wait(100)
    watchdog.stop()
    assert ended(watchdog)


def test_wake_is_idempotent_and_does_nothing_after_stop() -> None:
    watchdog = Watchdog("w", interval=0.005)
    watchdog.wake()
    thread = watchdog._thread
    watchdog.wake()
    assert watchdog._thread is thread
    watchdog.stop()
    watchdog.stop()
    assert ended(watchdog)
    fresh = Watchdog("w")
    fresh.stop()
    fresh.wake()
    assert fresh._thread is None
