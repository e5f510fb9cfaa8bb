"""Training on ranks that are processes."""

import copy
import math
import os
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import DivergenceCheck
from gradwire.collectives import Layout
from gradwire.errors import (
    CollectiveTimeout,
    GroupError,
    HookError,
    NonFiniteGradient,
    Origin,
    PeerLost,
    ReplicasDiverged,
)
from gradwire.groups import Group
from gradwire.hooks import (
    cast,
    chain,
    diloco,
    error_feedback,
    gossip,
    hierarchical,
    mean,
    quantize,
    streaming_diloco,
    top_k,
)
from gradwire.interop import as_torch_hook
from gradwire.parallel import Balance, DistributedDataParallel as DDP, broadcast_coalesced, replicate
from gradwire.policies import Divergence, NonFinite
from gradwire.testing import run_ranks, simulate
from helpers import models
from helpers.buckets import bucket, gradients
from helpers.growth import assert_nothing_grew, grown, small
from helpers.outer_training import NET, flat, loss_on, train
from helpers.poisoned_model import Model, inputs
from helpers.rank_tests import on_ranks
from helpers.through_file import through_file
from helpers.two_hosts import HALF, reduce_on, two_hosts


def test_channels_last_weights_over_gloo() -> None:
    def rank_main(group: Group) -> Any:
        weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(group.rank))
        weight = nn.Parameter(weight.to(memory_format=torch.channels_last))
        broadcast_coalesced(group, [weight, torch.zeros(5)], buffer_size=64, src=1)
        return weight.detach(), weight.is_contiguous(memory_format=torch.channels_last)

    (a, kept), (b, _) = run_ranks(rank_main, 2, kind="gloo")
    assert torch.equal(a, b)
    assert kept


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_sparse_embedding_gets_the_mean_as_a_sparse_gradient(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2))

    def rank_main(group: Group) -> Any:
        mine = copy.deepcopy(model)
        ddp = DDP(mine, process_group=group)
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.tensor([group.rank, 5, 6 + step])).pow(2).sum().backward()
        return mine[0].weight.grad, mine[1].weight.grad, ddp.replica.reducer.layout.buckets[-1].sparse

    dense = copy.deepcopy(model)
    for rank in range(2):
        dense(torch.tensor([rank, 5, 8])).pow(2).sum().div(2).backward()
    for embedding, weight, _ in run_ranks(rank_main, 2, kind=kind):
        assert embedding.is_sparse
        torch.testing.assert_close(embedding.to_dense(), dense[0].weight.grad.to_dense())
        torch.testing.assert_close(weight, dense[1].weight.grad)


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_nonfinite_on_processes(kind: str) -> None:
    def rank_main(group: Group) -> list[Any]:
        model, seen = Model(), []
        for hook in (mean(), chain(cast(torch.float16), mean()), chain(error_feedback(), quantize(bits=8))):
            replica = replicate(model, group=group, hook=hook, nonfinite=NonFinite.RAISE)
            for value in (1.0, math.nan, 1e9, 1.0):
                model.zero_grad()
                try:
                    model(inputs(group.rank), value if group.rank == 2 else 1.0).sum().backward()
                    seen.append("fine")
                except NonFiniteGradient as error:
                    seen.append((error.rank, error.parameter, error.origin))
            replica.detach()
        return seen

    results = run_ranks(rank_main, 3, kind=kind)
    bad, over = (2, "first.bias", Origin.GRADIENT), (2, "first.bias", Origin.OVERFLOW)
    assert results[0] == ["fine", bad, "fine", "fine", "fine", bad, over, "fine", "fine", bad, "fine", "fine"]
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_divergence_on_processes(kind: str) -> None:
    def rank_main(group: Group) -> list[Any]:
        net = models.mlp(seed=0)
        results: list[Any] = []
        for policy in (Divergence.RAISE, Divergence.HEAL):
            check = DivergenceCheck(net, group, policy=policy)
            if group.rank == 1:
                models.flip(net[2].bias, bit=7)
            try:
                results.append([(one.name, one.ranks, one.source) for one in check.check()])
            except ReplicasDiverged as error:
                results.append((error.ranks, error.parameters))
            if policy is Divergence.RAISE and group.rank == 1:
                models.flip(net[2].bias, bit=7)
        results.append(torch.equal(net[2].bias, models.mlp(seed=0)[2].bias))
        return results

    assert run_ranks(rank_main, 3, kind=kind) == [[((1,), ("2.bias",)), [("2.bias", (1,), 0)], True]] * 3


