"""Unusual steps: accumulation, sparse and ignored parameters, layouts, outputs of every kind, weights, events."""

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import LayoutError, UsageError
from gradwire.events import (
    BackwardBegan,
    BackwardEnded,
    BucketFull,
    BucketLaunched,
    BucketReduced,
    ForwardBegan,
    ForwardEnded,
    GradientReady,
    StepEnded,
)
from gradwire.groups import Group, Recording
from gradwire.hooks import weighted_mean
from gradwire.parallel import DistributedDataParallel as DDP, Replica, replicate
from gradwire.policies import Graph
from gradwire.testing import run_ranks
from helpers.models import inputs, mlp
from helpers.rank_tests import on_ranks

SMALL = 0.0001


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("form", ["ddp", "replicate"])
def test_no_sync_accumulates_to_the_gradient_of_the_big_batch(views: bool, form: str) -> None:
    model, micro_batches = mlp(hidden=2), 3

    def rank_main(group: Group) -> None:
        big = copy.deepcopy(model)
        for rank in range(group.size):
            for step in range(4 * micro_batches):
                big(inputs(rank, step)).pow(2).sum().div(group.size).backward()
        mine = copy.deepcopy(model)
        wrapped: Any = DDP(mine, process_group=group, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
        handle: Any = wrapped
        if form == "replicate":
            wrapped.replica.detach()
            wrapped, handle = mine, replicate(mine, group=group)
        for step in range(4 * micro_batches):  # with a rebuild of the buckets between
            if step % micro_batches < micro_batches - 1:
                with handle.no_sync():
                    wrapped(inputs(group.rank, step)).pow(2).sum().backward()
            else:
                wrapped(inputs(group.rank, step)).pow(2).sum().backward()
        for ours, theirs in zip(mine.parameters(), big.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    run_ranks(rank_main, 2)


@on_ranks(2, wrap=Recording)
def test_no_sync_sends_nothing_and_can_be_nested(group: Group) -> None:
    assert isinstance(group, Recording)
    ddp = DDP(mlp(hidden=2), process_group=group)
    before = len(group.submitted)
    with ddp.no_sync():
        ddp(inputs(group.rank)).sum().backward()
        with ddp.no_sync():
            pass
        ddp(inputs(group.rank)).sum().backward()
    assert len(group.submitted) == before
    ddp(inputs(group.rank)).sum().backward()
    assert len(group.submitted) == before + 1


@on_ranks(2)
def test_ignored_parameters_and_buffers_are_left_to_the_caller(group: Group) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.fill_(float(group.rank))
        model[1].running_mean.fill_(float(group.rank))
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "1.running_mean"])
    ddp = DDP(model, process_group=group)
    assert "0.weight" not in ddp.replica.names
    assert model[0].weight.eq(group.rank).all()
    assert model[1].running_mean.eq(group.rank).all()
    ddp(inputs(group.rank)).sum().backward()
    assert model[0].weight.grad is not None
    mine = [model[0].weight.grad.clone(), model[2].bias.grad.clone()]
    both = [g.clone() for g in mine]
    for g in both:
        group.broadcast(g, 0)
    assert torch.equal(mine[1], both[1])
    assert not torch.equal(mine[0], both[0]) or group.rank == 0


