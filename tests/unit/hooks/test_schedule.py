"""after and every: which hook reduces a step, what is kept and sent, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.hooks import BucketSpec, CommHook, Reduction, Turn, after, cast, chain, error_feedback, every, mean
from gradwire.testing import simulate
from helpers.buckets import bucket, steps

HALF = chain(cast(torch.bfloat16), mean())
FED = chain(error_feedback(), cast(torch.bfloat16), mean())


class Counting(CommHook):
    """Returns the step, and records all steps."""

    def init(self, spec: BucketSpec) -> list[int]:
        return []

    def reduce(self, grad: Tensor, state: list[int], turn: Turn) -> Reduction:
        state.append(turn.step)
        value = torch.full_like(grad, float(turn.step))
        return hooks.Reduced(value, value)
        yield

    def save(self, state: list[int], spec: BucketSpec) -> dict[str, Any]:
        return {name: list(state) for name in spec.names}

    def load(self, saved: Any, spec: BucketSpec) -> list[int]:
        return list(saved.get(spec.names[0], []))

    def __repr__(self) -> str:
        return "counting()"


def values_of(hook: CommHook, count: int, brought: Any = None) -> tuple[list[list[float]], Any]:
    """The value of each step, and the states after them."""
    brought = brought or (lambda step: [torch.tensor([1.0]), torch.tensor([3.0])])
    done = list(steps(hook, brought, count))
    return [one.reduced[0].value.tolist() for one in done], done[-1].states


def test_after_switches_once_and_counts_from_there() -> None:
    values, _ = values_of(after(2, Counting()), 5)
    assert values == [[2.0], [2.0], [0.0], [1.0], [2.0]]


def test_the_later_hooks_state_starts_at_the_change_and_the_earlier_ones_is_freed() -> None:
    hook = after(2, Counting(), before=Counting())
    _, states = values_of(hook, 2)
    assert states[0] == {"before": [0, 1]}
    _, states = values_of(hook, 3)
    assert states[0] == {"hook": [0]}


def test_both_phases_are_saved() -> None:
    hook = after(2, Counting(), before=Counting())
    spec = bucket((1,))
    for done in steps(hook, lambda step: [torch.ones(1)], 4, spec=spec):
        loaded = hook.load(hook.save(done.states[0], spec), spec)
        assert loaded == done.states[0]
    assert "hook" in loaded


def test_after_has_the_attributes_of_its_hooks() -> None:
    assert after(3, HALF).collectives == 1
    assert after(3, Counting()).collectives is None
    assert after(3, FED).remembers
    assert not after(3, HALF).remembers
    spec = bucket((8,))
    assert [after(2, HALF).wire_bytes(spec, 2, step) for step in range(4)] == [32, 32, 16, 16]


def test_every_returns_the_mean_of_the_kept_sum() -> None:
    values, _ = values_of(
        every(3, mean()), 6, lambda step: [torch.tensor([step + 1.0]), torch.tensor([3.0 * step + 1.0])]
    )
    assert values == [[0.0], [0.0], [1.0 + 3.0 + 5.0], [0.0], [0.0], [7.0 + 9.0 + 11.0]]


@pytest.mark.parametrize("donated", [False, True])
def test_steps_without_communication_send_nothing_and_return_zeros(donated: bool) -> None:
    done = simulate(every(2, mean()), [torch.ones(3)] * 2, donated=donated)
    assert done.exchanges == ()
    assert [r.value.tolist() for r in done.reduced] == [[0.0] * 3] * 2
    done = simulate(every(2, mean()), [torch.ones(3)] * 2, states=done.states, step=1, donated=donated)
    assert len(done.exchanges) == 1
    assert done.reduced[1].value.tolist() == [2.0] * 3


def test_what_was_sent_is_the_whole_sum() -> None:
    first = simulate(every(2, mean()), [torch.tensor([1.0]), torch.tensor([2.0])])
    assert [r.sent.item() for r in first.reduced] == [0.0, 0.0]
    second = simulate(every(2, mean()), [torch.tensor([10.0]), torch.tensor([20.0])], states=first.states, step=1)
    assert [r.sent.item() for r in second.reduced] == [11.0, 22.0]


def test_each_kept_step_is_scaled_by_its_own_divisor() -> None:
    """Rank 1 runs out of inputs after the first step."""
    hook = every(2, mean())
    first = simulate(hook, [torch.tensor([1.0]), torch.tensor([3.0])])
    second = simulate(hook, [torch.tensor([5.0]), torch.tensor([0.0])], states=first.states, step=1, divisor=1)
    assert second.reduced[0].value.item() == (1 + 3) / 2 + 5
    assert sum(r.sent.item() for r in second.reduced) / 1 == second.reduced[0].value.item()


def test_narrow_gradients_are_kept_wide() -> None:
    _, states = values_of(every(300, mean()), 290, lambda step: [torch.tensor([1.0], dtype=torch.bfloat16)])
    assert states[0]["kept"].item() == 290.0  # summed in bfloat16 it would stick at 256


def test_the_hook_of_every_counts_its_own_steps() -> None:
    values, states = values_of(every(2, Counting()), 6)
    assert values == [[0.0], [0.0], [0.0], [1.0], [0.0], [2.0]]
    assert states[0]["hook"] == [0, 1, 2]


def test_otherwise_reduces_the_other_steps() -> None:
    values, states = values_of(every(3, mean(), otherwise=Counting()), 7)
    assert values == [[0.0], [1.0], [2.0], [2.0], [3.0], [2.0], [4.0]]
    assert states[0]["otherwise"] == [0, 1, 2, 3, 4]


def test_every_first_step_is_the_hook_itself() -> None:
    assert every(1, HALF) == HALF
    assert every(1, mean(), otherwise=HALF) == mean()


def test_attributes_of_every() -> None:
    assert every(2, mean()).remembers
    assert every(2, mean()).collectives is None
    assert every(2, mean(), otherwise=HALF).collectives == 1
    assert not every(2, mean(), otherwise=HALF).remembers
    assert every(2, mean(), otherwise=FED).remembers
    spec = bucket((8,))
    assert [every(2, mean()).wire_bytes(spec, 2, step) for step in range(4)] == [0, 32, 0, 32]
    assert [every(2, mean(), otherwise=HALF).wire_bytes(spec, 2, step) for step in range(2)] == [16, 32]