@on_ranks(3, kind="gloo")
def test_torchs_ddp_on_its_default_group(group: Group, torch_world: Callable[..., Any]) -> None:
    with torch_world(group, "gloo"):
        net = models.mlp(seed=0)
        ddp = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.Adam(ddp.parameters())
        check = DivergenceCheck(ddp, every=2, optimizer=optimizer)
        for _ in range(2):
            ddp(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            assert check.step() == []
        if group.rank == 1:
            models.flip(net[2].bias)
        with pytest.raises(ReplicasDiverged) as caught:
            check.check()
        assert caught.value.parameters == ("2.bias",)
        del caught
        check.group.close()


@pytest.mark.parametrize("reassign", [False, True], ids=["in place", "reassigned"])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_before_every_forward_they_are_those_of_rank_0(reassign: bool, kind: str) -> None:
    def rank_main(group: Group) -> list[Any]:
        ddp = DDP(models.Counter(group.rank, reassign=reassign), process_group=group)
        seen = []
        for _ in range(3):
            ddp(torch.full((3, 4), float(group.rank))).sum().backward()
            seen.append(ddp.module.seen.tolist())
        return [ddp.module.count.item(), seen]

    a, b = run_ranks(rank_main, 2, kind=kind)
    assert a == [0, [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]]
    assert b == [0, [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]]  # one step ahead of what it got from rank 0


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_outer_steps_between_processes(kind: str) -> None:
    """Three ranks, so that of random pairs one stays alone and sends nothing; the same as between threads."""
    hooks = [gossip(topology="random"), streaming_diloco(every=2, fragments=2, delay=1)]

    def rank_main(group: Group) -> list[Tensor]:
        return [train(group, hook, 4)[1][-1] for hook in hooks]

    for there, here in zip(run_ranks(rank_main, 3, kind=kind), run_ranks(rank_main, 3), strict=True):
        for a, b in zip(there, here, strict=True):
            torch.testing.assert_close(a, b)


def test_outer_steps_under_torchs_own_ddp(torch_world: Callable[..., Any]) -> None:
    hooks = [diloco(every=2), gossip()]

    def rank_main(group: Group) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        with torch_world(group, "gloo"):
            for hook in hooks:
                model = TorchDDP(copy.deepcopy(NET))
                ours = as_torch_hook(hook, group, named_parameters=model.module.named_parameters())
                model.register_comm_hook(None, ours)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
                ours.attach_optimizer(optimizer)
                for step in range(6):
                    optimizer.zero_grad()
                    loss_on(model, group.rank, step).backward()
                    optimizer.step()
                    if step == 2:
                        ours.load_hook_state_dict(ours.hook_state_dict())
                pairs.append((flat(model), train(group, hook, 6)[1][-1]))
                ours.average_parameters()
                del model, ours, optimizer
        return pairs

    for rank in run_ranks(rank_main, 2, kind="gloo"):
        for torchs, own in rank:
            torch.testing.assert_close(torchs, own)


def test_hundreds_of_steps_over_gloo_leave_nothing_behind() -> None:
    for more in run_ranks(lambda group: grown(lambda: small(group)), 2, kind="gloo"):
        assert_nothing_grew(more)


SMALL = 0.0001


HOOK = chain(error_feedback(), cast(torch.bfloat16), mean())


with torch.random.fork_rng():
    torch.manual_seed(0)
    SMALL_NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_hook_state_under_torchs_own_ddp(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Any, Any]:
            model = TorchDDP(copy.deepcopy(SMALL_NET), bucket_cap_mb=SMALL)
            hook = as_torch_hook(HOOK, group, named_parameters=model.module.named_parameters())
            model.register_comm_hook(None, hook)
            return model, hook

        with torch_world(group, "gloo"):
            whole, hook = make()
            models.train(whole, group.rank, range(4))
            state = through_file({"model": whole.state_dict(), "hook": hook.hook_state_dict()})
            assert state["hook"]["step"] == 4
            assert sorted(state["hook"]["state"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
            expected = models.train(whole, group.rank, range(4, 7))
            other, again = make()
            other.load_state_dict(state["model"])
            again.load_hook_state_dict(state["hook"])
            with pytest.raises(HookError, match=r"and the model now has mean\(\)"):
                as_torch_hook(mean(), group).load_hook_state_dict(state["hook"])
            resumed = models.train(other, group.rank, range(4, 7))
            del whole, other, hook, again
        return expected, resumed

    for expected, resumed in run_ranks(rank_main, 2, kind="gloo"):
        assert torch.equal(expected, resumed)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@on_ranks(2, kind="gloo")
def test_a_copy_keeps_mixed_precision_hook_state_and_weight(
    group: Group, torch_world: Callable[..., Any], how: str
) -> None:
    with torch_world(group, "gloo"):
        ddp = DDP(
            models.mlp(seed=0),
            mixed_precision=SimpleNamespace(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=None),
        )
        ddp.set_hook(chain(error_feedback(), top_k(ratio=0.1)))
        ddp.replica.runner.weight = 3.0

        def step(model: DDP, number: int) -> list[Tensor]:
            model.zero_grad()
            output = model(models.inputs(group.rank, number))
            assert output.dtype == BF16
            output.float().pow(2).sum().backward()
            assert {t.dtype for t in model.state_dict().values()} == {FP32}
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        for number in range(3):
            step(ddp, number)
        if group.rank == 0:  # it takes no other rank, and no step of one
            duplicate(ddp, how)(models.inputs(0, 0))
        copied = duplicate(ddp, how)
        assert copied.replica.runner.weight == 3.0
        assert repr(copied.replica.hook) == repr(ddp.replica.hook)
        assert copied.hook_state_dict()["step"] == 3
        for number in range(3, 6):
            for a, b in zip(step(ddp, number), step(copied, number), strict=True):
                assert torch.equal(a, b)
            # In buckets of another order top_k chooses another one of two equal elements.
            assert copied.replica.reducer.layout == ddp.replica.reducer.layout


def duplicate(ddp: DDP, how: str) -> DDP:
    if how == "deepcopy":
        return copy.deepcopy(ddp)
    return through_file(ddp, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 1, 2), (3,))], ids=["2 + 2", "3 + 1"])
