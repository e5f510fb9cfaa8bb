"""Buffers: made equal to rank 0's before every forward, at the start, never, or by a user's hook."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import UsageTypeError
from gradwire.groups import Group, Recording
from gradwire.parallel import DistributedDataParallel as DDP, Replica, replicate
from gradwire.parallel.replica import ReplicaPolicies
from gradwire.policies import Buffers
from gradwire.testing import run_ranks
from helpers.models import Counter
from helpers.rank_tests import on_ranks


def x(rank: int) -> Tensor:
    return torch.full((3, 4), float(rank))


EXPECTED = {Buffers.EVERY_FORWARD: [3.0, 4.0], Buffers.AT_START: [3.0, 6.0], Buffers.NEVER: [3.0, 7.0]}


@pytest.mark.parametrize("policy", list(Buffers), ids=lambda policy: policy.value)
def test_the_policies_differ_in_when(policy: Buffers) -> None:
    def rank_main(group: Group) -> float:
        model = Counter(group.rank)
        replica = replicate(model, group=group, buffers=policy)
        for _ in range(3):
            model(x(group.rank)).sum().backward()
        replica.detach()
        return model.seen[0].item()

    assert run_ranks(rank_main, 2) == EXPECTED[policy]


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ({}, Buffers.EVERY_FORWARD),
        ({"broadcast_buffers": True}, Buffers.EVERY_FORWARD),
        ({"broadcast_buffers": False}, Buffers.NEVER),
        ({"forward_sync_buffers": False}, Buffers.AT_START),
        ({"forward_sync_buffers": True}, Buffers.EVERY_FORWARD),
    ],
)
def test_torchs_flags_are_these_policies(flags: dict[str, bool], policy: Buffers) -> None:
    def rank_main(group: Group) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DDP(Counter(group.rank), process_group=group, **flags)
        for _ in range(3):
            ddp(x(group.rank)).sum().backward()
        return ddp.module.seen[0].item()

    assert run_ranks(rank_main, 2) == EXPECTED[policy]


def test_nothing_is_sent_before_a_forward_that_follows_one_without_synchronization() -> None:
    """As in torch: the buffers have not been trained on together since."""

    def rank_main(group: Group) -> list[int]:
        assert isinstance(group, Recording)
        ddp, sent = DDP(Counter(group.rank), process_group=group), []
        for kind in ("step", "no_sync", "no_sync", "step", "step"):
            before = len(group.submitted)
            if kind == "step":
                ddp(x(0)).sum().backward()
            else:
                with ddp.no_sync():
                    ddp(x(0)).sum().backward()
            sent.append(sum("broadcast_coalesced" in s.label for s in group.submitted[before:]))
        return sent

    assert run_ranks(rank_main, 2, wrap=Recording) == [[2, 2, 0, 0, 2]] * 2  # two dtypes: two broadcasts


@on_ranks(2)
def test_two_forwards_before_one_backward_leave_version_counters_alone(group: Group) -> None:
    """BatchNorm saves its statistics for backward; a broadcast between must not count as a change to them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()  # in eval mode they are saved
    ddp = DDP(model, process_group=group)
    versions = [b._version for b in model.buffers()]
    (ddp(torch.randn(3, 4)).sum() + ddp(torch.randn(3, 4)).sum()).backward()
    assert [b._version for b in model.buffers()] == versions
    assert ddp.replica.reducer.steps == 1


def test_ranks_agree_on_batch_norm_statistics_after_a_forward_of_rank_0(local_means: Any) -> None:
    def rank_main(group: Group) -> list[Tensor]:
        torch.manual_seed(group.rank)
        ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
        for _ in range(3):
            ddp(torch.randn(5, 4)).sum().backward()
        ddp.eval()
        ddp(torch.randn(5, 4))
        return [b.clone() for b in ddp.module.buffers()]

    a, b = run_ranks(rank_main, 2)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("location", [None, "PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_takes_the_place_of_the_broadcast(location: str | None) -> None:
    def rank_main(group: Group) -> tuple[float, list[Any]]:
        calls: list[Any] = []

        def hook(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
            calls.append((state, sorted(buffers)))
            later = location != "PRE_FORWARD"  # what is not waited for here is waited for at the end of backward
            return [group.all_reduce(buffers["seen"], async_op=later).get_future()]

        ddp = DDP(Counter(group.rank), process_group=group)
        ddp._register_buffer_comm_hook("mine", hook, location)
        ddp(x(0)).sum().backward()
        return ddp.module.seen[0].item(), calls

    for seen, calls in run_ranks(rank_main, 2):
        assert seen == (1.0 if location == "PRE_FORWARD" else 2.0)  # 0 + 0 + 1, or 1 + 1
        assert calls == [("mine", ["count", "seen"])]


@on_ranks(1)
def test_a_buffer_hook_must_be_callable(group: Group) -> None:
    ddp = DDP(Counter(0), process_group=group)
    with pytest.raises(UsageTypeError, match="is not callable"):
        ddp._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]


def test_a_replica_lists_its_buffers_by_name() -> None:
    def rank_main(group: Group) -> list[str]:
        model = Counter(0)
        replica = Replica(model, group, policies=ReplicaPolicies(ignore=["count"]))
        replica.detach()
        return list(replica.state.named_buffers())

    assert run_ranks(rank_main, 1) == [["seen"]]
