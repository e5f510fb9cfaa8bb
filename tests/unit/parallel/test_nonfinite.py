"""`NonFinite.RAISE`: NaN and infinity are named by rank and parameter on every rank, and training goes on."""

from __future__ import annotations

import copy
import gc
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import NonFiniteGradient
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import CommHook, cast, chain, diloco, error_feedback, mean, quantize, top_k
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.parallel import replicate
from gradwire.policies import Buckets, Gradients, NonFinite
from gradwire.testing import run_ranks

SMALL = 0.0001
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"bucket_cap_mb": SMALL},
    "one bucket": {},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "lazy": {"lazy_bucket_allocation": True},
    "mixed": {
        "mixed_precision": SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=None)
    },
}
HOOKS: dict[str, Callable[[], CommHook]] = {
    "mean": mean,
    "cast": lambda: chain(cast(torch.bfloat16), mean()),
    "top_k": lambda: chain(error_feedback(), top_k(ratio=0.5)),
    "quantize": lambda: chain(error_feedback(), quantize(bits=8)),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor, poison: float = 1.0) -> Tensor:
        return self.last(_Scale.apply(torch.relu(self.first(x)), poison)) + self.empty.sum()


class _Scale(torch.autograd.Function):
    """Multiplies gradients alone, so that those of `first` are poisoned and the loss is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.rand(3, 4, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.1


def means(model: nn.Module, n: int, step: int) -> list[Tensor]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(n):
        alone(inputs(rank, step)).pow(2).sum().div(n).backward()
    return [p.grad for p in alone.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_rank_raises_with_rank_and_parameter_and_the_next_step_is_right(flags: Any, value: float) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE, **flags)
        for step in range(8):
            ddp.zero_grad()
            bad = step in (0, 3, 4)
            loss = ddp(inputs(group.rank, step), value if bad and group.rank == 1 else 1.0).float().pow(2).sum()
            if bad:
                with pytest.raises(
                    NonFiniteGradient, match=r"on rank 1 the gradient of first\.\w+ holds NaN"
                ) as caught:
                    loss.backward()
                assert caught.value.rank == 1
                assert caught.value.parameter in ("first.weight", "first.bias")
            else:
                loss.backward()
                for p, want in zip(ddp.parameters(), means(ddp.module, group.size, step), strict=True):
                    torch.testing.assert_close(p.grad, want, rtol=0.1, atol=0.1)
        assert group.failure is None

    run_ranks(rank_main, 3)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_every_hook(hook: Callable[[], CommHook]) -> None:
    def rank_main(group: Group) -> list[Tensor]:
        model = Model()
        replica = replicate(
            model,
            group=group,
            hook=hook(),
            nonfinite=NonFinite.RAISE,
            gradients=Gradients.COPIES,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(inputs(group.rank, step), math.nan if step == 2 and group.rank == 0 else 1.0).pow(2).sum()
            if step == 2:
                with pytest.raises(NonFiniteGradient) as caught:
                    loss.backward()
                assert caught.value.rank == 0
            else:
                loss.backward()
                optimizer.step()
        replica.detach()
        return [p.detach() for p in model.parameters()]

    first, second = run_ranks(rank_main, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def test_ranks_that_do_not_average_their_gradients_raise_together() -> None:
    def rank_main(group: Group) -> None:
        model = Model()
        replica = replicate(model, group=group, hook=diloco(every=2), nonfinite=NonFinite.RAISE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica.attach_optimizer(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(inputs(group.rank, step), math.nan if step == 2 and group.rank == 0 else 1.0).pow(2).sum()
            if step == 2:
                with pytest.raises(NonFiniteGradient, match="on rank 0"):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
        replica.average_parameters()
        replica.detach()

    run_ranks(rank_main, 2)


def test_an_average_that_overflows_is_nobodys_gradient() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        ddp.set_hook(chain(cast(torch.float16), mean()))
        with pytest.raises(NonFiniteGradient, match="finite on every rank, but their average is not") as caught:
            ddp(inputs(group.rank), 1e6).sum().backward()
        assert caught.value.rank is None
        assert caught.value.parameter in ("first.weight", "first.bias")

    run_ranks(rank_main, 2)


def test_huge_but_finite_gradients_pass() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Linear(4, 4, bias=False), process_group=group, nonfinite=NonFinite.RAISE)
        (ddp(torch.ones(1, 4)).sum() * 2e38).backward()  # their sum is infinite

    run_ranks(rank_main, 1)


def test_sparse_gradients() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Embedding(5, 3, sparse=True), process_group=group, nonfinite=NonFinite.RAISE)
        for factor in (1.0, math.nan, 1.0):
            ddp.zero_grad()
            loss = (ddp(torch.tensor([1, 2])) * (factor if group.rank == 1 else 1.0)).sum()
            if math.isnan(factor):
                with pytest.raises(NonFiniteGradient, match="on rank 1 the gradient of weight"):
                    loss.backward()
            else:
                loss.backward()

    run_ranks(rank_main, 2)


def test_it_costs_one_collective_and_nothing_unless_asked_for() -> None:
    def rank_main(group: Group) -> None:
        for policy, more in ((NonFinite.PASS, 0), (NonFinite.RAISE, 1)):
            recorded = Recording(group)
            model = Model()
            replica = replicate(model, group=recorded, nonfinite=policy)
            for _ in range(3):
                model.zero_grad()
                model(inputs(group.rank)).sum().backward()
            before = len(recorded.submitted)
            model.zero_grad()
            model(inputs(group.rank)).sum().backward()
            assert len(recorded.submitted) - before == 1 + more
            replica.detach()

    run_ranks(rank_main, 2)


def test_the_page_tells_the_truth() -> None:
    page = Path(__file__).parents[3] / "docs" / "ddp.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_a_model_dropped_in_the_middle_of_a_step_is_freed_at_once() -> None:
    (group,) = ThreadGroup.world(1)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replica = replicate(module, group=group, nonfinite=NonFinite.RAISE, buckets=Buckets((1,), from_start=True))
    module(torch.ones(1, 2))
    module[1](torch.ones(1, 2)).sum().backward()  # half of the gradients
    weak = weakref.ref(module[0].weight)
    gc.collect()
    gc.disable()
    try:
        del module, replica
        assert weak() is None
    finally:
        gc.enable()
    group.close()
