"""`DivergenceCheck`: one flipped bit on one rank is found, its rank and tensor are named on all ranks, and healed."""

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from gradwire import DivergenceCheck
from gradwire.collectives import OpKind
from gradwire.errors import ReplicasDiverged, UsageError, UsageRuntimeError, UsageTypeError
from gradwire.groups import Group, Recording
from gradwire.hooks import local_sgd
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import Divergence
from gradwire.testing import run_ranks
from helpers.models import flip
from helpers.rank_tests import on_ranks
from helpers.recorded_warnings import recorded_warnings


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


START = model()


def raised(check: DivergenceCheck) -> ReplicasDiverged:
    with pytest.raises(ReplicasDiverged) as caught:
        check.check()
    return caught.value


@on_ranks(3)
def test_equal_replicas_raise_no_warning_and_cost_one_small_collective_every_n_steps(group: Group) -> None:
    recorded = Recording(group)
    check = DivergenceCheck(copy.deepcopy(START), recorded, every=3)
    assert [check.step() for _ in range(7)] == [[]] * 7
    assert [(op.kind, op.shapes[0]) for op in recorded.submitted] == [(OpKind.ALL_GATHER_INTO_TENSOR, (3,))] * 2


def test_a_flipped_bit_is_named_on_all_ranks_within_n_steps() -> None:
    def rank_main(group: Group) -> str:
        net = copy.deepcopy(START)
        check = DivergenceCheck(net, group, every=4)
        for step in range(1, 9):
            if step == 5 and group.rank == 2:
                flip(net[2].weight, byte=5, bit=3)
            if step < 8:
                assert check.step() == []
        with pytest.raises(ReplicasDiverged) as caught:
            check.step()
        error = caught.value
        assert (error.ranks, error.parameters, error.tie, error.step) == ((2,), ("2.weight",), False, 8)
        return str(error)

    texts = run_ranks(rank_main, 4)
    assert len(set(texts)) == 1
    assert "after 8 steps: rank 2 differs from the majority in 2.weight." in texts[0]


@pytest.mark.filterwarnings("ignore:comparing replicas")
@settings(max_examples=30)
@given(data=st.data())
def test_any_bit_of_any_parameter_on_any_rank(data: st.DataObject) -> None:
    n = data.draw(st.integers(3, 4))
    dtypes = st.sampled_from(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2]
    )
    kinds = data.draw(
        st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), dtypes, st.booleans()), min_size=1, max_size=4)
    )
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in kinds]
    wrong = data.draw(st.sampled_from(range(len(kinds))))
    culprit, bit = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 7))
    byte = data.draw(st.integers(0, max(0, sizes[wrong] - 1)))

    def rank_main(group: Group) -> None:
        net = nn.Module()
        for i, (shape, dtype, turned) in enumerate(kinds):
            p = torch.full(shape, math.nan).to(dtype)
            net.register_parameter(
                f"p{i}", nn.Parameter(p.mT.contiguous().mT if turned and p.dim() > 1 else p, requires_grad=False)
            )
        if group.rank == culprit and sizes[wrong]:
            flip(net.get_parameter(f"p{wrong}"), byte, bit)
        check = DivergenceCheck(net, group, policy=Divergence.HEAL)
        found = check.check()
        assert [(one.name, one.ranks) for one in found] == ([(f"p{wrong}", (culprit,))] if sizes[wrong] else [])
        assert check.check() == []

    run_ranks(rank_main, n)


@on_ranks(2)
def test_two_ranks_are_a_tie_which_cannot_be_healed(group: Group) -> None:
    net = copy.deepcopy(START)
    if group.rank == 1:
        flip(net[0].bias)
    before = net[0].bias.detach().clone()
    error = raised(DivergenceCheck(net, group, policy=Divergence.HEAL))
    assert (error.ranks, error.parameters, error.tie) == ((0, 1), ("0.bias",), True)
    assert "no value has a majority" in str(error)
    assert torch.equal(net[0].bias, before)


