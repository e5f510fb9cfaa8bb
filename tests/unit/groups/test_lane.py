"""A lane does its jobs in order, off the caller's thread, and ends when told."""

from __future__ import annotations

import threading

from gradwire.groups.lane import Lane


def test_jobs_run_in_order_on_one_other_thread():
    lane, seen = Lane("test"), []
    for i in range(50):
        lane.put(lambda i=i: seen.append((i, threading.current_thread())))
    assert lane.stop()
    assert [i for i, _ in seen] == list(range(50))
    (thread,) = {t for _, t in seen}
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_idle_means_that_every_job_is_done():
    lane, gate, entered = Lane("test"), threading.Event(), threading.Event()
    assert lane.idle

    def job() -> None:
        entered.set()
        gate.wait(100)

    lane.put(job)
    assert entered.wait(100)
    assert not lane.idle
    gate.set()
    assert lane.stop()
    assert lane.idle


def test_stopping_twice_and_a_lane_that_never_ran():
    lane = Lane("test")
    assert lane.stop()
    assert lane.stop()
    assert lane.stopping.is_set()


def test_a_job_that_does_not_end_is_not_waited_for():
    lane, gate = Lane("test"), threading.Event()
    lane.put(lambda: gate.wait(100))
    assert not lane.stop(timeout=0.05)
    gate.set()
