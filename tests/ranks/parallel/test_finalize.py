"""torch 2.15's additions to DDP: manual finalization of backward, and buckets that are allocated during backward only."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import UsageError
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks.combinators.feedback import error_feedback
from gradwire.hooks.compressors.sparse import top_k
from gradwire.hooks.dense import chain
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import BucketMemory, Buckets, Gradients
from gradwire.testing import run_ranks
from helpers.models import inputs
from helpers.rank_tests import on_ranks

SMALL = 0.0001
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"bucket_cap_mb": SMALL},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": SMALL},
    "static": {"static_graph": True},
    "lazy": {"lazy_bucket_allocation": True, "bucket_cap_mb": SMALL},
    "mixed": {"mixed_precision": SimpleNamespace(param_dtype=None, reduce_dtype=torch.float64, buffer_dtype=None)},
}
ZERO = ["none", "in place", "accumulate"]
over_flags = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def means(model: nn.Module, n: int, step: int) -> list[Tensor]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(n):
        alone(inputs(rank, step)).pow(2).sum().div(n).backward()
    return [p.grad for p in alone.parameters()]  # type: ignore[misc]


def check(ddp: nn.Module, expected: list[Tensor]) -> None:
    for p, want in zip(ddp.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want)


@over_flags
@on_ranks(3)
def test_gradients_come_back_when_the_caller_says_so(group: Group, flags: dict[str, Any]) -> None:
    ddp = DDP(Model(), process_group=group, **flags)
    ddp.require_manual_backward_finalization = True
    assert ddp.require_manual_backward_finalization
    for step in range(5):
        ddp.zero_grad()
        output = ddp(inputs(group.rank, step))
        learning = step == 0 or (flags.get("static_graph", False) and step == 1)
        must_wait = "mixed_precision" in flags or ("find_unused_parameters" not in flags and learning)
        assert ddp.should_finalize_after_backward == must_wait
        output.pow(2).sum().backward()
        assert ddp.replica.reducer.steps == step
        ddp.finalize_backward()
        assert ddp.replica.reducer.steps == step + 1
        check(ddp, means(ddp.module, group.size, step))
    ddp.require_manual_backward_finalization = False
    ddp.zero_grad()
    ddp(inputs(group.rank, 9)).pow(2).sum().backward()
    check(ddp, means(ddp.module, group.size, 9))


@pytest.mark.parametrize("flags", [FLAGS["plain"], FLAGS["views"], FLAGS["lazy"]], ids=["plain", "views", "lazy"])
@on_ranks(2)
def test_finalized_from_a_backward_hook_the_optimizer_steps_during_backward(
    group: Group, flags: dict[str, Any]
) -> None:
    ddp = DDP(Model(), process_group=group, **flags)
    ddp.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        expected, before = means(ddp.module, group.size, step), copy.deepcopy(ddp.module)
        x = inputs(group.rank, step).requires_grad_()
        scaled = x * 2 / 2  # its backward comes after the model's
        steps = []

        def finalize(_: Tensor, steps: list[int] = steps) -> None:
            ddp.finalize_backward()
            optimizer.step()
            steps.append(1)

        output = ddp(scaled)
        in_backward = not ddp.should_finalize_after_backward
        if in_backward:
            scaled.register_hook(finalize)
        output.pow(2).sum().backward()
        if not in_backward:
            finalize(scaled)
        assert steps == [1]
        assert in_backward == (step > 0)
        for p, old, grad in zip(ddp.parameters(), before.parameters(), expected, strict=True):
            torch.testing.assert_close(p, old - 0.1 * grad)


@on_ranks(2)
def test_what_is_out_of_order_is_refused_and_changes_nothing(group: Group) -> None:
    ddp = DDP(Model(), process_group=group, bucket_cap_mb=SMALL)
    with pytest.raises(RuntimeError, match="require_manual_backward_finalization = True first"):
        ddp.finalize_backward()
    assert not ddp.should_finalize_after_backward
    ddp.require_manual_backward_finalization = True
    with pytest.raises(UsageError, match="there is no reduction to finalize"):
        ddp.finalize_backward()
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(inputs(group.rank, step)).pow(2).sum().backward()
            with pytest.raises(UsageError, match="no_sync"):
                ddp.finalize_backward()
        ddp.zero_grad()
        early: list[str] = []

        def too_early(grad: Tensor, early: list[str] = early) -> None:
            with pytest.raises(UsageError, match=r"no reduction|no gradient yet for .*first.weight"):
                ddp.finalize_backward()
            early.append("refused")

        handle = ddp.module.first.weight.register_hook(too_early)
        ddp(inputs(group.rank, step)).pow(2).sum().backward()
        handle.remove()
        assert early == ["refused"]
        with pytest.raises(UsageError, match="not finalized yet"):
            ddp.require_manual_backward_finalization = False
        with pytest.raises(UsageError, match=r"Call finalize_backward\(\) before the next forward"):
            ddp(inputs(group.rank, step))
        ddp.finalize_backward()
        with pytest.raises(UsageError, match="there is no reduction to finalize"):
            ddp.finalize_backward()
        check(ddp, means(ddp.module, group.size, step))


def test_with_all_parameters_delayed_there_is_nothing_to_finalize() -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        model = Model()
        ddp = DDP(
            model,
            process_group=group,
            delay_all_reduce_named_params=list(model.named_parameters()),
            param_to_hook_all_reduce=model.first.weight,
        )
        with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"):
            ddp.require_manual_backward_finalization = True
        ddp.require_manual_backward_finalization = False


@on_ranks(2, kind="gloo")
def test_a_copy_finalizes_manually_too(group: Group, torch_world: Callable[..., Any]) -> None:
    with torch_world(group, "gloo"):
        ddp = DDP(nn.Linear(4, 2), lazy_bucket_allocation=True)
        ddp.require_manual_backward_finalization = True
        copied = copy.deepcopy(ddp)
        assert copied.lazy_bucket_allocation
        copied(inputs(group.rank)).pow(2).sum().backward()
        assert copied.replica.reducer.steps == 0
        copied.finalize_backward()
        check(copied, means(copied.module, group.size, 0))


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("place", range(len(FLAGS)), ids=FLAGS)
def test_lazy_buckets_give_the_same_gradients_and_hold_no_memory_between_steps(place: int, zero: str) -> None:
    flags = list(FLAGS.values())[place]
    kind = ("threads", "shared_memory")[(place + ZERO.index(zero)) % 2]  # every pair of the three

    def rank_main(group: Group) -> None:
        def hold() -> set[bool]:
            return {s.buffer is None for s in lazy.replica.reducer.buckets.storages}

        lazy = DDP(Model(), process_group=group, **{**flags, "lazy_bucket_allocation": True})
        eager = DDP(Model(), process_group=group, **{**flags, "lazy_bucket_allocation": False})
        for step in range(5):
            for ddp in (lazy, eager):
                assert hold() == {True}
                if zero != "accumulate":
                    ddp.zero_grad(set_to_none=zero == "none")
                ddp(inputs(group.rank, step)).pow(2).sum().backward()
            assert hold() == {True}
            for p, q in zip(lazy.parameters(), eager.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)

    run_ranks(rank_main, 2, kind=kind)


@on_ranks(2, kind="gloo")
def test_lazy_buckets_with_a_hook_that_remembers_and_uneven_inputs(
    group: Group, torch_world: Callable[..., Any]
) -> None:
    with torch_world(group, "gloo"):
        models = [DDP(Model(), lazy_bucket_allocation=lazy, bucket_cap_mb=SMALL) for lazy in (True, False)]
        for ddp in models:
            ddp.set_hook(chain(error_feedback(), top_k(ratio=0.3)))
            with ddp.join():
                for step in range(3 + group.rank):
                    ddp.zero_grad()
                    ddp(inputs(group.rank, step)).pow(2).sum().backward()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_replicate_has_it_as_a_policy() -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        model = Model()
        buckets = Buckets(memory=BucketMemory.DURING_BACKWARD)
        replica = replicate(model, group=group, buckets=buckets, gradients=Gradients.VIEWS)
        model(inputs(0)).sum().backward()
        assert {s.buffer for s in replica.reducer.buckets.storages} == {None}
        replica.detach()
