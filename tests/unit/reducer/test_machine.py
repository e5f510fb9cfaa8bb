"""The reducer's state machine as a table: events in, launches or an error out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradwire.errors import GradwireError, GraphChanged, InternalError, ReadyTwice, Unfinished
from gradwire.reducer.machine import Launch, Machine, State

NAMES = ["a", "b", "c", "d"]
TWO = [[3, 2], [1, 0]]
"""Two buckets of two, last parameters first, as a model starts."""
THREE = [[3], [2], [1, 0]]


def play(machine: Machine, events: Sequence[Any]) -> list[int | str]:
    """Feed events: a number is a gradient that is ready, a word a call. The launches, with the word "last" after the last."""
    out: list[int | str] = []
    for event in events:
        match event:
            case int():
                launches: Sequence[Launch] = machine.arrived([event])
            case ("unused", *indices):
                machine.prepare(indices)
                continue
            case ("static", *uses):
                machine.static_uses = list(uses)
                continue
            case ("relayout", members):
                machine.relayout(members)
                continue
            case "prepare":
                machine.prepare()
                continue
            case "nothing":
                launches = machine.nothing_arrived()
            case "finished":
                machine.finished()
                continue
            case "fail":
                machine.abandon("for the test")
                continue
            case _:
                raise AssertionError(event)
        for launch in launches:
            out.append(launch.bucket)
            if launch.last:
                out.append("last")
    return out


ROWS: dict[str, tuple[list[list[int]], list[Any], list[int | str], State]] = {
    "in order": (TWO, ["prepare", 3, 2, 1, 0], [0, 1, "last"], State.LAUNCHED),
    "and finished": (TWO, ["prepare", 3, 2, 1, 0, "finished"], [0, 1, "last"], State.RESTING),
    "a full bucket waits for those before it": (TWO, ["prepare", 0, 1, 3], [], State.RUNNING),
    "and they go together": (TWO, ["prepare", 0, 1, 3, 2], [0, 1, "last"], State.LAUNCHED),
    "halfway": (TWO, ["prepare", 3, 2, 1], [0], State.RUNNING),
    "nothing came": (TWO, ["prepare"], [], State.ARMED),
    "under no_sync nothing is expected": (TWO, [0, 1, 2, 3, 0], [], State.RESTING),
    "after no_sync": (TWO, [3, 2, "prepare", 3, 2, 1, 0], [0, 1, "last"], State.LAUNCHED),
    "forward without backward, twice": (TWO, ["prepare", "prepare", 3, 2, 1, 0], [0, 1, "last"], State.LAUNCHED),
    "two steps": (
        TWO, ["prepare", 3, 2, 1, 0, "finished", "prepare", 0, 1, 2, 3, "finished"], [0, 1, "last", 0, 1, "last"],
        State.RESTING,
    ),
    "two backwards of one forward, a part each": (TWO, ["prepare", 3, 2, 1, 0], [0, 1, "last"], State.LAUNCHED),
    "a second backward after the end is not reduced": (
        TWO, ["prepare", 3, 2, 1, 0, "finished", 3, 2, 1, 0], [0, 1, "last"], State.RESTING,
    ),
    "unused ones are ready with the first gradient": (TWO, [("unused", 3), 2], [0], State.RUNNING),
    "a whole bucket unused": (TWO, [("unused", 3, 2), 1, 0], [0, 1, "last"], State.LAUNCHED),
    "all but one unused": (TWO, [("unused", 3, 2, 1), 0], [0, 1, "last"], State.LAUNCHED),
    "unused ones wait for a first gradient": (TWO, [("unused", 3, 2)], [], State.ARMED),
    "the first gradient is of one called unused": (TWO, [("unused", 3, 2), 3, 1, 0], [0, 1, "last"], State.LAUNCHED),
    "shared, as a static graph has counted": (
        TWO, [("static", 1, 1, 2, 1), "prepare", 2, 3, 2, 1, 0], [0, 1, "last"], State.LAUNCHED,
    ),
    "shared, one use still to come": (TWO, [("static", 1, 1, 2, 1), "prepare", 2, 3, 1, 0], [], State.RUNNING),
    "static and never used": (TWO, [("static", 1, 1, 0, 0), "prepare", 1, 0], [0, 1, "last"], State.LAUNCHED),
    "a static graph overrides a search": (
        TWO, [("static", 1, 1, 1, 1), ("unused", 3), 3, 2, 1, 0], [0, 1, "last"], State.LAUNCHED,
    ),
    "failure with three buckets in flight": (THREE, ["prepare", 3, 2, 1, 0, "fail"], [0, 1, 2, "last"], State.RESTING),
    "and the next step": (
        THREE, ["prepare", 3, 2, 1, 0, "fail", "prepare", 3, 2], [0, 1, 2, "last", 0, 1], State.RUNNING,
    ),
    "failure halfway, and the next step": (THREE, ["prepare", 3, "fail", "prepare", 3, 2], [0, 0, 1], State.RUNNING),
    "what comes after a failure is not reduced": (THREE, ["prepare", 3, "fail", 2, 1, 0], [0], State.RESTING),
    "other buckets from the next step": (
        TWO, ["prepare", 3, 2, 1, 0, "finished", ("relayout", THREE), "prepare", 3, 2, 1, 0],
        [0, 1, "last", 0, 1, 2, "last"], State.LAUNCHED,
    ),
    "nothing came, and nothing was expected": (
        TWO, [("unused", 0, 1, 2, 3), "nothing"], [0, 1, "last"], State.LAUNCHED,
    ),
    "nothing came under no_sync": (TWO, ["nothing"], [], State.RESTING),
    "one bucket": ([[0, 1, 2, 3]], ["prepare", 3, 1, 0, 2], [0, "last"], State.LAUNCHED),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_events_give_launches(row: str) -> None:
    members, events, launches, state = ROWS[row]
    machine = Machine(members, NAMES)
    assert play(machine, events) == launches
    assert machine.state is state
    assert machine.complete == (state is State.LAUNCHED)


ERRORS: dict[str, tuple[list[Any], type[GradwireError], list[str]]] = {
    "ready twice": (
        ["prepare", 3, 3],
        ReadyTwice,
        ["Expected to mark a variable ready only once.", "Parameter at index 3 with name d has been marked as ready twice"],
    ),
    "called unused and then ready": (
        [("unused", 1), 3, 1], ReadyTwice, ["Expected to mark a variable ready only once.", "index 1 with name b"],
    ),
    "a new step before the end of the last": (
        ["prepare", 3, 2, 1, "prepare"],
        Unfinished,
        [
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "`find_unused_parameters=True`",
            "Parameter indices which did not receive grad for rank 5: 0",
            "Parameters which did not receive grad for rank 5: a",
        ],
    ),
    "a backward that was interrupted when all was under way": (
        ["prepare", 3, 2, 1, 0, "prepare"],
        Unfinished,
        ["Expected to have finished reduction in the prior iteration before starting a new one.", "interrupted"],
    ),
    "a static graph with one more use": (
        [("static", 1, 1, 1, 1), "prepare", 2, 2],
        GraphChanged,
        ["Your training graph has changed in this iteration", "2 (c) got 2 gradients, in the first iteration it got 1"],
    ),
    "a static graph that uses what it did not": (
        [("static", 1, 1, 1, 0), "prepare", 2, 3],
        GraphChanged,
        ["Your training graph has changed in this iteration", "3 (d) got 1 gradients, in the first iteration it got 0"],
    ),
    "the same with its first gradient": (
        [("static", 1, 1, 1, 0), "prepare", 3], GraphChanged, ["3 (d) got 1 gradients, in the first iteration it got 0"],
    ),
    "a static graph with one use less": (
        [("static", 1, 1, 2, 1), "prepare", 3, 2, 1, 0, "prepare"],
        GraphChanged,
        [
            "Expected to have finished reduction in the prior iteration",
            "your training graph has changed in this iteration",
            "Parameter indices which did not receive grad for rank 5: 2",
            "did not receive grad for rank 5: c",
        ],
    ),
    "a backward that reached no parameter": (
        ["prepare", "nothing"], Unfinished, ["did not receive grad for rank 5: a, b, c, d"],
    ),
    "finished too early": (["prepare", 3, "finished"], InternalError, ["finished while running"]),
    "finished while resting": (["finished"], InternalError, ["finished while resting"]),
    "other buckets in the middle of a step": (
        ["prepare", 3, ("relayout", THREE)], InternalError, ["relayout while running"],
    ),
    "other buckets while armed": (["prepare", ("relayout", THREE)], InternalError, ["relayout while armed"]),
    "other buckets while all are under way": (
        ["prepare", 3, 2, 1, 0, ("relayout", THREE)], InternalError, ["relayout while launched"],
    ),
    "buckets that miss a parameter": ([("relayout", [[0, 1]])], InternalError, ["a parameter is in no bucket"]),
}  # fmt: skip


@pytest.mark.parametrize("row", ERRORS)
def test_an_illegal_event_is_an_error_that_says_which_parameter(row: str) -> None:
    events, error, words = ERRORS[row]
    machine = Machine(TWO, NAMES, rank=5)
    play(machine, events[:-1])
    with pytest.raises(error) as caught:
        play(machine, events[-1:])
    for text in words:
        assert text in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_an_internal_error_carries_the_story() -> None:
    machine = Machine(TWO, NAMES)
    play(machine, ["prepare", 3, 2])
    with pytest.raises(InternalError) as caught:
        machine.finished()
    assert caught.value.story == ("prepared", "launched to bucket 0")


def test_the_order_of_arrival_is_kept_without_the_unused() -> None:
    machine = Machine(TWO, NAMES)
    play(machine, [("unused", 3), 1, 2, 0])
    assert machine.arrival == [1, 2, 0]
    assert machine.missing() == []


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Buckets, an order in which gradients come, and which parameters are unused."""
    count = draw(st.integers(1, 12))
    dealt = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count), max_size=4)) | {count})
    members = [list(dealt[start:stop]) for start, stop in zip([0, *cuts], cuts, strict=False) if start < stop]
    unused = draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    order = [i for i in draw(st.permutations(range(count))) if i not in unused]
    return members, order, sorted(unused)


