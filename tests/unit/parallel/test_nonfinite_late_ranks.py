"""Checks whose result the host reads one step later: all ranks read it in the same step, whatever one of them lacks."""

import math

import pytest
import torch

from gradwire.errors import GroupAborted, NonFiniteGradient
from gradwire.groups import Group, ThreadGroup
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import NonFinite
from gradwire.testing import run_ranks
from helpers.backward_calls import fail_in_backward
from helpers.late_checks import all_finite, attached, checked_model, fused, step, train_step
from helpers.poisoned_model import Model, inputs
from helpers.rank_tests import on_ranks

pytestmark = pytest.mark.usefixtures("emulate_device")


@on_ranks(2)
def test_after_a_step_that_has_failed_nothing_is_left_of_it(group: Group) -> None:
    """A recovery drops the result that was pending, on all ranks, and what the failed step had found."""
    ddp, optimizer = checked_model(group, NonFinite.RAISE, bucket_cap_mb=0.0001)
    for number in range(3):
        train_step(ddp, optimizer, group.rank, number)
    optimizer.zero_grad()
    with pytest.raises((RuntimeError, GroupAborted)):  # in the forward, if the other rank has failed before it
        loss = ddp(inputs(group.rank, 3), math.nan).sum()
        if group.rank == 1:
            loss = fail_in_backward(loss, RuntimeError, "no")
        (loss + 0 * sum(p.sum() for p in ddp.parameters() if p.numel())).backward()
    for number in range(4, 8):
        train_step(ddp, optimizer, group.rank, number)
    ddp.finish_checks()


def test_ranks_with_uneven_inputs_wait() -> None:
    """Those that have none left make no steps, and could not tell when the others read a result; one from before is read."""

    def rank_main(group: Group) -> None:
        ddp, optimizer = checked_model(group, NonFinite.SKIP)
        bad, seen = {2, 5, 8}, []
        for number in range(3):
            train_step(ddp, optimizer, group.rank, number, math.nan if number in bad else 1.0)
        with ddp.join():
            for number in range(3, 4 if group.rank == 1 else 8):
                optimizer.zero_grad()
                step(ddp, group.rank, number, math.nan if number in bad else 1.0)
                seen += [number] if all(p.grad is None for p in ddp.parameters()) else []
                optimizer.step()
        assert seen == ([5] if group.rank == 0 else [])
        for number in range(8, 11):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in ddp.parameters()]
            step(ddp, group.rank, number, math.nan if number in bad else 1.0)
            optimizer.step()
            moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert moved == (number not in bad)

    with pytest.warns(RuntimeWarning, match="step 2"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_without_any_inputs(first: int) -> None:
    def rank_main(group: Group) -> None:
        ddp, optimizer = checked_model(group, NonFinite.SKIP)
        with ddp.join():
            for number in range(5 if group.rank == 0 else first):
                train_step(ddp, optimizer, group.rank, number, math.nan if number in (2, 3) else 1.0)

    with pytest.warns(RuntimeWarning, match="step 2"):
        run_ranks(rank_main, 2)


@on_ranks(2)
def test_an_optimizer_attached_on_one_rank_only_is_waited_for(group: Group) -> None:
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(ddp)
    if group.rank == 0:
        ddp.attach_optimizer(optimizer)
    for number in range(6):
        optimizer.zero_grad()
        if number == 4:
            with pytest.raises(NonFiniteGradient, match="No average was written"):
                step(ddp, group.rank, number, math.nan)
        else:
            step(ddp, group.rank, number)
            optimizer.step()


def test_an_optimizer_attached_in_the_middle_of_training(group: Group) -> None:
    """Ranks ask each other again, in fewer and fewer steps."""
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(ddp)
    late = []
    for number in range(20):
        if number == 5:
            ddp.attach_optimizer(optimizer)
        optimizer.zero_grad()
        step(ddp, 0, number)
        late.append(ddp.reads_late)
        optimizer.step()
    assert late == [False] * 8 + [True] * 12
    ddp.finish_checks()
    assert not ddp.reads_late


def test_after_join_ranks_begin_again() -> None:
    """A rank that had no inputs has made no step; those that have must wait with it."""

    def rank_main(group: Group) -> None:
        ddp, optimizer = checked_model(group, NonFinite.SKIP)
        with ddp.join():
            for number in range(3 if group.rank == 0 else 0):
                train_step(ddp, optimizer, group.rank, number)
        with ddp.join(enable=False):
            for number in range(3, 9):
                train_step(
                    ddp, optimizer, group.rank, number, math.nan if number in (3, 6) and group.rank == 0 else 1.0
                )
        assert all_finite(ddp)
        ddp.finish_checks()
        assert ddp.skipped_steps == 2

    with pytest.warns(RuntimeWarning, match="step 3"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize("bad", [0, 1, 2])
@on_ranks(2)
def test_a_group_with_a_new_rank_begins_again(group: Group, bad: int) -> None:
    """A rank that has made no step yet waits; the others must wait with it, and read together from the next step on."""
    model = Model()
    for p in model.parameters():
        p.data.fill_(0.01)
    (alone,) = ThreadGroup.world(1)
    replica = replicate(model, group=alone, nonfinite=NonFinite.RAISE)
    optimizer = attached(replica, fused(model))
    for number in range(3 if group.rank == 0 else 0):
        train_step(model, optimizer, 0, number)
    replica.move_to_group(group)
    replica.runner.start_over()  # ranks have made different numbers of steps
    for number in range(4):
        optimizer.zero_grad()
        poison = math.nan if number == bad and group.rank == 1 else 1.0
        if number == bad + (bad > 0):
            with pytest.raises(NonFiniteGradient) as caught:
                step(model, group.rank, number, poison)
            assert caught.value.rank == 1
        else:
            step(model, group.rank, number, poison)
            optimizer.step()
    replica.detach()
