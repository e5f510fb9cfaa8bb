"""Advancing reductions: results, errors raised at the yield, collectives rewritten on the way, generators closed."""

from dataclasses import replace

import pytest
import torch

from gradwire.collectives import Collective, all_reduce
from gradwire.hooks import Reduced, Reduction
from gradwire.hooks.pump import advance, pump, relay

T = torch.zeros(1)


def reduction(events: list[str], *, catches: bool = False) -> Reduction:
    """Two collectives; an error at the first one is caught, or not."""
    try:
        try:
            yield all_reduce(T, label="first")
        except ValueError as error:
            events.append(f"raised {error}")
            if not catches:
                raise
        yield all_reduce(T, label="second")
        return Reduced(T, T)
    finally:
        events.append("ended")


def renamed(op: Collective) -> Collective:
    return replace(op, label=f"my {op.label}")


def test_pump_hands_over_each_collective_and_returns_the_result() -> None:
    events: list[str] = []
    assert pump(reduction(events), lambda op: events.append(op.label)).value is T
    assert events == ["first", "second", "ended"]


@pytest.mark.parametrize("through", [False, True])
def test_an_error_is_raised_at_the_yield(through: bool) -> None:
    events: list[str] = []

    def fail(op: Collective) -> None:
        if "first" in op.label:
            raise ValueError(op.label)

    def run(catches: bool) -> Reduced:
        one = reduction(events, catches=catches)
        return pump(relay(one, renamed) if through else one, fail)

    assert run(catches=True).value is T
    with pytest.raises(ValueError, match="first"):
        run(catches=False)
    label = "my first" if through else "first"
    assert events == [f"raised {label}", "ended"] * 2


def test_relay_rewrites_collectives_and_closes_the_reduction_with_itself() -> None:
    events: list[str] = []
    relayed = relay(reduction(events), renamed)
    assert next(relayed).label == "my first"
    relayed.close()
    assert events == ["ended"]


def test_what_a_relay_refuses_is_not_raised_at_the_yield() -> None:
    events: list[str] = []

    def refuse(op: Collective) -> Collective:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        pump(relay(reduction(events), refuse), lambda op: None)
    assert events == ["ended"]


def test_advance_takes_one_step() -> None:
    one = reduction([])
    steps = [advance(one) for _ in range(3)]
    assert [getattr(step, "label", "result") for step in steps] == ["first", "second", "result"]