@given(scenarios(), st.integers(1, 3))
@settings(max_examples=200)
def test_any_order_launches_every_bucket_once_in_index_order(
    scenario: tuple[list[list[int]], list[int], list[int]], steps: int
) -> None:
    members, order, unused = scenario
    machine = Machine(members, [f"p{i}" for i in range(sum(map(len, members)))])
    for _ in range(steps):
        machine.prepare(unused)
        done = set(unused)
        launched: list[int] = []
        for index in order:
            launches = machine.arrived([index])
            done.add(index)
            launched += [launch.bucket for launch in launches]
            assert all(done.issuperset(members[b]) for b in launched)
            assert [launch.last for launch in launches] == [launch.bucket == len(members) - 1 for launch in launches]
        assert launched == list(range(len(members)))
        machine.finished()


@settings(max_examples=200)
@given(
    st.permutations(range(6)),
    st.permutations(range(6)),
    st.lists(st.integers(0, 6), max_size=4),
    st.booleans(),
    st.frozensets(st.integers(0, 5), max_size=2),
    st.frozensets(st.integers(0, 5), max_size=2),
)
def test_gradients_reported_in_one_call_count_as_each_alone(
    dealt: list[int], arrival: list[int], cuts: list[int], static: bool, again: frozenset[int], unused: frozenset[int]
) -> None:
    edges = [0, *sorted(cuts), 6]
    members = [dealt[i:j] for i, j in pairwise(edges) if j > i]
    one_by_one, together = (Machine(members, [str(i) for i in range(6)]) for _ in range(2))
    arrival = [i for i in arrival if i not in unused] + sorted(again)
    runs: list[list[int]] = []
    for i in arrival:
        if runs and together.bucket_of[runs[-1][0]] == together.bucket_of[i]:
            runs[-1].append(i)
        else:
            runs.append([i])

    def feed(machine: Machine, steps: Sequence[Sequence[int]], how: Any) -> list[Any]:
        if static:
            machine.static_uses = [1] * 6
        machine.prepare(unused)
        seen: list[Any] = []
        for step in steps:
            try:
                seen += how(machine, step)
            except (ReadyTwice, GraphChanged) as error:
                return [str(error)]  # a run in which one comes twice launches nothing; the step is lost anyway
        return [*seen, machine.state, machine.missing(), machine.arrival, machine.next_bucket]

    expected = feed(one_by_one, [[i] for i in arrival], Machine.arrived)
    assert feed(together, runs, Machine.arrived) == expected


def test_gradients_that_changed_too_late_are_named() -> None:
    error = Machine(TWO, NAMES, rank=3).late([2, 0])
    assert isinstance(error, ReadyTwice)
    assert "on rank 3: those of parameters 2 (c), 0 (a) have changed" in str(error)
