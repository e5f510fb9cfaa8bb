"""The ledger: numbers, what is in flight, which callback gets what, and the message of a time-out."""

import threading

import pytest
import torch

from gradwire.collectives import build
from gradwire.errors import CollectiveTimeout, GroupAborted, HookError
from gradwire.events import CollectiveFailed, CollectiveFinished, CollectiveStarted, CollectiveSubmitted
from gradwire.groups import ledger as module
from gradwire.groups.ledger import Arrivals, Ledger
from gradwire.groups.work import Work
from helpers.threads import run_threads


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(name="some group", rank=2, size=4)


def enter(ledger: Ledger, *, label: str = "", timeout: float = 30.0) -> Work:
    work = Work(build.all_reduce(torch.ones(2), label=label), ledger, seq=ledger.next_seq(), timeout=timeout)
    ledger.submitted(work)
    return work


def test_numbers_count_from_0_in_every_thread(ledger: Ledger) -> None:
    numbers: list[int] = []
    run_threads(
        threading.Thread(target=lambda: numbers.extend(ledger.next_seq() for _ in range(500))) for _ in range(4)
    )
    assert sorted(numbers) == list(range(2000))


def test_pending_is_what_was_submitted_and_not_settled(ledger: Ledger) -> None:
    a, b, c = (enter(ledger) for _ in range(3))
    assert list(ledger.pending.values()) == [a, b, c]
    b.finish()
    a.fail(GroupAborted("x"))
    assert list(ledger.pending.values()) == [c]
    ledger.fail_all(GroupAborted("y"))
    assert ledger.pending == {}
    assert str(c.exception()) == "y"
    assert str(a.exception()) == "x"


def test_events_report_the_facts_in_order(ledger: Ledger) -> None:
    seen: list[object] = []
    ledger.events.listen(seen.append)
    good, bad = enter(ledger, label="good"), enter(ledger, label="bad")
    ledger.started(good, 5.0)
    good.finish()
    error = GroupAborted("x")
    bad.fail(error)
    assert good.finished is not None
    assert bad.finished is not None
    good_facts = ("some group", 2, 0, "all_reduce", "good", 8)
    bad_facts = ("some group", 2, 1, "all_reduce", "bad", 8)
    assert seen == [
        CollectiveSubmitted(good.started, *good_facts),
        CollectiveSubmitted(bad.started, *bad_facts),
        CollectiveStarted(5.0, *good_facts),
        CollectiveFinished(good.finished, *good_facts, good.duration),
        CollectiveFailed(bad.finished, *bad_facts, bad.duration, error),
    ]


def test_nothing_is_built_when_nobody_listens(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CollectiveSubmitted", lambda *_: pytest.fail("an event was built for nobody"))
    monkeypatch.setattr(Work, "info", property(lambda self: pytest.fail("info was built for nobody")))
    work = enter(ledger)
    ledger.started(work, 1.0)
    assert work.finish()


def test_expire_fails_once_and_not_what_is_over(ledger: Ledger) -> None:
    late, done = enter(ledger, label="late"), enter(ledger)
    done.finish()
    ledger.expire(late)
    ledger.expire(done)
    first = late.exception()
    assert isinstance(first, CollectiveTimeout)
    ledger.expire(late)
    assert late.exception() is first
    assert done.is_success()


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (None, "cannot determine which ranks are missing"),
        (Arrivals((0, 2), (1, 3)), "Joined: ranks [0, 2]; missing: ranks [1, 3]."),
        (Arrivals((0, 1, 2, 3), ()), "All ranks [0, 1, 2, 3] have joined"),
    ],
)
def test_the_words_of_a_timeout(ledger: Ledger, known: Arrivals | None, words: str) -> None:
    ledger.arrivals = lambda work: known
    work = enter(ledger, label="loss")
    error = ledger.timed_out(work, 1.5)
    text = str(error)
    for part in ("all_reduce(float32[2], SUM, label='loss')", "#0 of some group", "rank 2 of 4", "after 1.5 s", words):
        assert part in text
    assert error.op == work.op.signature
    assert (error.joined, error.missing) == ((None, None) if known is None else (known.joined, known.missing))


def test_a_timeout_of_tensors_on_a_device_names_what_else_it_may_be(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.arrivals = lambda work: Arrivals((0, 1, 2, 3), ())
    monkeypatch.setattr(build.Collective, "is_on_host", False)
    error = ledger.timed_out(enter(ledger), 1.5)
    assert "have joined: a kernel that was enqueued before it still runs, or the engine" in str(error)


def test_hook_errors_come_out_one_at_a_time(ledger: Ledger) -> None:
    ledger.hook_errors.extend([HookError("first"), HookError("second")])
    with pytest.raises(HookError, match="first"):
        ledger.raise_hook_error()
    with pytest.raises(HookError, match="second"):
        ledger.raise_hook_error()
    ledger.raise_hook_error()
    assert not ledger.hook_errors
