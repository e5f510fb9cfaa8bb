"""Taking turns, medians, quartiles and ratios, on a clock that is told what time it is."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.timing import Rounds, Series, compare, interleave


class Clock:
    """Time passes when a variant says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def step(self, name: str, seconds: float):
        def step() -> None:
            self.log.append(name)
            self.now += seconds

        return step

    def __call__(self) -> float:
        return self.now


def test_variants_take_turns_and_another_begins_each_round():
    clock = Clock()
    interleave({name: clock.step(name, 1.0) for name in "abc"}, Rounds(4), clock=clock)
    assert "".join(clock.log) == "abcbcacababc"


def test_a_block_is_timed_as_a_whole_and_told_per_step():
    clock = Clock()
    series = interleave({"a": clock.step("a", 1.0), "b": clock.step("b", 3.0)}, Rounds(2, block=3), clock=clock)
    assert "".join(clock.log) == "aaabbbbbbaaa"
    assert series["a"] == Series("a", (1.0, 1.0))
    assert series["b"] == Series("b", (3.0, 3.0))


def test_warming_up_is_not_timed():
    clock = Clock()
    series = interleave({"a": clock.step("a", 1.0)}, Rounds(1, warm_up=5), clock=clock)
    assert len(clock.log) == 6
    assert series["a"].seconds == (1.0,)


def test_steps_that_lead_in_are_not_timed():
    clock = Clock()
    series = interleave(
        {"a": clock.step("a", 1.0), "b": clock.step("b", 2.0)}, Rounds(1, block=2, lead_in=1), clock=clock
    )
    assert "".join(clock.log) == "aaabbb"
    assert [s.seconds for s in series.values()] == [(1.0,), (2.0,)]


def test_the_fence_stands_on_both_sides_of_what_is_timed():
    clock = Clock()
    log = clock.log
    # What a fence waits for after a block belongs to the block; what it waits for before it does not.
    waits = iter([100.0, 2.0])

    def fence() -> None:
        log.append("fence")
        clock.now += next(waits)

    series = interleave({"a": clock.step("a", 1.0)}, Rounds(1), fence=fence, clock=clock)
    assert log == ["fence", "a", "fence"]
    assert series["a"].seconds == (3.0,)


def test_rounds_are_told():
    clock, finished = Clock(), []
    interleave({"a": clock.step("a", 1.0)}, Rounds(3), after_round=finished.append, clock=clock)
    assert finished == [1, 2, 3]


def test_medians_and_quartiles():
    series = Series("a", (5.0, 1.0, 2.0, 4.0, 100.0))
    assert series.median == 4.0
    assert series.quartiles == (2.0, 5.0)
    assert Series("a", (7.0,)).quartiles == (7.0, 7.0)


def test_the_mean_of_two_series():
    assert Series("a", (1.0, 3.0)).averaged_with(Series("b", (3.0, 3.0))) == Series("a", (2.0, 3.0))
    with pytest.raises(ValueError, match="shorter"):
        Series("a", (1.0, 3.0)).averaged_with(Series("b", (3.0,)))


def test_a_ratio_by_rounds_does_not_mind_a_busy_half_of_the_run():
    bare = Series("bare", (10.0, 10.0, 30.0, 30.0, 30.0))
    peer = Series("peer", (14.0, 14.0, 42.0, 42.0, 42.0))
    ours = Series("ours", (12.0, 12.0, 36.0, 36.0, 36.0))
    ratio = compare(ours, peer, over=bare)
    assert ratio.median_of_rounds == 0.5
    assert ratio.quartiles == (0.5, 0.5)
    assert ratio.of_medians == 0.5
    assert ratio.rounds == 5


def test_a_plain_ratio():
    ratio = compare(Series("ours", (9.0, 9.0)), Series("peer", (10.0, 10.0)))
    assert ratio.of_medians == pytest.approx(0.9)
    assert ratio.median_of_rounds == pytest.approx(0.9)


def test_rounds_in_which_noise_ate_the_difference_are_left_out():
    bare, peer, ours = Series("bare", (10.0, 20.0)), Series("peer", (14.0, 15.0)), Series("ours", (11.0, 11.0))
    ratio = compare(ours, peer, over=bare)
    assert ratio.rounds == 1
    assert ratio.median_of_rounds == 0.25


def test_nothing_to_compare_is_not_a_number():
    ratio = compare(Series("ours", (1.0,)), Series("peer", (1.0,)), over=Series("bare", (2.0,)))
    assert ratio.rounds == 0
    assert math.isnan(ratio.of_medians)
    assert math.isnan(ratio.median_of_rounds)
    assert all(map(math.isnan, ratio.quartiles))


def test_the_median_is_where_it_is_said_to_be_in_95_of_100_runs():
    # Ratios that are far from normal: some rounds were disturbed.
    generator = random.Random(0)
    inside, runs = 0, 2000
    for _ in range(runs):
        values = tuple(1 + generator.expovariate(1.0) ** 3 for _ in range(30))
        low, high = compare(Series("a", values), Series("b", (1.0,) * 30)).confidence or (math.nan, math.nan)
        inside += low <= 1 + math.log(2) ** 3 <= high
    assert 0.95 <= inside / runs <= 0.97  # for 30 rounds, 95.7 %


def test_few_rounds_are_no_evidence():
    for rounds, known in ((1, False), (5, False), (6, True)):
        ratio = compare(Series("a", (2.0,) * rounds), Series("b", (1.0,) * rounds))
        assert (ratio.confidence is not None) == known
    ratio = compare(Series("a", tuple(map(float, range(5000)))), Series("b", (1.0,) * 5000))
    low, high = ratio.confidence
    assert 2400 < low < 2450 < 2550 < high < 2600  # 70 rounds, or two standard deviations, from the middle
    # No round can be compared.
    assert compare(Series("a", (2.0,)), Series("b", (1.0,)), over=Series("c", (1.0,))).confidence is None
