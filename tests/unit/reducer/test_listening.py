"""How gradients are reported in the next step, as a table of what the steps before have shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.autograd.grad_hooks import HookMode
from gradwire.reducer.intake.hook_modes import Listening

ALL, LAST, POLL = HookMode.ALL, HookMode.LAST_PER_BUCKET, HookMode.POLL
LAUNCHES = {2: 1, 0: 1}
"""Which gradients launch how many buckets in the steps below."""


def choose(listening: Listening, *, need_all: bool = False, can_poll: bool = True, clean: bool = True) -> HookMode:
    return listening.choose(need_all=need_all, can_poll=can_poll, clean=lambda: clean)


def step(listening: Listening, *, launches: dict[int, int] = LAUNCHES, odd: bool = False, **choice: bool) -> HookMode:
    """One step that succeeds, in the mode that was chosen. `odd`: polling would not have done."""
    mode = choose(listening, **choice)
    listening.first_arrived(others_there=odd)
    for index, buckets in launches.items():
        listening.launched(index, buckets)
        if listening.must_fall_back(index, buckets):
            listening.fall_back()
    listening.ended()
    return mode


TABLE: dict[str, tuple[list[Callable[[Listening], HookMode]], HookMode]] = {
    "nothing is known": ([], ALL),
    "one regular step": ([step], POLL),
    "one step that was not watched": ([lambda s: step(s, can_poll=False)], ALL),
    "an odd step": ([lambda s: step(s, odd=True)], ALL),
    "a regular step after an odd one": ([lambda s: step(s, odd=True), step], POLL),
    "a step that needed all": ([step, lambda s: step(s, need_all=True)], POLL),
    "three odd steps": ([lambda s: step(s, odd=True)] * 4, LAST),
    "another order each time": ([step, *[lambda s: step(s, launches={1: 2}), step] * 3], LAST),
}


@pytest.mark.parametrize(("steps", "mode"), TABLE.values(), ids=TABLE)
def test_the_mode_after(steps: list[Callable[[Listening], HookMode]], mode: HookMode) -> None:
    listening = Listening()
    for take in steps:
        take(listening)
    assert choose(listening) is mode


def test_without_polling_the_last_of_each_bucket_call() -> None:
    listening = Listening()
    step(listening, can_poll=False)
    assert choose(listening, can_poll=False) is LAST
    assert listening.expected == LAUNCHES
    assert not listening.watching


def test_all_call_where_all_are_needed() -> None:
    listening = Listening()
    step(listening)
    assert choose(listening, need_all=True) is ALL
    assert listening.expected == {}


def test_gradients_left_from_before_are_irregular() -> None:
    listening = Listening()
    step(listening)
    for _ in range(3):
        assert choose(listening, clean=False) is ALL
    assert choose(listening) is LAST


@pytest.mark.parametrize(("index", "buckets", "irregular"), [(2, 1, False), (0, 1, False), (2, 0, True), (1, 1, True)])
@pytest.mark.parametrize("can_poll", [True, False])
def test_who_launches_other_buckets_is_irregular(index: int, buckets: int, irregular: bool, can_poll: bool) -> None:
    listening = Listening()
    step(listening, can_poll=can_poll)
    assert choose(listening, can_poll=can_poll) is (POLL if can_poll else LAST)
    assert listening.must_fall_back(index, buckets) is irregular
    listening.fall_back()
    assert listening.mode is ALL
    assert not listening.must_fall_back(index, buckets)


def test_falling_back_from_last_per_bucket_costs_no_patience() -> None:
    listening = Listening()
    step(listening, can_poll=False)
    for launches in [{1: 1}, LAUNCHES] * 5:
        assert step(listening, launches=launches, can_poll=False) is LAST
    assert choose(listening, can_poll=False) is LAST


def test_a_step_that_failed_shows_nothing() -> None:
    listening = Listening()
    step(listening)
    assert choose(listening) is POLL
    listening.first_arrived(others_there=False)
    listening.launched(1, 2)
    listening.abandon()
    assert listening.mode is ALL
    assert choose(listening) is ALL  # the failed step was not seen to be regular
    assert step(listening) is ALL
    assert choose(listening) is POLL
    assert listening.expected == LAUNCHES


def test_other_buckets_are_learned_again() -> None:
    listening = Listening()
    step(listening)
    listening.forget()
    assert choose(listening) is ALL
    step(listening, launches={1: 2})
    assert choose(listening) is POLL
    assert listening.expected == {1: 2}
