"""Every function of `dist` does over gradwire what it does over gloo."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

import gradwire as gw
from gradwire.errors import CollectiveTimeout, GroupAborted, PeerLost

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def numbers(rank: int, n: int = 6) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 10 * rank


def all_reduce(rank: int, size: int) -> Any:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        t = numbers(rank)
        dist.all_reduce(t, op)
        results.append(t)
    bits = torch.tensor([rank + 1, 6], dtype=torch.int64)
    for bitwise in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        t = bits.clone()
        dist.all_reduce(t, bitwise)
        results.append(t)
    z = torch.complex(numbers(rank), numbers(rank))
    dist.all_reduce(z)
    return [*results, z]


def broadcast_and_reduce(rank: int, size: int) -> Any:
    a, b = numbers(rank), numbers(rank)
    dist.broadcast(a, src=size - 1)
    dist.reduce(b, dst=1)
    return [a, b if rank == 1 else None]


def all_gather(rank: int, size: int) -> Any:
    parts = [torch.empty(6) for _ in range(size)]
    whole = torch.empty(6 * size)
    lists = [[torch.empty(6), torch.empty(2, 2)] for _ in range(size)]
    z = [torch.empty(3, dtype=torch.complex64) for _ in range(size)]
    dist.all_gather(parts, numbers(rank))
    dist.all_gather_into_tensor(whole, numbers(rank))
    dist.all_gather_coalesced(lists, [numbers(rank), torch.full((2, 2), float(rank))])
    dist.all_gather(z, torch.full((3,), complex(rank, 1)))
    return [parts, whole, lists, z]


def gather_and_scatter(rank: int, size: int) -> Any:
    outputs = [torch.empty(6) for _ in range(size)] if rank == 1 else None
    dist.gather(numbers(rank), outputs, dst=1)
    mine = torch.empty(6)
    dist.scatter(mine, [numbers(r) for r in range(size)] if rank == 1 else None, src=1)
    return [outputs, mine]


def reduce_scatter(rank: int, size: int) -> Any:
    a, b = torch.empty(6), torch.empty(6)
    dist.reduce_scatter(a, [numbers(rank + r) for r in range(size)])
    dist.reduce_scatter_tensor(b, torch.cat([numbers(rank + r) for r in range(size)]))
    return [a, b]


def all_to_all(rank: int, size: int) -> Any:
    single, uneven = torch.empty(6), torch.empty(size * (rank + 1))
    dist.all_to_all_single(single, numbers(rank))
    dist.all_to_all_single(
        uneven,
        numbers(rank, size * (size + 1) // 2),
        output_split_sizes=[rank + 1] * size,
        input_split_sizes=list(range(1, size + 1)),
    )
    return [single, uneven]


def point_to_point(rank: int, size: int) -> Any:
    t, source = numbers(rank), None
    if rank == 0:
        dist.send(t, 1, tag=7)
        dist.send(t + 1, 1)
        dist.isend(t + 2, 1).wait()
    elif rank == 1:
        source = [dist.recv(t, 0, tag=7)]
        any_source = torch.empty(6)
        source.append(dist.recv(any_source))
        work = dist.irecv(t, 0)
        work.wait()
    out, back = numbers(rank), torch.empty(6)
    after, before = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, back, before)]):
        work.wait()
    return [t, source, back]


def barriers(rank: int, size: int) -> Any:
    dist.barrier()
    options = c10d.BarrierOptions()
    options.device, options.timeout = torch.device("cpu"), timedelta(seconds=100)
    dist.group.WORLD.barrier(options).wait()
    return dist.barrier(async_op=True).wait()


def objects(rank: int, size: int) -> Any:
    everybody = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    shared = [{"from": 1}] if rank == 1 else [None]
    dist.broadcast_object_list(shared, src=1)
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(("rank", rank), gathered)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None)
    sent = ["a", {"b": 2}] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(sent, 1)
    elif rank == 1:
        dist.recv_object_list(sent, 0)
    return [everybody, shared, gathered, mine, sent if rank < 2 else None]


def coalesced(rank: int, size: int) -> Any:
    a, b = numbers(rank), numbers(rank, 3)
    dist.all_reduce_coalesced([a, b])
    return [a, b]


def groups(rank: int, size: int) -> Any:
    all_but_last = dist.new_group(list(range(size - 1)))
    alone = dist.new_group([rank], use_local_synchronization=True)
    t = numbers(rank)
    if rank < size - 1:
        dist.all_reduce(t, group=all_but_last)
    dist.all_reduce(t, group=alone)
    dist.all_reduce(t, group=dist.new_subgroups(1)[0])
    engine = dist.new_group(list(range(size)), backend="gloo")  # with another backend than the default group
    dist.all_reduce(t, group=engine)
    kind = dist.get_backend(engine)
    if rank < size - 1:
        dist.destroy_process_group(all_but_last)
    return [t, kind, dist.get_rank(engine), dist.get_world_size(alone), dist.get_process_group_ranks(engine)]


def meshes(rank: int, size: int) -> Any:
    flat = init_device_mesh("cpu", (size,))
    named = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    t = numbers(rank)
    dist.all_reduce(t, group=flat.get_group())
    dist.all_reduce(t, group=named.get_group("shard"))
    return [t, named.get_local_rank("shard")]


def functional_collectives(rank: int, size: int) -> Any:
    world = dist.group.WORLD
    grad = torch.ones(size, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(grad, 0, world)
    (gathered * numbers(rank, len(gathered))).sum().backward()
    ops = torch.ops._c10d_functional
    name = world.group_name
    results = [
        functional.all_reduce(numbers(rank), "sum", world),
        functional.all_gather_tensor(numbers(rank), 0, world),
        functional.reduce_scatter_tensor(numbers(rank), "sum", 0, world),
        functional.broadcast(numbers(rank), 1, world),
        functional.all_to_all_single(numbers(rank), None, None, world),
        functional.permute_tensor(numbers(rank), [*range(1, size), 0], world),
        *functional.all_reduce_coalesced([numbers(rank), numbers(rank, 3)], "max", world),
        *functional.all_gather_into_tensor_coalesced([numbers(rank), numbers(rank, 3)], world),
        *functional.reduce_scatter_tensor_coalesced([numbers(rank)], "sum", [0], world),
        ops.all_reduce_(numbers(rank), "sum", name),
        ops.broadcast_(numbers(rank), 0, name),
        *ops.all_reduce_coalesced_([numbers(rank)], "sum", name),
    ]
    return [*(functional.wait_tensor(t).clone() for t in results), grad.grad]


def from_c_plus_plus(rank: int, size: int) -> Any:
    a, b = numbers(rank), numbers(rank, 3)
    dist._broadcast_coalesced(dist.group.WORLD, [a, b], 1024, 1)
    dist._verify_params_across_processes(dist.group.WORLD, [a, b], None)
    return [a, b]


def differentiable(rank: int, size: int) -> Any:
    t = numbers(rank).requires_grad_()
    dist.nn.functional.all_reduce(t * t).sum().backward()
    u = numbers(rank).requires_grad_()
    (torch.stack(dist.nn.functional.all_gather(u)) ** 2).sum().backward()
    return [t.grad, u.grad]


EQUAL = [
    all_reduce, broadcast_and_reduce, all_gather, gather_and_scatter, reduce_scatter, all_to_all, point_to_point, barriers,
    objects, coalesced, groups, meshes, functional_collectives, from_c_plus_plus, differentiable,
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every scenario's results on every rank, over gloo and over gradwire. One world runs them all: worlds are slow."""

    def all_of_them(rank: int, size: int) -> dict[str, Any]:
        done: dict[str, Any] = {}
        for scenario in EQUAL:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # of names that torch 2.11 does not have otherwise
                    done[scenario.__name__] = scenario(rank, size)
            except Exception as error:  # the ranks are no longer in step, so what follows is not tried
                done["failed"] = f"{scenario.__name__}: {type(error).__name__}: {error}"
                break
        return done

    return request.getfixturevalue("stock_both")(all_of_them, request.param)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in EQUAL])
