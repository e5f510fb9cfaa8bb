"""Which ranks of an elastic run are replaced, and by whom."""

from typing import Any

from gradwire.elasticity.machine import View
from gradwire.elasticity.run_records import HubFacts
from gradwire.launch.replacement import Decision, Replacement, Verdict

DIED = Decision(Verdict.DIED, 0.0)


def started(**options: int) -> Replacement:
    made = Replacement("h-1", **{"ranks": 3, **options})
    for place in made.places:
        place.started = 0.0
    return made


def known(*members: str, seen: bool = True, lost: bool = False, step: int = 0, **more: bool) -> HubFacts:
    """Of a process that was in a view, if it was `seen`; the last one has these members."""
    last = View(1, members, step)
    return HubFacts(view=last if seen else None, last=last, lost=last if lost else None, **more)


def facts(made: Replacement, **more: Any) -> HubFacts:
    return known(*(place.member for place in made.places if not place.spare), **more)


def test_a_rank_that_dies_is_replaced_by_a_process_with_another_id_or_by_a_spare() -> None:
    made = started()
    assert [made.ended(1, -9, facts(made), 5.0) for _ in range(20)] == 20 * [DIED]
    assert [place.member for place in made.places] == ["h-1-0", "h-1-22", "h-1-2"]
    assert made.ended(0, 0, known("h-1-22", "h-1-2"), 5.0) == DIED  # it was left out
    assert (made.died, made.replaced) == (21, 21)
    made = started(spares=2)
    made.places[3].started = 7.0
    assert made.ended(0, -9, facts(made), 9.0) == Decision(Verdict.DIED, 0.0, promoted=4)  # the older one
    assert [place.spare for place in made.places] == [True, False, False, True, False]
    assert made.ended(1, -9, facts(made), 9.0).promoted == 3  # that of place 0 was not started yet
    assert made.ended(0, -9, facts(made), 9.0) == DIED  # a spare that dies is replaced by a spare
    assert (made.ranks, made.places[0].spare) == (3, True)


def test_one_that_finishes_or_leaves_is_not_replaced() -> None:
    made = started(spares=1)
    made.enter(made.places[2])  # the others have not let it in yet
    over = known("h-1-0", "h-1-1", ended=True)
    assert made.ended(0, 0, over, 90.0) == Decision(Verdict.FINISHED)
    assert made.dispensable(over) == [2, 3]
    assert made.ended(1, -9, over, 90.0) == Decision(Verdict.DIED)
    assert made.ended(2, 1, over, 90.0) == Decision(Verdict.FAILED)
    made = started(min_ranks=2)
    assert made.ended(0, 0, facts(made, left=True), 5.0) == Decision(Verdict.LEFT)
    assert made.ended(1, 0, facts(made, left=True), 5.0) == Decision(Verdict.LEFT, 0.0)  # else too few would remain
    assert (made.ranks, made.left, made.replaced, made.died) == (2, 2, 1, 0)
    made = started(min_ranks=2)
    assert made.ended(0, 1, facts(made, ended=True), 5.0).verdict is Verdict.FAILED  # e.g. it could not save the model
    made = started(min_ranks=2)
    ended = [made.ended(number, 0, facts(made, left=True, lost=number == 2), 5.0) for number in range(3)]
    assert ended[2] == Decision(Verdict.LEFT)  # all were told to leave
    assert made.finished


def test_a_rank_that_has_waited_too_long_is_not_replaced() -> None:
    made = started()
    assert made.ended(1, 1, facts(made), 90.0, gave_up=True) == Decision(Verdict.FAILED)
    made = started()
    others = known("h-1-0", "h-1-2")  # have gone on without it
    assert made.ended(1, 1, others, 90.0, gave_up=True) == DIED
    assert started().ended(1, 1, others._replace(away=True), 90.0, gave_up=True) == Decision(Verdict.FAILED)


def test_a_rank_that_ends_early_without_an_error_does_not_end_the_run() -> None:
    made = started()
    assert made.ended(0, 0, facts(made), 5.0) == Decision(Verdict.FINISHED)
    assert made.finished
    assert made.ended(1, -9, facts(made), 9.0) == DIED
    assert not made.finished


def test_exceptions_without_a_step_in_between_end_the_run() -> None:
    made = started()
    found = [made.ended(number % 3, 1, facts(made, step=7), 90.0).verdict for number in range(11)]
    assert found == [*[Verdict.DIED] * 10, Verdict.FAILED]
    made = started()
    for step in range(30):
        assert made.ended(0, 1, facts(made, step=step), 90.0) == DIED
        assert made.ended(0, -9, facts(made, step=step), 90.0) == DIED  # as Chaos does


def test_processes_that_cannot_start_are_given_up_after_pauses() -> None:
    made, others = started(), known("h-1-0", "h-1-1", seen=False)
    assert [made.ended(2, 1, others, 5.0).delay for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    made = started()  # before the first view those of all places count
    assert [made.ended(number, 1, HubFacts(), 1.0).delay for number in (0, 1, 2, 0, 1)] == [0.0, 0.0, 0.0, 1.0, None]
    assert made.ended(2, 1, known(), 5.0) == DIED  # only deaths in a row count
    assert made.ended(2, 1, known(seen=False), 5.0) == DIED
    assert made.ended(0, 1, known("h-1-0", lost=True), 5.0) == Decision(Verdict.FAILED)


def test_one_whose_start_is_refused_is_not_replaced_and_the_run_fails_with_the_last() -> None:
    made = started()
    ended = [made.ended(number, 1, facts(made), 5.0, refused=True) for number in range(3)]
    assert ended == [Decision(Verdict.DIED)] * 2 + [Decision(Verdict.FAILED)]
    assert (made.died, made.replaced, made.ranks) == (3, 0, 0)
