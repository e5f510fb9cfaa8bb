"""`agree_to_skip`: one rank skips, all do; a rank that does not call is named, and training goes on."""

from typing import Any

import pytest
import torch
from torch import nn

from gradwire.errors import CollectiveTimeout, GradwireError, UsageError
from gradwire.events import CollectiveSubmitted
from gradwire.groups import Group
from gradwire.parallel import Balance, DistributedDataParallel as DDP, replicate
from gradwire.testing import run_ranks
from helpers.models import Counter, inputs, mlp
from helpers.rank_tests import on_ranks


def backward(ddp: nn.Module, rank: int = 0) -> None:
    ddp.zero_grad()
    ddp(inputs(rank)).pow(2).sum().backward()


def attempt(do: Any) -> str:
    try:
        return str(do())
    except (GradwireError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


@on_ranks(3)
def test_if_one_rank_skips_all_do(group: Group) -> None:
    ddp, labels = DDP(mlp(seed=0), process_group=group), []
    group.events.listen(lambda event: labels.append(event.label), only=CollectiveSubmitted)
    answers = []
    for step in range(6):
        answers.append(ddp.agree_to_skip(group.rank == step))
        if not answers[-1]:
            backward(ddp)
    assert answers == [True] * 3 + [False] * 3
    assert ddp.replica.reducer.steps == 3
    assert "agree_to_skip" not in labels  # it has a group of its own


@on_ranks(2)
def test_two_models_agree_each_for_itself(group: Group) -> None:
    a, module = DDP(mlp(seed=0), process_group=group), Counter(group.rank)
    b = replicate(module, group=group)
    for step in range(4):
        assert a.agree_to_skip(group.rank == step) is (step < 2)
        output = module(inputs(group.rank)).sum()  # after this forward, before that one
        assert b.agree_to_skip(group.rank + 2 == step) is (step >= 2)
        if step >= 2:
            backward(a)
        else:
            output.backward()
    assert (a.replica.reducer.steps, b.reducer.steps) == (2, 2)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_forgets_is_named_at_once(place: str) -> None:
    def rank_main(group: Group) -> list[str]:
        ddp = DDP(Counter(group.rank), process_group=group)

        def step(number: int) -> str:
            calls = number != 2 or group.rank != 1
            if place == "forward" and calls:
                ddp.agree_to_skip(False)
            ddp.zero_grad()
            output = ddp(inputs(group.rank)).sum()
            if place == "backward" and calls:
                ddp.agree_to_skip(False)
            output.backward()
            return "done"

        return [attempt(lambda n=n: step(n)) for n in range(5)]

    for rank, said in enumerate(run_ranks(rank_main, 2)):
        assert said[:2] == said[3:] == ["done"] * 2
        assert (
            f"{place} of step 2 on rank 1: agree_to_skip was not called before it. Once it is used, call it" in said[2]
        )
        assert said[2].startswith("UsageError" if rank else "GroupAborted")


def test_a_rank_that_never_calls_is_named_by_the_deadline() -> None:
    def rank_main(group: Group) -> str:
        group.set_timeout(2.5)
        ddp = DDP(mlp(seed=0), process_group=group)
        if group.rank == 1:
            return attempt(lambda: backward(ddp))
        with pytest.raises(CollectiveTimeout) as caught:
            ddp.agree_to_skip(False)
        assert caught.value.missing == (1,)
        return str(caught.value)

    first, second = run_ranks(rank_main, 2)
    assert "agree_to_skip on rank 0 in step 0: ranks [1] did not call it within 2 s. Call it on every rank" in first
    assert first in second


def test_misuse_fails_the_step_on_all_ranks_once() -> None:
    def rank_main(group: Group) -> list[str]:
        ddp = DDP(mlp(seed=0), process_group=group)
        balance, other = Balance(ddp), DDP(mlp(seed=0), process_group=group)

        def twice() -> None:
            ddp.agree_to_skip(False)
            if group.rank == 1:
                ddp.agree_to_skip(False)
            backward(ddp)

        def during() -> None:
            ddp.agree_to_skip(False)
            output = ddp(inputs(0)).sum()
            if group.rank == 1:
                output.register_hook(lambda grad: ddp.agree_to_skip(True))
            output.backward()

        def anyway() -> None:
            ddp.agree_to_skip(group.rank == 0)
            backward(ddp)

        def other_order() -> None:
            balance.batch_size(4) if group.rank == 1 else ddp.agree_to_skip(False)

        def after_forward() -> None:
            output = other(inputs(0)).sum()
            other.agree_to_skip(True)
            output.backward()

        return [attempt(one) for one in (twice, during, anyway, other_order, after_forward)]

    said = run_ranks(rank_main, 2)
    for twice, during, anyway, other_order, after_forward in said:
        assert (
            "agree_to_skip on rank 1 for the second time in step 0, in which all ranks have agreed to go on." in twice
        )
        assert "agree_to_skip on rank 1 during backward: it is too late to skip." in during
        assert "forward of step 2 on rank" in anyway
        assert "agree_to_skip returned True, and was not called again before it" in anyway
        assert "before each step" in other_order
        assert "backward of step 0 on rank" in after_forward
    assert "agree_to_skip on rank 0 in step 3: rank 1 called Balance.batch_size in step 3" in said[0][3]


@on_ranks(2)
def test_accumulated_gradients_are_one_step(group: Group) -> None:
    ddp = DDP(mlp(seed=0), process_group=group)
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(inputs(group.rank)).sum().backward()
            if step == 2:
                assert ddp.agree_to_skip(group.rank == 0)
                continue
        assert not ddp.agree_to_skip(False)
        ddp(inputs(group.rank)).sum().backward()
    assert ddp.replica.reducer.steps == 3
    with torch.no_grad():
        ddp(inputs(0))  # evaluation needs no agreement
    ddp.eval()(inputs(0))
    ddp.train()
    with (
        ddp.join(),
        pytest.raises(UsageError, match=r"agree_to_skip on rank . under join\(\): a rank that has run out"),
    ):
        ddp.agree_to_skip(False)


@on_ranks(2)
def test_backwards_that_average_nothing_need_no_agreement(group: Group) -> None:
    """`torch.autograd.grad` of outputs before the call, and a backward through the bare module after a batch was skipped."""
    ddp = DDP(mlp(seed=0), process_group=group)
    for step in range(4):
        x = inputs(group.rank).requires_grad_()
        output = ddp(x).sum()
        (penalty,) = torch.autograd.grad(output, x, create_graph=True)
        skip = ddp.agree_to_skip(group.rank == 0 and step == 1)
        if skip:
            ddp.module(x).sum().backward()
        else:
            (output + penalty.pow(2).sum()).backward()
        ddp.zero_grad()
    assert ddp.replica.reducer.steps == 3


def test_an_exception_on_one_rank_reaches_those_that_wait_for_its_answer() -> None:
    """Also for the first one, when the group is still being made; and the loop goes on with all ranks in step."""

    def rank_main(group: Group) -> list[str]:
        ddp = DDP(mlp(seed=0), process_group=group)

        def step(number: int) -> Any:
            bad = group.rank == 1 and number in (0, 3)
            if bad and number == 0:
                ddp("no batch")
            skip = ddp.agree_to_skip(group.rank == 0 and number == 2)
            if bad:
                ddp("no batch")
            if not skip:
                backward(ddp)
            return skip

        return [attempt(lambda n=n: step(n)) for n in range(6)]

    first, second = run_ranks(rank_main, 2)
    for number in (0, 3):
        assert "must be Tensor, not str" in first[number]
        assert first[number].startswith("GroupAborted")
        assert second[number].startswith("TypeError")
    assert [first[n] for n in (1, 2, 4, 5)] == [second[n] for n in (1, 2, 4, 5)] == ["False", "True", "False", "False"]
