"""Which rank is slow, in which phase, and what a step takes without that."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradwire.observe.stragglers.detect import WINDOW, describe, medians_of_others, slow_ranks, stragglers_over_time
from gradwire.observe.stragglers.steps import COMPUTE, Phase
from helpers.made_steps import made_steps, step_seconds

DATA, FORWARD, BACKWARD, OPTIMIZER = Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def named(found):
    return {(one.rank, *(slow.phase for slow in one.slow)) for one in found}


@pytest.mark.parametrize(
    ("ranks", "extra", "expected"),
    [
        (8, {}, set()),
        (8, {(3, DATA): 0.2}, {(3, DATA)}),
        (8, {(0, FORWARD): 0.2}, {(0, FORWARD)}),
        (8, {(7, BACKWARD): 0.2}, {(7, BACKWARD)}),
        (8, {(7, OPTIMIZER): 0.5}, {(7, OPTIMIZER)}),
        (2, {(1, DATA): 0.2}, {(1, DATA)}),
        (2, {(0, DATA): 3.0}, {(0, DATA)}),
        (3, {(2, BACKWARD): 0.3, (2, FORWARD): 0.3}, {(2, BACKWARD, FORWARD)}),
        # Two ranks that are equally slow: neither is always last, but the others wait for both.
        (8, {(2, DATA): 0.4, (5, DATA): 0.4}, {(2, DATA), (5, DATA)}),
        (8, {(2, DATA): 0.5, (5, BACKWARD): 0.3}, {(2, DATA), (5, BACKWARD)}),
        (8, {(r, FORWARD): 0.3 for r in range(4)}, {(r, FORWARD) for r in range(4)}),
        # The others wait for one of them only.
        (8, {(2, DATA): 1.0, (5, DATA): 0.3}, {(2, DATA)}),
        # Slower in one phase, and as much faster in another: nobody waits for it.
        (8, {(2, DATA): 0.5, (2, FORWARD): -0.6}, set()),
        # Almost as much: it is last, but a step would hardly be shorter.
        (2, {(1, DATA): 0.5, (1, FORWARD): -0.48}, set()),
        # Not worth a word.
        (8, {(2, OPTIMIZER): 0.1}, set()),
        (8, {(2, DATA): 0.03}, set()),
        # A rank that is faster than all others is no straggler, and makes none of them.
        (8, {(2, DATA): -0.5}, set()),
        (1, {(0, DATA): 1.0}, set()),
    ],
)
def test_the_slow_rank_and_its_phase_are_found(ranks, extra, expected):
    assert named(slow_ranks(made_steps(ranks, 30, extra))) == expected


def test_a_straggler_is_found_where_steps_differ_more_than_it_costs():
    assert named(slow_ranks(made_steps(4, 30, {(0, FORWARD): 0.5}, jitter=0.1, seed=3457))) == {(0, FORWARD)}
    for seed in range(4):  # other ranks are last in many steps, at random
        found = stragglers_over_time(made_steps(8, 200, {(0, FORWARD): 0.5}, jitter=0.2, seed=seed))
        assert sum(one.steps for one in found if one.rank == 0) > 150


@pytest.mark.parametrize("ranks", [2, 3, 8, 33])
@pytest.mark.parametrize("jitter", [0.01, 0.1, 0.5])
def test_jitter_is_no_straggler(ranks, jitter):
    for seed in range(40 if ranks < 10 else 5):
        assert slow_ranks(made_steps(ranks, 20, jitter=jitter, seed=seed)) == []


def test_a_rank_that_is_slow_now_and_then_is_no_straggler():
    rows, slow = made_steps(8, 20), made_steps(8, 20, {(3, DATA): 2.0})
    for count, expected in [(7, set()), (16, {(3, DATA)})]:
        mixed = {rank: [*slow[rank][:count], *rows[rank][count:]] for rank in rows}
        assert named(slow_ranks(mixed)) == expected


def test_too_few_steps_to_tell():
    rows = made_steps(8, WINDOW, {(3, DATA): 0.5})
    assert slow_ranks(rows)
    assert slow_ranks({rank: row[1:] for rank, row in rows.items()}) == []
    assert slow_ranks({**rows, 4: rows[4][:-1]}) == []
    assert slow_ranks({**rows, 4: []})  # it does not train at all
    assert slow_ranks({}) == []


def test_only_steps_that_all_ranks_have_are_compared():
    rows = made_steps(3, 40, {(1, FORWARD): 0.5})
    rows = {0: rows[0][:-3], 1: rows[1][5:], 2: rows[2][10:-1]}
    [found] = slow_ranks(rows)
    assert (found.first_step, found.last_step, found.steps) == (18, 37, 20)
    assert found.slow[0].seconds == pytest.approx(1.5 * found.slow[0].usual, rel=0.1)


def test_ranks_of_different_groups_are_not_compared():
    rows = made_steps(8, 20, {(r, FORWARD): 0.5 for r in (6, 7)})
    stages = {rank: [replace(one, group_id=1 + rank // 6) for one in row] for rank, row in rows.items()}
    assert slow_ranks(stages) == []


def test_stragglers_of_different_steps_are_told_apart():
    first, then = (slow_ranks(made_steps(4, 20, {(rank, DATA): 1.0}, jitter=0.0001))[0] for rank in (1, 2))
    then = replace(then, first_step=20, last_step=39)
    lines = describe([first, then])
    assert [line.split(" a step")[0] for line in lines if "without" in line] == ["  without rank 1", "  without rank 2"]


def test_it_is_said_in_two_lines():
    lines = describe(slow_ranks(made_steps(4, 20, {(3, DATA): 1.0}, jitter=0.0001)))
    assert len(lines) == 2
    assert lines[0].startswith("rank 3 is slow in data (")
    assert "ms, the others take " in lines[0]
    assert lines[0].endswith("): last in 20 of 20 steps (1-20)")
    assert lines[1].startswith("  without rank 3 a step takes 1")
    two = describe(slow_ranks(made_steps(4, 20, {(3, DATA): 1.0, (1, DATA): 1.0})))
    assert len(two) == 3
    assert two[-1].startswith("  without ranks 1, 3 a step takes ")
    assert describe([]) == []


def test_a_run_that_was_slow_for_a_while():
    parts = [made_steps(4, 60), made_steps(4, 60, {(2, FORWARD): 0.4}, first=61), made_steps(4, 60, first=121)]
    rows = {rank: [one for part in parts for one in part[rank]] for rank in range(4)}
    [found] = stragglers_over_time(rows)
    assert (found.rank, found.phase) == (2, FORWARD)
    assert abs(found.first_step - 61) <= 10
    assert abs(found.last_step - 120) <= 10
    assert stragglers_over_time({rank: row[:60] for rank, row in rows.items()}) == []
    [until_the_end] = stragglers_over_time({rank: row[40:115] for rank, row in rows.items()})
    assert until_the_end.last_step == 115
    assert stragglers_over_time({0: [], 1: []}) == []


@settings(max_examples=60)
@given(
    ranks=st.integers(3, 9),
    phase=st.sampled_from(COMPUTE),
    share=st.floats(0.5, 4.0),  # 0.3 of the optimizer's phase would be 2 % of a step: just noticeable, or not
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_any_delay_is_found_and_the_prediction_is_right(ranks, phase, share, seed, data):
    rank = data.draw(st.integers(0, ranks - 1))
    [found] = slow_ranks(made_steps(ranks, 20, {(rank, phase): share}, seed=seed))
    assert (found.rank, found.phase) == (rank, phase)
    healthy = step_seconds(made_steps(ranks, 20, seed=seed))
    assert found.without == pytest.approx(healthy, rel=0.02)
    assert found.without < found.step_seconds


@settings(max_examples=60)
@given(ranks=st.integers(2, 9), seed=st.integers(0, 2**20), jitter=st.floats(0.0, 0.3), factor=st.floats(0.01, 50))
def test_the_scale_of_time_does_not_matter(ranks, seed, jitter, factor):
    def scaled(one):
        return replace(
            one,
            start=round(one.start * factor),
            end=round(one.end * factor),
            phases={phase: time * factor for phase, time in one.phases.items()},
            ready={bucket: time * factor for bucket, time in one.ready.items()},
        )

    rows = made_steps(ranks, 20, {(0, DATA): 0.2}, jitter=jitter, seed=seed)
    assert named(slow_ranks({r: [scaled(one) for one in row] for r, row in rows.items()})) == named(slow_ranks(rows))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_medians_of_others(values):
    expected = [statistics.median(values[:i] + values[i + 1 :]) for i in range(len(values))]
    assert medians_of_others(np.array(values, float)[:, None]).ravel().tolist() == expected


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("phase", [DATA, FORWARD])
def test_in_torch_s_ddp_the_backward_of_the_ranks_that_wait_is_not_slow(ranks, phase):
    rows = {}
    for rank, row in made_steps(ranks, 20, {(1, phase): 0.3}).items():
        rows[rank] = [
            replace(
                one,
                phases={**one.phases, BACKWARD: one.phases[BACKWARD] + one.phases[Phase.EXPOSED], Phase.EXPOSED: 0},
                ready={0: one.last_ready - one.phases[BACKWARD]},
                backward_waits=True,
            )
            for one in row
        ]
    assert named(slow_ranks(rows)) == {(1, phase)}