def test_gradwire_gives_what_gloo_gives(results: tuple[list[dict[str, Any]], ...], name: str) -> None:
    over_gloo, over_gradwire = results
    for rank in range(len(over_gloo)):
        assert name in over_gloo[rank], over_gloo[rank]["failed"]
        assert name in over_gradwire[rank], over_gradwire[rank]["failed"]
        same(over_gloo[rank][name], over_gradwire[rank][name])


def same(a: Any, b: Any) -> None:
    """Bitwise equal, whatever they consist of."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def test_what_gloo_cannot_do(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        average, scaled, lists = numbers(rank), numbers(rank), [torch.empty(rank + 1) for _ in range(size)]
        dist.all_reduce(average, dist.ReduceOp.AVG)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(float(rank)))
        dist.all_to_all(lists, [torch.full((r + 1,), float(rank)) for r in range(size)])
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(shared := numbers(rank), src=0)
        manager.wait()
        return [average, scaled, lists, shared]

    for rank, (average, scaled, lists, shared) in enumerate(stock(scenario)):
        assert average.tolist() == [5, 6, 7, 8, 9, 10]
        assert scaled.tolist() == [10, 11, 12, 13, 14, 15]
        assert [t.tolist() for t in lists] == [[0.0] * (rank + 1), [1.0] * (rank + 1)]
        assert shared.tolist() == [0, 1, 2, 3, 4, 5]


def test_coalescing_manager_gathers_reductions(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        a, b, whole, part = numbers(rank), numbers(rank, 3), torch.empty(12), torch.empty(3)
        with _coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        with _coalescing_manager():
            dist.all_gather_into_tensor(whole, numbers(rank))
        with _coalescing_manager(async_ops=True) as manager:
            dist.reduce_scatter_tensor(part, numbers(rank))
        manager.wait()
        return [t.tolist() for t in (a, b, whole, part)]

    first, second = stock(scenario)
    assert first[:3] == second[:3] == [[10, 12, 14, 16, 18, 20], [10, 12, 14], [*range(6), *range(10, 16)]]
    assert (first[3], second[3]) == ([10, 12, 14], [16, 18, 20])


def test_the_world_says_what_it_is(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        world = dist.group.WORLD
        group = gw.from_process_group(world)
        return (
            [dist.get_backend(), dist.get_backend_config()[:12], world.name(), world.group_name, world.group_desc],
            [type(group).__name__, group.rank, group.size, group.timeout, group is gw.from_process_group()],
            world.get_group_store() is not None,
        )

    for rank, (names, facts, has_store) in enumerate(stock(scenario)):
        assert names == ["gradwire", "cpu:gradwire", "gradwire", "0", "default_pg"]
        assert facts == ["C10dGroup", rank, 2, 120.0, True]
        assert has_store


def test_an_async_work_reports_its_state(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        t = numbers(rank)
        work = dist.all_reduce(t, async_op=True)
        future = work.get_future()
        assert work.wait(timedelta(seconds=100))
        (value,) = future.wait()
        return [
            work.is_completed(),
            work.is_success(),
            work.exception(),
            work.result()[0] is t,
            value is t or value.tolist(),
        ]

    for facts in stock(scenario):
        assert facts[:4] == [True, True, None, True]
        assert facts[4] is True or facts[4] == [10, 12, 14, 16, 18, 20]


def test_completion_hooks_see_what_stock_torch_does(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        seen, torchs = [], []
        group = gw.from_process_group()
        group.on_completion(lambda info: seen.append((info.kind, info.label, info.error)))
        dist.group.WORLD._register_on_completion_hook(lambda info: torchs.append(info.op_type.name))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        if hasattr(dist, "record_comm"):
            with dist.record_comm("mine"):
                dist.barrier()
        else:
            dist.barrier()
        assert group.flush_completions()
        return seen, torchs

    for seen, torchs in stock(scenario):
        assert [kind for kind, _, _ in seen].count("all_reduce") == 1
        assert "ALLREDUCE" in torchs
        assert torchs[-1] == "BARRIER"
        assert len(torchs) == len(seen)
        assert all(error is None for _, _, error in seen)
        assert seen[-1][:2] == ("barrier", "mine" if hasattr(dist, "record_comm") else "")


def test_a_missing_rank_is_named(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        store = dist.group.WORLD.get_group_store()
        if rank == 1:
            store.wait(["told"], timedelta(seconds=100))
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            dist.group.WORLD.barrier(timedelta(seconds=0.8)).wait()
        store.set("told", "yes")
        return caught.value.missing

    assert stock(scenario)[0] == (1,)


def test_a_rank_that_left_is_named(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        if rank == 1:
            return None  # and destroys its process group
        with pytest.raises(PeerLost) as caught:
            dist.barrier()
        return caught.value.rank

    assert stock(scenario)[0] == 1


def test_abort_ends_what_is_in_flight(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> Any:
        store = dist.group.WORLD.get_group_store()
        if rank == 1:
            store.wait(["told"], timedelta(seconds=100))
            return None
        work = dist.all_reduce(numbers(rank), async_op=True)
        dist.group.WORLD.abort()
        with pytest.raises(GroupAborted, match="torch aborted"):
            work.wait()
        store.set("told", "yes")
        return [work.is_completed(), work.is_success(), type(work.exception()).__name__]

    assert stock(scenario)[0] == [True, False, "GroupAborted"]


def test_what_torch_refuses_by_name_works_on_the_group(stock: Callable[..., Any]) -> None:
    """The table in docs/interop.md: if one of these starts to work, its row must go."""

    def scenario(rank: int, size: int) -> Any:
        world = dist.group.WORLD
        if TORCH < (2, 15):
            with pytest.raises(ValueError, match="only implemented for GLOO"):
                dist.monitored_barrier()
        else:
            dist.monitored_barrier()
        world.monitored_barrier(timedelta(seconds=100))
        if TORCH < (2, 15):
            with pytest.raises(RuntimeError, match=r"not safe to split|does not support splitting"):
                dist.split_group(split_ranks=[[0, 1]])
        else:
            both, one = dist.split_group(split_ranks=[[0, 1]]), dist.split_group(split_ranks=[[1]])
            total = numbers(rank)
            dist.all_reduce(total, group=both)
            assert total.tolist() == [10, 12, 14, 16, 18, 20]
            assert (one is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)
            for made in (both, one):
                if made is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(made)
        part = world.split_group([1, 0])
        t = numbers(rank)
        part.allreduce([t]).wait()
        where = part.rank()
        part.shutdown()
        if TORCH < (2, 15):
            with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9))
        world.set_timeout(timedelta(seconds=9))
        return [t.tolist(), where, gw.from_process_group().timeout]

    for rank, facts in enumerate(stock(scenario)):
        assert facts == [[10, 12, 14, 16, 18, 20], 1 - rank, 9.0]


def test_what_c_plus_plus_does_not_hand_to_python(stock: Callable[..., Any]) -> None:
    """As above: C++ looks for a backend, and reports that there is none. Since torch 2.15 there is one."""

    def scenario(rank: int, size: int) -> Any:
        name, boxed, t = dist.group.WORLD.group_name, dist.group.WORLD.boxed(), numbers(rank)
        unreached = [lambda: torch.ops.c10d.broadcast_([t], boxed, 0, 0, False, 1000)]
        if TORCH < (2, 15):
            unreached.append(
                lambda: torch.ops._c10d_functional.all_gather_into_tensor_out(t, size, name, out=torch.empty(6 * size))
            )
        if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
            unreached.append(
                lambda: torch.ops._c10d_functional.batch_p2p_ops(
                    ["isend", "irecv"], [1 - rank] * 2, [0, 0], [t, torch.empty(6)], name
                )
            )
        for call in unreached:
            if TORCH < (2, 15):
                with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
                    call()
                continue
            call()
        dist.barrier()
        assert TORCH < (2, 15) or torch.equal(t, numbers(0))
        return len(unreached)

    assert min(stock(scenario)) >= (2 if TORCH < (2, 15) else 1)