@pytest.mark.filterwarnings("ignore:comparing replicas")
def test_every_tensor_is_healed_from_its_own_majority() -> None:
    def rank_main(group: Group) -> list[Tensor]:
        net = copy.deepcopy(START)
        if group.rank < 2:
            flip((net[0].weight, net[2].weight)[group.rank])
        check = DivergenceCheck(net, group, policy=Divergence.HEAL)
        found = check.check()
        assert [(one.name, one.ranks, one.source) for one in found] == [("0.weight", (0,), 1), ("2.weight", (1,), 0)]
        return [p.detach() for p in net.parameters()]

    results = run_ranks(rank_main, 3)
    for result in results:
        for a, b in zip(result, START.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:comparing replicas")
@on_ranks(3)
def test_the_state_of_the_optimizer_is_compared_and_healed(group: Group) -> None:
    net = copy.deepcopy(START)
    ddp = DDP(net, process_group=group)
    optimizer = torch.optim.Adam(ddp.parameters())
    check = DivergenceCheck(ddp, every=1, policy=Divergence.HEAL, optimizer=optimizer)
    assert check.group is group
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        if step == 1 and group.rank == 1:
            flip(optimizer.state[net[0].weight]["exp_avg_sq"], byte=3)
            optimizer.state[net[2].bias]["step"] += 1
        found = check.step()
        assert [(one.name, one.ranks) for one in found] == (
            [("exp_avg_sq of 0.weight", (1,)), ("step of 2.bias", (1,))] if step == 1 else []
        )
    assert float(optimizer.state[net[2].bias]["step"]) == 3


@on_ranks(3)
def test_ranks_whose_optimizers_have_made_different_steps(group: Group) -> None:
    net = copy.deepcopy(START)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    if group.rank == 1:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    error = raised(DivergenceCheck(net, group, policy=Divergence.HEAL, optimizer=optimizer))
    assert (error.ranks, error.tie) == ((1,), False)
    assert "do not have the same tensors: rank 0 6, rank 1 12, rank 2 6" in str(error)


@on_ranks(3)
def test_buffers_are_compared_if_they_are_named(group: Group) -> None:
    net = copy.deepcopy(START)
    net[1].running_mean.add_(group.rank)
    assert DivergenceCheck(net, group).check() == []
    error = raised(DivergenceCheck(net, group, buffers=["1.running_mean"]))
    assert (error.parameters, error.ranks) == (("1.running_mean",), (0, 1, 2))


def test_what_was_found_is_recorded(tmp_path: Path) -> None:
    def rank_main(group: Group) -> None:
        net = copy.deepcopy(START)
        if group.rank == 0:
            for p in net.parameters():
                flip(p)
        check = DivergenceCheck(net, group, every=1, policy=Divergence.RECORD)
        for _ in range(2):
            assert [one.ranks for one in check.step()] == [(0,)] * 6

    match = "rank 0 differs .* 0.weight, 0.bias, 1.weight and 3 more tensors"
    found = recorded_warnings(tmp_path, rank_main, 3, match=match)
    assert [one.step for one in found] == [0, 1]


@on_ranks(2)
def test_while_a_hook_lets_ranks_differ_the_check_is_put_off(group: Group) -> None:
    net = nn.Linear(2, 1)
    recorded = Recording(group)
    replica = replicate(net, group=group, hook=local_sgd(every=3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    replica.attach_optimizer(optimizer)
    check = DivergenceCheck(net, recorded, every=2)
    checks = []
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
        optimizer.step()
        before = len(recorded.submitted)
        assert check.step() == []
        checks.append(len(recorded.submitted) > before)
    assert checks == [False, False, True, False, False, True]
    replica.detach()


def test_wrong_arguments(group: Group) -> None:
    net = nn.BatchNorm1d(2)
    with pytest.raises(UsageError, match="every=0"):
        DivergenceCheck(net, group, every=0)
    with pytest.raises(
        UsageTypeError, match=r"policy='heal'.* Pass Divergence.RECORD, Divergence.HEAL or Divergence.RAISE"
    ):
        DivergenceCheck(net, group, policy="heal")  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="torch.nn.Module"):
        DivergenceCheck(net.state_dict(), group)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no such buffer"):
        DivergenceCheck(net, group, buffers=["running_meen"])
    with pytest.raises(UsageError, match="running_mean"):
        DivergenceCheck(net, group, buffers="running_mean")
    with pytest.raises(
        UsageTypeError, match=r"optimizer=Tensor\): not a torch.optim.Optimizer. Leave it out to compare"
    ):
        DivergenceCheck(net, group, optimizer=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"DivergenceCheck\(optimizer=SGD\): it moves none of the model's parameters"):
        DivergenceCheck(net, group, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with pytest.raises(UsageRuntimeError, match=r"Or pass your own group: DivergenceCheck\(model, group\)"):
        DivergenceCheck(net)
    assert DivergenceCheck(nn.ReLU(), group).check() == []
