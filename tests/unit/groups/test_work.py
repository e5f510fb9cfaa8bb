"""Work: settled once, waited on by anybody; what it reports and what its future does."""

import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from gradwire.collectives import Collective, build
from gradwire.errors import CollectiveTimeout, GroupAborted, UsageError
from gradwire.groups import ThreadGroup
from gradwire.groups.ledger import Arrivals, Ledger
from gradwire.groups.work import Work, seconds
from helpers.threads import run_threads


def make(op: Collective | None = None, *, timeout: float = 30.0, ledger: Ledger | None = None) -> Work:
    own = ledger or Ledger(name="some group", rank=1, size=3)
    work = Work(op or build.all_reduce(torch.ones(2), label="loss"), own, seq=own.next_seq(), timeout=timeout)
    own.submitted(work)
    _LEDGERS.append(own)
    return work


_LEDGERS: list[Ledger] = []


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """What a group does when it is closed."""
    yield
    while _LEDGERS:
        _LEDGERS.pop().futures.stop(timeout=5.0)


def test_the_first_settlement_wins() -> None:
    work, error = make(), GroupAborted("too late")
    assert work.finish()
    assert not work.fail(error)
    assert not work.finish()
    assert work.is_success()
    assert work.exception() is None

    failed = make()
    assert failed.fail(error)
    assert not failed.finish()
    assert failed.exception() is error


def test_of_many_settlers_one_wins_and_is_reported_once() -> None:
    ledger = Ledger(name="some group", rank=0, size=1)
    seen: list[object] = []
    ledger.events.listen(seen.append)
    work = make(ledger=ledger)
    seen.clear()
    start = threading.Barrier(8)
    won: list[bool] = []

    def settle(i: int) -> None:
        start.wait(100)
        won.append(work.finish() if i % 2 else work.fail(GroupAborted(str(i))))

    run_threads(threading.Thread(target=settle, args=(i,)) for i in range(8))
    assert sorted(won) == [False] * 7 + [True]
    assert len(seen) == 1


def test_wait_raises_the_same_error_again_and_again() -> None:
    work, error = make(), GroupAborted("the end", reason="because")
    work.fail(error)
    for _ in range(2):
        with pytest.raises(GroupAborted) as caught:
            work.wait()
        assert caught.value is not error
        assert (str(caught.value), caught.value.reason) == ("the end", "because")
    with pytest.raises(GroupAborted):
        work.result()
    assert work.exception() is error
    assert error.__traceback__ is None


def test_errors_that_are_raised_often_hold_no_frames() -> None:
    """Neither repeated waits nor refused submits make a traceback longer or keep what the caller had on its stack."""

    class Big:
        """Stands for a tensor on the caller's stack."""

    (group,) = ThreadGroup.world(1)
    work = make()
    work.fail(GroupAborted("the end"))
    group.abort("no more")
    alive: weakref.WeakSet[Big] = weakref.WeakSet()

    def try_again(attempt: Callable[[], object]) -> int:
        big = Big()
        alive.add(big)
        with pytest.raises(GroupAborted) as caught:
            attempt()
        return len(traceback.extract_tb(caught.value.__traceback__))

    for attempt in (work.wait, group.barrier, group.check_peers, work.result):
        lengths = {try_again(attempt) for _ in range(300)}
        assert len(lengths) == 1
    gc.collect()
    assert not alive
    group.close()


@pytest.mark.parametrize("limit", [0, 0.0, 0.01, -1, -5.0, timedelta(milliseconds=10)])
def test_a_wait_that_times_out_leaves_the_operation_alone(limit: float | timedelta) -> None:
    work = make()
    with pytest.raises(CollectiveTimeout, match="label='loss'") as caught:
        work.wait(limit)
    assert caught.value.op == work.op.signature
    assert not work.is_completed()
    assert work.exception() is None
    work.finish()
    assert work.wait()


def test_a_zero_timedelta_means_none_given() -> None:
    assert seconds(timedelta(0)) is None
    assert seconds(timedelta(milliseconds=-1)) is None
    assert seconds(None) is None
    assert seconds(timedelta(seconds=2)) == 2.0
    assert seconds(3) == 3.0
    assert seconds(0) == 0.0


def test_a_wait_longer_than_the_deadline_ends_at_the_deadline() -> None:
    work = make(timeout=0.02)
    began = time.perf_counter()
    with pytest.raises(CollectiveTimeout):
        work.wait(60.0)
    assert time.perf_counter() - began < 30
    assert work.is_completed()


def test_limit_only_shortens() -> None:
    work = make(timeout=5.0)
    work.limit(9.0)
    assert work.timeout == 5.0
    work.limit(2.0)
    assert work.deadline == pytest.approx(work.started + 2.0)


def test_a_timeout_names_the_missing_where_known() -> None:
    ledger = Ledger(name="some group", rank=0, size=3)
    ledger.arrivals = lambda work: Arrivals(joined=(0, 1), missing=(2,))
    with pytest.raises(CollectiveTimeout, match=r"missing: ranks \[2\]") as caught:
        make(ledger=ledger).wait(0.0)
    assert (caught.value.joined, caught.value.missing) == ((0, 1), (2,))


def test_source_rank() -> None:
    t = torch.ones(2)
    assert make(build.recv(t, src=2)).source_rank() == 2
    anybody = make(build.recv(t))
    with pytest.raises(UsageError, match="not known"):
        anybody.source_rank()
    anybody.finish(source_rank=0)
    assert anybody.source_rank() == 0
    for op in (build.send(t, dst=2), build.barrier()):
        with pytest.raises(UsageError, match="Only a receive has a source"):
            make(op).source_rank()


@pytest.mark.parametrize("early", [True, False])
def test_a_failed_operations_future_raises_its_error(early: bool) -> None:
    work = make()
    future = work.get_future() if early else None
    work.fail(GroupAborted("the end"))
    future = future or work.get_future()
    with pytest.raises(GroupAborted, match="the end"):
        future.wait()
    chained = future.then(lambda done: done.value())
    with pytest.raises(RuntimeError, match="the end"):
        chained.wait()


def test_a_base_exception_reaches_the_future_too() -> None:
    work = make()
    future = work.get_future()
    work.fail(KeyboardInterrupt("stop"))
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        future.wait()
    with pytest.raises(KeyboardInterrupt):
        work.wait()


def test_done_callbacks_run_once_before_or_after() -> None:
    work, calls = make(), []
    work.add_done_callback(lambda w: calls.append(("early", w)))
    assert calls == []
    work.finish()
    work.add_done_callback(lambda w: calls.append(("late", w)))
    assert calls == [("early", work), ("late", work)]


def test_a_done_callback_that_raises_does_not_stop_who_settles() -> None:
    work, calls = make(), []

    def bad(work: Work) -> None:
        raise ValueError("bad callback")

    work.add_done_callback(bad)
    work.add_done_callback(calls.append)
    assert work.finish()
    assert calls == [work]
    assert [str(error) for error in work.ledger.events.errors] == ["bad callback"]


def test_an_error_of_a_users_own_code_shows_the_line_that_raised_it() -> None:
    def users_code() -> None:
        raise ZeroDivisionError("in a group's own thread")

    work = make()

    def run() -> None:
        try:
            users_code()
        except ZeroDivisionError as error:
            work.fail(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError) as caught:
        work.wait()
    assert "users_code" in "".join(traceback.format_exception(caught.value))