def test_delayed_all_reduce_averages_when_the_trigger_comes(
    local_means: Callable[..., Any], assert_gradients: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    model = mlp(hidden=2)

    def rank_main(group: Group) -> None:
        mine = copy.deepcopy(model)
        delayed = [(n, p) for n, p in mine.named_parameters() if n.startswith(("2.", "4."))]
        ddp = DDP(
            mine, process_group=group, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=mine[0].weight
        )
        for step in range(3):
            x = inputs(group.rank, step)
            expected = local_means(group, model, lambda m, x=x: m(x).pow(2).sum())
            ddp.zero_grad()
            ddp(x).pow(2).sum().backward()
            assert_gradients(mine, expected)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_channels_last_gradients_keep_their_strides(group: Group, views: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    ddp = DDP(model, process_group=group, gradient_as_bucket_view=views)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(3):
        ddp.zero_grad()
        ddp(images).sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()


@dataclass
class Answer:
    logits: Tensor
    extra: Any = None


Pair = namedtuple("Pair", ["logits", "extra"])


class Packs(nn.Module):
    """Wraps its output in the given way."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.spare, self.pack = nn.Linear(4, 2), nn.Linear(4, 2), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.layer(x))


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (lambda y: Answer(y, {"n": 1}), lambda out: out.logits),
    "namedtuple": (lambda y: Pair(y, None), lambda out: out.logits),
    "dict": (lambda y: {"logits": y, "step": 3}, lambda out: out["logits"]),
    "nested": (lambda y: [{"deep": (y, "text")}, None], lambda out: out[0]["deep"][0]),
    "tensor and integers": (lambda y: (y, torch.arange(3)), lambda out: out[0]),
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("graph", [Graph.FIND_UNUSED, Graph.STATIC])
def test_outputs_of_every_structure(group: Group, pack: str, graph: Graph) -> None:
    wrap, unwrap = PACKS[pack]
    model = Packs(wrap)
    replica = replicate(model, group=group, graph=graph)
    for step in range(3):
        model.zero_grad()
        output = model(inputs(0, step))
        assert type(output) is type(wrap(torch.zeros(1)))
        unwrap(output).sum().backward()
        assert model.layer.weight.grad is not None
        assert model.spare.weight.grad is None
    assert replica.reducer.steps == 3
    replica.detach()


@pytest.mark.parametrize("graph", list(Graph), ids=lambda graph: graph.value)
def test_a_loss_in_place_on_the_output(group: Group, graph: Graph) -> None:
    model = nn.Linear(4, 2)
    replica = replicate(model, group=group, graph=graph)
    for _ in range(2):
        output = model(inputs(0))
        output.mul_(2).sum().backward()
    assert replica.reducer.steps == 2
    replica.detach()


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_create_graph(views: bool) -> None:
    """A gradient penalty: backward through a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))

    def penalty(m: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    def rank_main(group: Group) -> None:
        ddp = DDP(copy.deepcopy(model), process_group=group, gradient_as_bucket_view=views, find_unused_parameters=True)
        ddp(inputs(group.rank)).pow(2).sum().backward(create_graph=True)
        ddp.zero_grad()
        penalty(ddp, inputs(group.rank)).backward()
        both = copy.deepcopy(model)
        for rank in range(group.size):
            penalty(both, inputs(rank)).div(group.size).backward()
        torch.testing.assert_close(ddp.module[0].weight.grad, both[0].weight.grad)

    run_ranks(rank_main, 2)


def test_functional_call_with_other_parameters(group: Group) -> None:
    ddp = DDP(nn.Linear(4, 2), process_group=group)
    other = {"module.weight": torch.zeros(2, 4, requires_grad=True)}
    output = torch.func.functional_call(ddp, other, (inputs(0),))
    assert torch.equal(output, ddp.module.bias.expand_as(output))
    output.sum().backward()
    assert other["module.weight"].grad is not None
    assert ddp.module.weight.grad is None


def test_autograd_grad_leaves_the_reducer_alone(group: Group) -> None:
    ddp = DDP(nn.Linear(4, 2), process_group=group)
    torch.autograd.grad(ddp(inputs(0)).sum(), list(ddp.parameters()))
    assert ddp.replica.reducer.steps == 0
    ddp(inputs(0)).sum().backward()
    assert ddp.replica.reducer.steps == 1


def test_the_weighted_mean_is_the_gradient_over_the_union_of_unequal_batches() -> None:
    torch.manual_seed(0)
    model, rows = mlp(hidden=2), [1, 5, 2]

    def rank_main(group: Group) -> Any:
        ddp = DDP(copy.deepcopy(model), process_group=group, bucket_cap_mb=SMALL)
        ddp.register_comm_hook(None, weighted_mean())
        for step in range(3):
            ddp.zero_grad()
            batch = inputs(group.rank, step, rows[(group.rank + step) % 3])
            ddp.set_weight(len(batch))
            ddp(batch).pow(2).mean().backward()
        return [p.grad for p in ddp.parameters()]

    union = torch.cat([inputs(rank, 2, rows[(rank + 2) % 3]) for rank in range(3)])
    model(union).pow(2).mean().backward()
    for grads in run_ranks(rank_main, 3):
        for ours, p in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad)


def test_ranks_with_other_models_raise_at_construction() -> None:
    def rank_main(group: Group) -> str:
        with pytest.raises(LayoutError) as caught:
            DDP(nn.Linear(4, 2 + (group.rank == 1)), process_group=group)
        return str(caught.value)

    said = run_ranks(rank_main, 3)
    assert said == [said[0]] * 3
    assert "rank 1 and rank 0 disagree. The first parameter that differs is number 0: 'weight: float32[3, 4]" in said[0]


def test_parameters_begin_as_those_of_rank_0() -> None:
    def rank_main(group: Group) -> Any:
        model = nn.Linear(4, 2)
        torch.nn.init.constant_(model.weight, group.rank + 1.0)
        DDP(model, process_group=group)
        return model.weight.detach()

    assert all(weight.eq(1.0).all() for weight in run_ranks(rank_main, 3))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.LazyLinear(3), "Modules with uninitialized parameters.*Uninitialized: weight"),
        (nn.ReLU(), "not needed when a module doesn't have any parameters that require a gradient"),
    ],
)
def test_what_cannot_be_replicated(group: Group, model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        DDP(model, process_group=group)
    assert isinstance(caught.value, RuntimeError)


def test_events_report_a_step_in_order(group: Group) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    replica = Replica(model, group)
    replica.reducer.order.limits = (1,)
    for _ in range(2):
        events: list[Any] = []
        handle = replica.reducer.events.listen(events.append)
        replica.before_forward()
        replica.after_forward(model(inputs(0))).sum().backward()
        handle.remove()
    assert [event.parameter for event in events if isinstance(event, GradientReady)] == (
        ["1.bias", "1.weight", "0.bias", "0.weight"]
    )
    full = [event for event in events if isinstance(event, BucketFull)]
    assert [(e.bucket, e.parameters, e.numel) for e in full] == [
        (0, ("1.bias",), 2), (1, ("1.weight",), 8), (2, ("0.bias",), 4), (3, ("0.weight",), 16),
    ]  # fmt: skip
    assert [type(event) for event in events] == [
        ForwardBegan, ForwardEnded, BackwardBegan, *[GradientReady, BucketFull, BucketLaunched] * 4, BackwardEnded,
        *[BucketReduced] * 4, StepEnded,
    ]  # fmt: skip
    assert [event.bucket for event in events if isinstance(event, BucketReduced)] == [0, 1, 2, 3]
    assert events[-1].step == 2
    assert [event.time for event in events] == sorted(event.time for event in events)
    replica.detach()
