"""What the launcher does as ranks end and signals come: a table, without processes and clocks."""

from __future__ import annotations

import signal
from signal import SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGUSR1

import pytest

from gradwire.launch.course import LAST_LIMIT, Course
from gradwire.launch.verdict import Ending
from gradwire.root_cause import NEAR

LOST = (b"Traceback (most recent call last):", b"gradwire.errors.PeerLost: rank 2 is lost")


def due(course: Course, now: float) -> list[tuple[signal.Signals, tuple[int, ...]]]:
    return list(course.due(now))


def test_all_ranks_end_well():
    course = Course(2, grace=10)
    assert course.next_time is None
    for rank in (1, 0):
        assert not course.is_over(5)
        course.ended(Ending(rank, 0, 1.0))
    assert course.is_over(5)
    assert (course.exit_code, course.first, due(course, 100)) == (0, None, [])


def test_a_failure_stops_the_others_at_once_and_kills_them_after_the_grace():
    course = Course(3, grace=10)
    course.ended(Ending(1, 3, 5.0))
    assert course.next_time == 5.0
    assert due(course, 5.0) == [(SIGTERM, (0, 2))]
    assert course.next_time == 15.0
    assert due(course, 14.9) == []
    course.ended(Ending(0, -SIGTERM, 5.2))
    assert due(course, 15.0) == [(SIGKILL, (2,))]
    assert due(course, 15.1) == []
    course.ended(Ending(2, -SIGKILL, 15.1))
    assert course.is_over(15.1)
    assert course.exit_code == 3
    assert [ending.rank for ending in course.endings if ending.stopped] == [0, 2]


def test_a_consequence_waits_for_its_cause():
    course = Course(3, grace=10)
    course.ended(Ending(0, 1, 5.0, words=LOST))
    assert due(course, 5.0) == []
    assert course.next_time == 5.0 + NEAR
    course.ended(Ending(2, -SIGKILL, 5.4))
    assert due(course, 5.4) == [(SIGTERM, (1,))]
    assert course.first is not None
    assert (course.first.rank, course.exit_code) == (2, 137)


def test_a_consequence_without_a_cause_is_a_failure_too():
    course = Course(2, grace=10)
    course.ended(Ending(0, 1, 5.0, words=LOST))
    assert due(course, 5.0 + NEAR) == [(SIGTERM, (1,))]


def test_a_rank_that_cannot_be_killed_is_given_up():
    course = Course(2, grace=1)
    course.ended(Ending(0, 1, 0.0))
    assert due(course, 0.0) == [(SIGTERM, (1,))]
    assert due(course, 1.0) == [(SIGKILL, (1,))]
    assert not course.is_over(1.0)
    assert course.next_time == 1.0 + LAST_LIMIT
    assert course.is_over(1.0 + LAST_LIMIT)
    assert course.exit_code == 1


@pytest.mark.parametrize("number", [SIGTERM, SIGHUP])
def test_end_soon_means_killed_after_the_grace(number):
    course = Course(2, grace=10)
    course.signalled(number, 1.0)
    assert course.next_time == 11.0
    course.ended(Ending(0, -number, 1.1))
    assert due(course, 11.0) == [(SIGKILL, (1,))]
    course.ended(Ending(1, -SIGKILL, 11.1))
    assert (course.exit_code, course.first) == (128 + number, None)


def test_an_interrupt_leaves_time_until_a_rank_has_ended_badly():
    course = Course(2, grace=10)
    course.signalled(SIGINT, 1.0)
    assert course.next_time is None
    course.ended(Ending(0, 1, 100.0))  # a KeyboardInterrupt's traceback
    assert course.next_time == 110.0
    assert due(course, 110.0) == [(SIGKILL, (1,))]
    course.ended(Ending(1, -SIGKILL, 110.1))
    assert (course.exit_code, course.stopped_by) == (130, SIGINT)


def test_an_interrupt_of_a_rank_that_was_starting_stops_the_others():
    course = Course(2, grace=10)
    course.signalled(SIGINT, 1.0)
    modules = (b'  File "train.py", line 1, in <module>', b'  File "torch/__init__.py", line 9, in <module>')
    words = (LOST[0], *modules, b"KeyboardInterrupt")
    course.ended(Ending(0, -SIGINT, 1.2, words=words))
    assert due(course, 1.2) == []
    assert due(course, 1.2 + NEAR) == [(SIGTERM, (1,))]
    course.ended(Ending(1, -SIGTERM, 2.3))
    assert (course.exit_code, course.first) == (130, None)


def test_ranks_that_deal_with_a_signal_end_well():
    course = Course(2, grace=10)
    course.signalled(SIGINT, 1.0)
    course.ended(Ending(0, 0, 2.0))
    assert course.next_time is None
    course.ended(Ending(1, 0, 3.0))
    assert course.exit_code == 0


def test_no_more_patience():
    course = Course(2, grace=10)
    course.signalled(SIGINT, 1.0)
    course.kill(1.5)
    assert due(course, 1.5) == [(SIGKILL, (0, 1))]
    course.kill(1.6)
    assert due(course, 1.6) == []


def test_other_signals_are_not_ours():
    course = Course(1, grace=10)
    course.signalled(SIGUSR1, 1.0)
    assert (course.next_time, course.stopped_by) == (None, None)
    course.ended(Ending(0, -SIGUSR1, 1.1))
    assert course.exit_code == 128 + SIGUSR1


def test_a_failure_before_the_signal_is_what_is_shown():
    course = Course(2, grace=10)
    course.ended(Ending(0, 7, 1.0))
    course.signalled(SIGINT, 1.1)
    assert course.stopped_by is None
    assert course.exit_code == 7


def test_nobody_reads():
    course = Course(2, grace=10)
    course.abandon(SIGPIPE, 1.0)
    assert due(course, 1.0) == [(SIGTERM, (0, 1))]
    for rank in (0, 1):
        course.abandon(SIGPIPE, 1.1)
        course.ended(Ending(rank, 0, 1.2))
    assert due(course, 1.3) == []
    assert course.exit_code == 128 + SIGPIPE


def test_a_store_that_is_lost_is_why_ranks_fail_after_it():
    course = Course(3, grace=10)
    course.lose("the store has ended", 5.0)
    course.ended(Ending(1, 1, 5.1, words=LOST))
    assert due(course, 5.1) == [(SIGTERM, (0, 2))]
    for rank in (0, 2):
        course.ended(Ending(rank, -SIGTERM, 5.2))
    assert (course.first, course.lost, course.exit_code) == (None, "the store has ended", 1)


def test_a_store_that_is_lost_after_a_consequence_is_its_cause():
    course = Course(2, grace=10)
    course.ended(Ending(1, 1, 5.0, words=LOST))
    course.lose("the store has ended", 5.1)
    assert due(course, 5.1) == [(SIGTERM, (0,))]
    course.ended(Ending(0, -SIGTERM, 5.2))
    assert (course.lost, course.exit_code) == ("the store has ended", 1)


def test_a_rank_that_failed_before_the_store_was_lost_stays_the_cause():
    course = Course(2, grace=10)
    course.ended(Ending(1, 3, 5.0))
    course.lose("the store has ended", 5.1)
    course.ended(Ending(0, -SIGTERM, 5.2))
    assert (course.lost, course.exit_code) == (None, 3)


def test_ranks_that_end_well_without_the_store():
    course = Course(1, grace=10)
    course.lose("the store has ended", 5.0)
    course.ended(Ending(0, 0, 5.2))
    assert course.exit_code == 0
