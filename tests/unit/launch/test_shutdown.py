"""What the launcher does when ranks end and signals arrive: a table, without processes and clocks."""

import signal
from dataclasses import replace
from math import inf
from signal import SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGUSR1

import pytest

from gradwire.errors import PeerLost
from gradwire.launch.shutdown import LAST_LIMIT, Ending, Shutdown
from gradwire.runtime.rank_error import NEAR, RankError


def raised(error: BaseException, at: float, *, starting: bool = False) -> RankError:
    return replace(RankError.of(error, 0), time=at, starting=starting)


LOST = raised(PeerLost("", rank=2), 5.0)


def due(shutdown: Shutdown, now: float) -> list[tuple[signal.Signals, tuple[int, ...]]]:
    return list(shutdown.due(now))


def test_all_ranks_end_well():
    shutdown = Shutdown(2, grace=10)
    assert shutdown.next_time == inf
    for rank in (1, 0):
        assert not shutdown.is_over(5)
        shutdown.ended(Ending(rank, 0, 1.0))
    assert shutdown.is_over(5)
    assert (shutdown.exit_code, shutdown.first, due(shutdown, 100)) == (0, None, [])


def test_a_failure_stops_the_others_at_once_and_kills_them_after_the_grace():
    shutdown = Shutdown(3, grace=10)
    shutdown.ended(Ending(1, 3, 5.0))
    assert shutdown.next_time == 5.0
    assert due(shutdown, 5.0) == [(SIGTERM, (0, 2))]
    assert shutdown.next_time == 15.0
    assert due(shutdown, 14.9) == []
    shutdown.ended(Ending(0, -SIGTERM, 5.2))
    assert due(shutdown, 15.0) == [(SIGKILL, (2,))]
    assert due(shutdown, 15.1) == []
    shutdown.ended(Ending(2, -SIGKILL, 15.1))
    assert shutdown.is_over(15.1)
    assert shutdown.exit_code == 3
    assert [ending.rank for ending in shutdown.endings if ending.stopped] == [0, 2]


def test_a_consequence_waits_for_its_cause():
    shutdown = Shutdown(3, grace=10)
    shutdown.ended(Ending(0, 1, 5.0, error=LOST))
    assert due(shutdown, 5.0) == []
    assert shutdown.next_time == 5.0 + NEAR
    shutdown.ended(Ending(2, -SIGKILL, 5.4))
    assert due(shutdown, 5.4) == [(SIGTERM, (1,))]
    assert shutdown.first is not None
    assert (shutdown.first.rank, shutdown.exit_code) == (2, 137)


def test_a_consequence_without_a_cause_is_a_failure_too():
    shutdown = Shutdown(2, grace=10)
    shutdown.ended(Ending(0, 1, 5.0, error=LOST))
    assert due(shutdown, 5.0 + NEAR) == [(SIGTERM, (1,))]


def test_a_rank_that_cannot_be_killed_is_given_up():
    shutdown = Shutdown(2, grace=1)
    shutdown.ended(Ending(0, 1, 0.0))
    assert due(shutdown, 0.0) == [(SIGTERM, (1,))]
    assert due(shutdown, 1.0) == [(SIGKILL, (1,))]
    assert not shutdown.is_over(1.0)
    assert shutdown.next_time == 1.0 + LAST_LIMIT
    assert shutdown.is_over(1.0 + LAST_LIMIT)
    assert shutdown.exit_code == 1


@pytest.mark.parametrize("number", [SIGTERM, SIGHUP])
def test_end_soon_means_killed_after_the_grace(number):
    shutdown = Shutdown(2, grace=10)
    shutdown.signalled(number, 1.0)
    assert shutdown.next_time == 11.0
    shutdown.ended(Ending(0, -number, 1.1))
    assert due(shutdown, 11.0) == [(SIGKILL, (1,))]
    shutdown.ended(Ending(1, -SIGKILL, 11.1))
    assert (shutdown.exit_code, shutdown.first) == (128 + number, None)


def test_an_interrupt_leaves_time_until_a_rank_has_ended_badly():
    shutdown = Shutdown(2, grace=10)
    shutdown.signalled(SIGINT, 1.0)
    assert shutdown.next_time == inf
    shutdown.ended(Ending(0, 1, 100.0))  # a KeyboardInterrupt's traceback
    assert shutdown.next_time == 110.0
    assert due(shutdown, 110.0) == [(SIGKILL, (1,))]
    shutdown.ended(Ending(1, -SIGKILL, 110.1))
    assert (shutdown.exit_code, shutdown.stopped_by) == (130, SIGINT)


@pytest.mark.parametrize("error", [None, raised(KeyboardInterrupt(), 1.2, starting=True)])
def test_an_interrupt_of_a_rank_that_was_starting_stops_the_others(error):
    shutdown = Shutdown(2, grace=10)
    shutdown.signalled(SIGINT, 1.0)
    shutdown.ended(Ending(0, -SIGINT, 1.2, error=error))
    assert due(shutdown, 1.2) == []
    assert due(shutdown, 1.2 + NEAR) == [(SIGTERM, (1,))]
    shutdown.ended(Ending(1, -SIGTERM, 2.3))
    assert (shutdown.exit_code, shutdown.first) == (130, None)


