"""A worker runs its jobs in order, off the caller's thread, and ends when stopped; a weak callback keeps nothing alive."""

import gc
import threading
import weakref

import pytest

from gradwire.runtime.threads import BoundedCall, Worker, weakly


def test_jobs_run_in_order_on_one_other_thread():
    worker, seen = Worker("test"), []
    for i in range(50):
        worker.put(lambda i=i: seen.append((i, threading.current_thread())))
    assert worker.stop()
    assert [i for i, _ in seen] == list(range(50))
    (thread,) = {t for _, t in seen}
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_idle_means_that_every_job_is_done():
    worker, gate, entered = Worker("test"), threading.Event(), threading.Event()
    assert worker.idle

    def job() -> None:
        entered.set()
        gate.wait(100)

    worker.put(job)
    assert entered.wait(100)
    assert not worker.idle
    gate.set()
    assert worker.stop()
    assert worker.idle


def test_stopping_twice_and_a_worker_that_never_ran():
    worker = Worker("test")
    assert worker.stop()
    assert worker.stop()
    assert worker.stopping.is_set()


def test_a_job_that_does_not_end_is_not_waited_for():
    worker, gate = Worker("test"), threading.Event()
    worker.put(lambda: gate.wait(100))
    assert not worker.stop(timeout=0.05)
    gate.set()


def test_a_job_can_stop_its_own_worker():
    """As when it held the last reference to the worker's owner."""
    worker, gate, seen, ended = Worker("test"), threading.Event(), [], threading.Event()
    worker.put(lambda: gate.wait(100))
    worker.put(lambda: seen.append((worker.is_current_thread, worker.stop())))
    worker.put(ended.set)
    gate.set()
    assert ended.wait(100), "what was put before is done"
    assert seen == [(True, True)]
    assert not worker.is_current_thread


def test_a_call_is_waited_for_only_so_long_and_may_come_back_later():
    gate = threading.Event()
    call = BoundedCall(lambda: gate.wait(100) and 7, name="test-call")
    assert not call.wait(0.01)
    gate.set()
    assert call.wait(100)
    assert call.result() == 7


def test_what_a_call_raises_is_raised_by_the_caller_that_gets_its_result():
    call = BoundedCall(lambda: 1 // 0, name="test-call")
    assert call.wait(100)
    with pytest.raises(ZeroDivisionError):
        call.result()


def test_a_weak_callback_calls_as_long_as_its_object_lives():
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, number: int, *, times: int = 1) -> int:
            self.total += number * times
            return self.total

    counter = Counter()
    add = weakly(counter.add)
    assert (add(2), add(3, times=2)) == (2, 8)
    alive = weakref.ref(counter)
    del counter
    gc.collect()
    assert alive() is None
    assert add(1) is None
