"""c10d's methods, called directly on a group of threads; and the way there and back."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import gradwire as gw
from gradwire import C10dGroup, Group, GroupWrapper, ThreadGroup
from gradwire.collectives import Collective
from gradwire.errors import CollectiveTimeout, UsageError, UsageTypeError
from gradwire.groups import Work
from gradwire.interop import GradwireProcessGroup, as_process_group, from_process_group
from gradwire.testing import run_ranks
from gradwire.testing.conformance import check_group, check_names
from helpers.adapters import ThereAndBack

SIZE = 3
RANKS = range(SIZE)


def mine(rank: int, n: int = 3) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 10 * rank


def options(name: str, **named: Any) -> Any:
    made = getattr(c10d, f"{name}Options")()
    for key, value in named.items():
        setattr(made, key, value)
    return made


TOTAL = [sum(10.0 * r + i for r in RANKS) for i in range(3)]
ROOT = {"rootRank": 1}


def allreduce(pg: GradwireProcessGroup, rank: int) -> Any:
    a, b, c, d = mine(rank), mine(rank), mine(rank), mine(rank)
    pg.allreduce([a], options("Allreduce")).wait()
    pg.allreduce(b, dist.ReduceOp.MAX).wait()
    pg.allreduce([c], dist._make_nccl_premul_sum(2.0)).wait()
    pg.allreduce_coalesced([d], options("AllreduceCoalesced", reduceOp=dist.ReduceOp.AVG)).wait()
    return [a, b, c, d], [TOTAL, [20, 21, 22], [2 * t for t in TOTAL], [t / SIZE for t in TOTAL]]


def broadcast(pg: GradwireProcessGroup, rank: int) -> Any:
    a, b = mine(rank), mine(rank)
    pg.broadcast([a], options("Broadcast", **ROOT)).wait()
    pg.broadcast(b, 2, timedelta(seconds=9)).wait()
    return [a, b], [[10, 11, 12], [20, 21, 22]]


def reduce(pg: GradwireProcessGroup, rank: int) -> Any:
    a, b = mine(rank), mine(rank)
    pg.reduce([a], options("Reduce", **ROOT)).wait()
    pg.reduce(b, root=0, op=dist.ReduceOp.MIN).wait()
    return [a, b], [TOTAL if rank == 1 else mine(rank).tolist(), [0, 1, 2] if rank == 0 else mine(rank).tolist()]


def allgather(pg: GradwireProcessGroup, rank: int) -> Any:
    a, b = [torch.empty(3) for _ in RANKS], [torch.empty(3) for _ in RANKS]
    pg.allgather([a], [mine(rank)], options("Allgather")).wait()
    pg.allgather(b, mine(rank), timedelta(seconds=9)).wait()
    return a + b, [mine(r).tolist() for r in RANKS] * 2


def all_gather_single(pg: GradwireProcessGroup, rank: int) -> Any:
    whole = [v for r in RANKS for v in mine(r).tolist()]
    results = []
    for name in ("all_gather_single", "_allgather_base"):
        results.append(torch.empty(9))
        getattr(pg, name)(results[-1], mine(rank), options("Allgather")).wait()
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        results += [torch.empty(9), torch.empty(3, dtype=torch.int64)]
        getattr(pg, name)(results[-2:], [mine(rank), torch.tensor([rank])], options("Allgather")).wait()
    return results, [whole, whole, whole, [0, 1, 2], whole, [0, 1, 2]]


def reduce_scatter(pg: GradwireProcessGroup, rank: int) -> Any:
    a, b = torch.empty(3), torch.empty(3)
    pg.reduce_scatter([a], [[mine(rank) + r for r in RANKS]], options("ReduceScatter")).wait()
    pg.reduce_scatter(b, [mine(rank) + r for r in RANKS], dist.ReduceOp.MAX).wait()
    return [a, b], [[t + SIZE * rank for t in TOTAL], [20 + rank, 21 + rank, 22 + rank]]


def reduce_scatter_single(pg: GradwireProcessGroup, rank: int) -> Any:
    results, expected = [], []
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        results.append(torch.empty(1))
        getattr(pg, name)(results[-1], mine(rank), options("ReduceScatter")).wait()
        expected.append([TOTAL[rank]])
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        results += [torch.empty(1), torch.empty(2)]
        getattr(pg, name)(results[-2:], [mine(rank), torch.ones(6)], options("ReduceScatter")).wait()
        expected += [[TOTAL[rank]], [3, 3]]
    return results, expected


def gather(pg: GradwireProcessGroup, rank: int) -> Any:
    outputs = [[torch.empty(3) for _ in RANKS] if rank == 1 else [] for _ in range(3)]
    pg.gather([outputs[0]] if rank == 1 else [], [mine(rank)], options("Gather", **ROOT)).wait()
    pg.gather([outputs[1]], [mine(rank)], options("Gather", **ROOT)).wait()  # [[]] where it is not the root
    pg.gather(outputs[2], mine(rank), 1, timedelta(seconds=9)).wait()
    return [t for got in outputs for t in got], [mine(r).tolist() for r in RANKS] * (3 if rank == 1 else 0)


def scatter(pg: GradwireProcessGroup, rank: int) -> Any:
    inputs = [mine(r) for r in RANKS]
    a, b, c = torch.empty(3), torch.empty(3), torch.empty(3)
    pg.scatter([a], [inputs] if rank == 1 else [], options("Scatter", **ROOT)).wait()
    pg.scatter([b], [inputs if rank == 1 else []], options("Scatter", **ROOT)).wait()
    pg.scatter(c, inputs if rank == 1 else [], root=1).wait()
    return [a, b, c], [mine(rank).tolist()] * 3


def all_to_all_single(pg: GradwireProcessGroup, rank: int) -> Any:
    even, uneven = torch.empty(3), torch.empty(SIZE * (rank + 1))
    pg.alltoall_base(even, mine(rank), [], [], options("AllToAll")).wait()
    pg.all_to_all_single(uneven, mine(rank, 6), [rank + 1] * SIZE, [1, 2, 3], timedelta(seconds=9)).wait()
    start = (0, 1, 3)[rank]
    return [even, uneven], [
        [10.0 * r + rank for r in RANKS],
        [10.0 * r + i for r in RANKS for i in range(start, start + rank + 1)],
    ]


def barriers(pg: GradwireProcessGroup, rank: int) -> Any:
    pg.barrier().wait()
    pg.barrier(opts=options("Barrier")).wait()
    pg.barrier(timedelta(seconds=9)).wait()
    pg.monitored_barrier()
    pg.monitored_barrier(timedelta(seconds=9), wait_all_ranks=True)
    return [], []


METHODS = [
    allreduce, broadcast, reduce, allgather, all_gather_single, reduce_scatter, reduce_scatter_single, gather, scatter,
    all_to_all_single, barriers,
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_method(method: Callable[..., Any]) -> None:
    for got, expected in run_ranks(lambda group: method(as_process_group(group), group.rank), SIZE):
        assert [t.tolist() for t in got] == expected


@pytest.fixture
def alone() -> Any:
    (group,) = ThreadGroup.world(1, timeout=5.0)
    yield as_process_group(group)
    group.close()


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("reduce", ([torch.ones(1)] * 2,)),
        ("reduce_scatter", ([torch.ones(1)] * 2, [[torch.ones(1)]])),
        ("allgather", ([[torch.ones(1)]] * 2, [torch.ones(1)])),
        ("gather", ([[torch.ones(1)]], [torch.ones(1)] * 2)),
        ("scatter", ([torch.ones(1)], [[torch.ones(1)]] * 2)),
        ("send", ([torch.ones(1)] * 2, 0, 0)),
        ("recv", ([], 0, 0)),
        ("recv_anysource", ([torch.ones(1)] * 2, 0)),
    ],
)
def test_one_place_per_process(alone: GradwireProcessGroup, method: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=rf"{method} on .*pass exactly one"):
        getattr(alone, method)(*args)


def test_lists_of_a_coalesced_gather_must_fit(alone: GradwireProcessGroup) -> None:
    with pytest.raises(UsageError, match=r"lists of \[1\] outputs for 2 inputs"):
        alone.allgather_coalesced([[torch.ones(1)]], [torch.ones(1)] * 2)


def test_the_groups_own_errors_come_through(alone: GradwireProcessGroup) -> None:
    with pytest.raises(UsageError, match="root is 3"):
        alone.broadcast(torch.ones(1), 3)


class Odd(GroupWrapper):
    """Hands back what a group should not."""

    answer: Any = None

    def submit(self, op: Collective) -> Work:
        self.inner.submit(op)
        return self.answer


@pytest.mark.parametrize("answer", [None, "work", dist.Work()])
def test_a_group_that_returns_no_work(alone: GradwireProcessGroup, answer: Any) -> None:
    odd = Odd(alone.group)
    odd.answer = answer
    with pytest.raises(UsageTypeError, match=r"all_reduce\(float32\[1\], SUM\) on <Odd.* submit returned") as caught:
        as_process_group(odd).allreduce([torch.ones(1)])
    assert repr(answer) in str(caught.value)


def test_a_group_that_returns_no_work_is_an_error_in_c_plus_plus_too(alone: GradwireProcessGroup) -> None:
    """torch 2.13 itself dies of a segmentation fault when a Python group returns None."""
    pg = as_process_group(Odd(alone.group))
    with pytest.raises(TypeError, match="submit returned None"):
        dist._broadcast_coalesced(pg, [torch.ones(2)], 1024, 0)


def test_an_exception_keeps_its_type_through_c_plus_plus(alone: GradwireProcessGroup) -> None:
    alone.abort()
    with pytest.raises(gw.GroupAborted, match="torch aborted"):
        dist._broadcast_coalesced(alone, [torch.ones(2)], 1024, 0)


def test_a_missing_rank_is_named() -> None:
    def scenario(group: Group) -> Any:
        if group.rank:
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            as_process_group(group).monitored_barrier(timedelta(milliseconds=50))
        return caught.value.missing

    assert run_ranks(scenario, 3)[0] == (1, 2)


@pytest.mark.parametrize("name", ["gloo", "NCCL", ""])
def test_names_that_mean_a_c_plus_plus_engine(alone: GradwireProcessGroup, name: str) -> None:
    with pytest.raises(UsageError, match="one of torch's backends"):
        as_process_group(alone.group, backend_name=name)


def test_only_groups_become_process_groups() -> None:
    with pytest.raises(UsageTypeError, match=r"as_process_group\(3\): not a gradwire Group"):
        as_process_group(3)  # type: ignore[arg-type]


def test_back_to_the_same_group(alone: GradwireProcessGroup) -> None:
    assert from_process_group(alone) is alone.group
    with pytest.raises(UsageError, match="has its own"):
        from_process_group(alone, timeout=3.0)


def test_any_other_process_group_is_run_on() -> None:
    engine = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=9))
    with from_process_group(engine, name="theirs", timeout=4.0) as group:
        assert isinstance(group, C10dGroup)
        assert (group.name, group.timeout) == ("theirs", 4.0)
        assert group.all_reduce(torch.ones(1)).wait()


@pytest.mark.parametrize("value", [None, -100, "gloo"])
def test_what_is_no_process_group(value: Any) -> None:
    with pytest.raises(UsageTypeError, match="not a process group"):
        from_process_group(value)


# A label does not survive c10d, which has no such thing, and sparse tensors come out of C10dGroup as copies.
SURVIVES_C10D = [name for name in check_names() if name not in ("mismatch", "all_reduce_sparse")]


def test_there_and_back_conforms_on_one_rank() -> None:
    """The whole suite through both adapters: whatever one drops on the way, the other misses. More ranks: the conformance tests."""

    check_group(lambda fn: run_ranks(fn, 1, wrap=ThereAndBack), only=SURVIVES_C10D)
