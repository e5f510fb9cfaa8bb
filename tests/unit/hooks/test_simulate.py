"""simulate: a hook on ranks in one thread."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.collectives import all_gather_into_tensor, all_reduce, send
from gradwire.errors import CollectiveMismatch, HookError, UsageError
from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, Turn, mean
from gradwire.testing import simulate
from helpers.comm_hooks import Scripted


@dataclass
class Memory:
    total: Tensor


class Counting(CommHook):
    """Two collectives, and a state that grows."""

    def init(self, spec: BucketSpec) -> Memory:
        return Memory(torch.zeros(spec.numel))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        state.total += grad
        everybody = torch.empty(turn.world_size * grad.numel())
        yield all_gather_into_tensor(everybody, grad)
        value = everybody.view(turn.world_size, -1).mean(0)
        yield all_reduce(torch.tensor([float(turn.step)]))
        return Reduced(value, grad)


def test_every_rank_gets_its_result_and_traffic_is_counted() -> None:
    done = simulate(Counting(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 9.0])])
    assert [reduced.value.tolist() for reduced in done.reduced] == [[3.0, 5.0]] * 3
    assert [reduced.sent.tolist() for reduced in done.reduced] == [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]
    assert [exchange.op.kind.value for exchange in done.exchanges] == ["all_gather_into_tensor", "all_reduce"]
    assert [exchange.nbytes for exchange in done.exchanges] == [(8, 8, 8), (4, 4, 4)]
    assert done.nbytes == 12


def test_states_persist_from_step_to_step() -> None:
    gradients = [torch.tensor([1.0]), torch.tensor([10.0])]
    first = simulate(Counting(), gradients)
    second = simulate(Counting(), gradients, states=first.states, step=1)
    assert [state.total.item() for state in second.states] == [2.0, 20.0]


def test_gradients_are_not_written_even_when_donated() -> None:
    gradients = [torch.tensor([1.0]), torch.tensor([3.0])]
    for donated in (False, True):
        done = simulate(mean(), gradients, donated=donated)
        assert [reduced.value.item() for reduced in done.reduced] == [2.0, 2.0]
        assert [g.item() for g in gradients] == [1.0, 3.0]


def test_a_hook_without_collectives_sends_nothing() -> None:
    def alone(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return Reduced(grad, grad)
        yield

    done = simulate(Scripted(alone), [torch.ones(2)])
    assert done.exchanges == ()
    assert done.nbytes == 0


def odd_kind(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    yield all_reduce(torch.zeros(2 if turn.rank == 1 else 3))
    return Reduced(grad, grad)


def odd_count(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    for _ in range(1 + (turn.rank == 2)):
        yield all_reduce(torch.zeros(2))
    return Reduced(grad, grad)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (odd_kind, r"simulate\(odd_kind\(\)\).*ranks differ in shape: rank 1 has \[\[2\]\]"),
        (odd_count, r"ranks \[0, 1\] have returned, but rank 2 yields all_reduce"),
    ],
)
def test_ranks_that_differ_are_a_mismatch(script: Callable[..., Reduction], words: str) -> None:
    with pytest.raises(CollectiveMismatch, match=words) as caught:
        simulate(Scripted(script), [torch.zeros(1)] * 3)
    assert caught.value.ops


def test_labels_may_differ_as_in_a_group() -> None:
    def labeled(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        yield all_reduce(grad.clone(), label=f"rank {turn.rank}")
        return Reduced(grad, grad)

    assert len(simulate(Scripted(labeled), [torch.ones(1)] * 2).exchanges) == 1


def test_errors_of_a_hook_are_raised_with_their_rank() -> None:
    def angry(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        yield all_reduce(grad.clone())
        if turn.rank == 1:
            raise KeyError("mine")
        return Reduced(grad, grad)

    with pytest.raises(KeyError, match="mine") as caught:
        simulate(Scripted(angry), [torch.ones(1)] * 2)
    assert "raised on simulated rank 1" in caught.value.__notes__
    assert any("angry() on bucket 0 (parameters parameter), rank 1" in note for note in caught.value.__notes__)


def test_all_generators_are_closed_when_one_rank_fails() -> None:
    closed = []

    def careful(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        try:
            yield all_reduce(torch.zeros(1 + turn.rank))
            return Reduced(grad, grad)
        finally:
            closed.append(turn.rank)

    with pytest.raises(CollectiveMismatch):
        simulate(Scripted(careful), [torch.ones(1)] * 3)
    assert sorted(closed) == [0, 1, 2]


def sends(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    yield send(grad, dst=0)
    return Reduced(grad, grad)


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ([], "pass one or more, one per rank"),
        ([torch.zeros(2), torch.zeros(3)], "of the same length and dtype"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], "of the same length and dtype"),
        ([torch.zeros(2)] * 2, "Only collectives, in which all take part, are simulated"),
    ],
)
def test_usage_errors(gradients: list[Tensor], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate(Scripted(sends), gradients)


def returns(
    make: Callable[[Tensor], Any], yields: Callable[[Tensor], Any] = lambda grad: all_reduce(grad.clone())
) -> Any:
    def script(grad: Tensor, state: Any, turn: Turn) -> Any:
        yield yields(grad)
        return make(grad)

    return script


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (returns(lambda grad: None), r"reduce\(\) returned NoneType, not Reduced"),
        (returns(lambda grad: Reduced([1.0], grad)), "Reduced with a value of list, not a tensor"),  # type: ignore[arg-type]
        (returns(lambda grad: Reduced(grad[:1], grad)), "float32 of 1 elements for a bucket of torch.float32 with 2"),
        (returns(lambda grad: Reduced(grad.double(), grad)), "returned torch.float64 of 2 elements"),
        (returns(lambda grad: None, yields=lambda grad: grad), "yielded Tensor, not a Collective"),
        (lambda grad, state, turn: Reduced(grad, grad), r"reduce\(\) is not a generator but returned Reduced"),
    ],
)
def test_a_hook_that_breaks_its_contract_is_named(script: Callable[..., Any], words: str) -> None:
    where = r" on bucket 0 \(parameters parameter\), rank 0, step 0: .*"
    hook = Scripted(script)
    with pytest.raises(HookError, match="communication hook " + re.escape(repr(hook)) + where + words) as caught:
        simulate(hook, [torch.zeros(2)] * 2)
    assert caught.value.hook == repr(hook)