@pytest.mark.parametrize("kind", ["threads", "shared memory"])
def test_a_group_computes_what_the_simulation_computes(hosts: Any, kind: str) -> None:
    brought = gradients(4, 34)
    hook = hierarchical(across=HALF)
    expected = simulate(hook, brought, spec=bucket((17, 2)), hosts=hosts, donated=True).reduced[0].value

    def rank_main(world: Group) -> Tensor:
        with two_hosts(world, Layout(hosts)) as group:
            return reduce_on(group, hook, brought[world.rank].clone())

    for value in run_ranks(rank_main, 4, kind=kind.replace(" ", "_")):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
@pytest.mark.parametrize("how", ["dies", "leaves", "never calls"])
def test_a_rank_that_does_not_agree_to_skip_is_named(kind: str, how: str) -> None:
    def rank_main(group: Group) -> str:
        ddp = DDP(models.mlp(seed=0), process_group=group)
        group.set_timeout(2.0 if how == "never calls" else 60.0)
        if group.rank == 1 and how == "never calls":
            with pytest.raises(GroupError):
                ddp(models.inputs(1)).sum().backward()
            return ""
        ddp.agree_to_skip(False)
        ddp(models.inputs(group.rank)).sum().backward()
        if group.rank == 1:
            if how == "dies":
                os._exit(1)
            return ""
        ddp.agree_to_skip(False)
        return "agreed"

    def named(group: Group) -> str:
        try:
            return rank_main(group)
        except (PeerLost, CollectiveTimeout) as error:
            return str(error)

    said = run_ranks(named, 2, kind=kind, lost={1} if how == "dies" else ())[0]
    words = r"ranks \[1\] did not call it within 1.6 s" if how == "never calls" else "rank 1 has left without it"
    assert re.match(rf"agree_to_skip on rank 0 in step {0 if how == 'never calls' else 1}: {words}\. Call it on", said)


@on_ranks(2, kind="gloo")
def test_shares_by_time_that_passes(group: Group) -> None:
    """Rank 1 is four times as slow; the gradient is that of the whole batch."""
    ddp = DDP(Sleeping(0.002 * (1 + 3 * group.rank)), process_group=group)
    balance, batch = Balance(ddp, every=3), models.inputs(0, rows=20)
    for _ in range(8):
        balance.batch_size(20)
        ddp.zero_grad()
        ddp(batch.split(list(balance.shares))[group.rank]).pow(2).mean().backward()
        alone = copy.deepcopy(ddp.module.layers)
        alone.zero_grad()
        alone(batch).pow(2).mean().backward()
        for got, want in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-6)
    assert balance.shares[0] >= 13


class Sleeping(nn.Module):
    """A model that sleeps for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers, self.seconds = models.mlp(seed=0), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * len(x))
        return self.layers(x)