def test_ranks_that_deal_with_a_signal_end_well():
    shutdown = Shutdown(2, grace=10)
    shutdown.signalled(SIGINT, 1.0)
    shutdown.ended(Ending(0, 0, 2.0))
    assert shutdown.next_time == inf
    shutdown.ended(Ending(1, 0, 3.0))
    assert shutdown.exit_code == 0


def test_no_more_patience():
    shutdown = Shutdown(2, grace=10)
    shutdown.signalled(SIGINT, 1.0)
    shutdown.kill(1.5)
    assert due(shutdown, 1.5) == [(SIGKILL, (0, 1))]
    shutdown.kill(1.6)
    assert due(shutdown, 1.6) == []


def test_other_signals_are_not_ours():
    shutdown = Shutdown(1, grace=10)
    shutdown.signalled(SIGUSR1, 1.0)
    assert (shutdown.next_time, shutdown.stopped_by) == (inf, None)
    shutdown.ended(Ending(0, -SIGUSR1, 1.1))
    assert shutdown.exit_code == 128 + SIGUSR1


def test_a_failure_before_the_signal_is_what_is_shown():
    shutdown = Shutdown(2, grace=10)
    shutdown.ended(Ending(0, 7, 1.0))
    shutdown.signalled(SIGINT, 1.1)
    assert shutdown.stopped_by is None
    assert shutdown.exit_code == 7


def test_nobody_reads():
    shutdown = Shutdown(2, grace=10)
    shutdown.abandon(SIGPIPE, 1.0)
    assert due(shutdown, 1.0) == [(SIGTERM, (0, 1))]
    for rank in (0, 1):
        shutdown.abandon(SIGPIPE, 1.1)
        shutdown.ended(Ending(rank, 0, 1.2))
    assert due(shutdown, 1.3) == []
    assert shutdown.exit_code == 128 + SIGPIPE


def test_a_store_that_is_lost_is_why_ranks_fail_after_it():
    shutdown = Shutdown(3, grace=10)
    shutdown.lose("the store has ended", 5.0)
    shutdown.ended(Ending(1, 1, 5.1, error=LOST))
    assert due(shutdown, 5.1) == [(SIGTERM, (0, 2))]
    for rank in (0, 2):
        shutdown.ended(Ending(rank, -SIGTERM, 5.2))
    assert (shutdown.first, shutdown.lost, shutdown.exit_code) == (None, "the store has ended", 1)


def test_a_store_that_is_lost_after_a_consequence_is_its_cause():
    shutdown = Shutdown(2, grace=10)
    shutdown.ended(Ending(1, 1, 5.0, error=LOST))
    shutdown.lose("the store has ended", 5.1)
    assert due(shutdown, 5.1) == [(SIGTERM, (0,))]
    shutdown.ended(Ending(0, -SIGTERM, 5.2))
    assert (shutdown.lost, shutdown.exit_code) == ("the store has ended", 1)


def test_a_rank_that_failed_before_the_store_was_lost_stays_the_cause():
    shutdown = Shutdown(2, grace=10)
    shutdown.ended(Ending(1, 3, 5.0))
    shutdown.lose("the store has ended", 5.1)
    shutdown.ended(Ending(0, -SIGTERM, 5.2))
    assert (shutdown.lost, shutdown.exit_code) == (None, 3)


def test_ranks_that_end_well_without_the_store():
    shutdown = Shutdown(1, grace=10)
    shutdown.lose("the store has ended", 5.0)
    shutdown.ended(Ending(0, 0, 5.2))
    assert shutdown.exit_code == 0


def test_a_rank_that_had_raised_before_it_was_told_to_end_has_failed():
    shutdown = Shutdown(3, grace=10)
    shutdown.ended(Ending(1, 3, 5.0))
    assert due(shutdown, 5.0) == [(SIGTERM, (0, 2))]
    shutdown.ended(Ending(0, 1, 5.2, error=raised(KeyError(), 4.9)))
    shutdown.ended(Ending(2, 1, 5.2, error=raised(KeyError(), 5.1)))
    assert [ending.rank for ending in shutdown.endings if ending.stopped] == [2]
    assert shutdown.first is not None
    assert (shutdown.first.rank, shutdown.exit_code) == (0, 1)


def test_output_that_is_lost_is_a_failure_even_if_ranks_end_well():
    shutdown = Shutdown(1, grace=10)
    shutdown.lose("writing to standard output failed: No space left on device", 5.0, output=True)
    assert due(shutdown, 5.0) == [(SIGTERM, (0,))]
    shutdown.ended(Ending(0, 0, 5.2))
    assert (shutdown.exit_code, shutdown.first) == (1, None)
