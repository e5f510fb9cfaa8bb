"""hierarchical: values, weights, slices and bytes on simulated hosts, then on groups, in replicas and in torch's hooks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.collectives import Layout, Scope, all_reduce
from gradwire.errors import CollectiveMismatch, HookError, UsageError
from gradwire.groups import Group, NanCheck, Recording, Verified
from gradwire.hooks import CommHook, Reduced, Reduction, Turn, cast, chain, error_feedback, hierarchical, mean
from gradwire.hooks.combinators.hierarchical import slices
from gradwire.interop import as_torch_hook
from gradwire.parallel import replicate
from gradwire.testing import check_hook, run_ranks, simulate
from gradwire.testing.laws import LAWS
from helpers.buckets import TorchBucket, bucket, gradients
from helpers.laws import SHORT_LAWS
from helpers.models import mlp, train
from helpers.two_hosts import HALF, reduce_on, two_hosts

FED = chain(error_feedback(), cast(torch.bfloat16), mean())
HOSTS = {
    "2 + 2": [[0, 1], [2, 3]],
    "3 + 2": [[0, 2, 4], [1, 3]],
    "3 + 1": [[0, 1, 2], [3]],
    "1 + 1": [[0], [1]],
    "one": [[0, 1]],
}


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("divisor", [None, 1])
def test_every_rank_has_the_same_weight_on_hosts_of_any_size(hosts: Any, donated: bool, divisor: int | None) -> None:
    size = sum(map(len, hosts))
    brought = gradients(size, 37, torch.float64)
    done = simulate(hierarchical(across=mean()), brought, hosts=hosts, donated=donated, divisor=divisor)
    expected = torch.stack(brought).sum(0) / (divisor or size)
    for value, _ in done.reduced:
        torch.testing.assert_close(value, expected)


class Seen(CommHook):
    """The mean, recording its turns."""

    def __init__(self, seen: list[Turn]) -> None:
        self.seen = seen

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self.seen.append(turn)
        return (yield from mean().reduce(grad, state, turn))


def test_each_level_sees_its_own_ranks() -> None:
    inside: list[Turn] = []
    across: list[Turn] = []
    hook = hierarchical(inside=Seen(inside), across=Seen(across))
    simulate(hook, [torch.ones(8)] * 5, hosts=[[0, 2, 4], [1, 3]], step=7)
    assert sorted((t.world_size, t.rank) for t in inside) == [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    assert sorted((t.world_size, t.rank) for t in across) == [(2, 0), (2, 0), (2, 1), (2, 1)]  # two rails
    assert {(t.step, t.divisor, t.hosts) for t in inside + across} == {(7, None, None)}
    assert {t.spec.numel for t in across} == {4}


def test_on_one_host_nothing_is_compressed() -> None:
    brought = [torch.tensor([1.0 + 2**-12]), torch.tensor([1.0])]
    for hosts in (None, [[0, 1]]):
        done = simulate(hierarchical(across=HALF), brought, hosts=hosts)
        assert done.reduced[0].value.item() == 1.0 + 2**-13


def test_only_traffic_between_hosts_counts_and_is_compressed() -> None:
    spec, layout = bucket((8, 4), (8,)), Layout(((0, 1), (2, 3)))
    hook = hierarchical(across=HALF)
    done = simulate(hook, [torch.randn(40) for _ in range(4)], spec=spec, hosts=layout)
    ops = [(e.op.scope, e.op.dtypes[0]) for e in done.exchanges]
    assert set(ops) == {(Scope.INSIDE, "float32"), (Scope.ACROSS, "bfloat16")}
    assert done.wire_bytes == hook.bytes_between(spec, layout) == 20 * 2
    assert hook.wire_bytes(spec, 4) is None
    assert hierarchical(across=Seen([])).bytes_between(spec, layout) is None
    three = Layout(((0, 1), (2, 3), (4, 5)), rails=1)
    done = simulate(hook, [torch.randn(40) for _ in range(6)], spec=spec, hosts=three)
    assert done.wire_bytes == hook.bytes_between(spec, three) == 2 * (2 / 3) * 40 * 2


def test_loss_between_hosts_is_in_the_carriers_sent() -> None:
    """Three ranks and one: value is the mean of what was sent, and error feedback around the whole pays all back."""
    brought = [torch.full((4,), 1.0 + r * 2**-10) for r in range(4)]
    done = simulate(hierarchical(across=HALF), brought, hosts=[[0, 1, 2], [3]])
    sent = torch.stack([s for _, s in done.reduced])
    torch.testing.assert_close(done.reduced[0].value, sent.mean(0), rtol=1e-6, atol=0)
    assert torch.equal(sent[1], brought[1])  # not a carrier
    assert not torch.equal(sent[0], brought[0])


def test_slices_are_rows_of_every_parameter() -> None:
    spec = bucket((5, 2), (3,), (), (2, 4), (0, 3))
    one, two, three = slices(spec, 3)
    assert one.spec.shapes == ((1, 2), (1,), (0,), (2,), (0,))
    assert two.spec.shapes == ((2, 2), (1,), (0,), (3,), (0,))
    assert three.spec.shapes == ((2, 2), (1,), (1,), (3,), (0,))
    assert one.spec.names == spec.names
    flat = torch.arange(float(spec.numel))
    taken = [s.rows.take(flat) for s in (one, two, three)]
    assert [t.tolist() for t in taken] == [
        [0, 1, 10, 14, 15],
        [2, 3, 4, 5, 11, 16, 17, 18],
        [6, 7, 8, 9, 12, 13, 19, 20, 21],
    ]
    back = torch.zeros_like(flat)
    for s, t in zip((one, two, three), taken, strict=True):
        s.rows.put(back, t)
    assert torch.equal(back, flat)


def test_parameters_of_other_strides_are_split_at_their_rows() -> None:
    strides = torch.empty((4, 3, 2, 2), device="meta").to(memory_format=torch.channels_last).stride()
    spec = hooks.BucketSpec(
        0, ("last", "turned"), ((4, 3, 2, 2), (4, 6)), (tuple(strides), (1, 4)), torch.float32, torch.device("cpu")
    )
    first, _ = slices(spec, 2)
    assert first.spec.shapes == ((2, 3, 2, 2), (12,))
    assert first.spec.strides[0] == tuple(strides)


@pytest.mark.parametrize("hosts", HOSTS)
def test_it_obeys_the_laws(hosts: str) -> None:
    """`pays_back`, which takes longest, and other dtypes on hosts that are not alike only."""
    where, laws = HOSTS[hosts], LAWS if hosts == "3 + 2" else SHORT_LAWS
    for hook in (
        hierarchical(across=HALF),
        hierarchical(inside=HALF, across=FED),
        chain(error_feedback(), hierarchical(across=HALF)),
        hooks.partition({"layer0.*": hierarchical(across=FED), "*": mean()}),
        hooks.every(2, hierarchical(across=HALF)),
    ):
        check_hook(hook, hosts=where, laws=laws)
    for dtype in (torch.bfloat16, torch.float64) if hosts == "3 + 2" else ():
        check_hook(hierarchical(across=FED), hosts=where, dtype=dtype, laws=SHORT_LAWS)


def test_state_of_other_lanes_is_dropped_if_hosts_have_changed() -> None:
    hook, spec = hierarchical(across=FED), bucket((4, 2))
    done = simulate(hook, [torch.randn(8) for _ in range(4)], spec=spec, hosts=[[0, 1], [2, 3]])
    saved = hook.save(done.states[0], spec)
    assert saved["p0"]["across"]["state"]["residual"].numel() == 4
    assert (saved["p0"]["across"]["lane"], saved["p0"]["across"]["lanes"]) == (0, 2)  # the file format's names of rails
    states = [hook.load(saved, spec) for _ in range(2)]
    simulate(hook, [torch.randn(8) for _ in range(2)], spec=spec, states=states, hosts=[[0], [1]])
    assert hook.save(states[0], spec)["p0"]["across"]["state"]["residual"].numel() == 8


class Nothing(CommHook):
    """Sends zeros, so that the residual is the whole gradient."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        yield all_reduce(torch.zeros(1))
        return Reduced(torch.zeros_like(grad), torch.zeros_like(grad))


def test_what_is_owed_of_rows_that_another_rank_carries_now_is_sent_to_it() -> None:
    """Rank 1 carried the lower half of the rows and then carries the upper one; rank 2 vice versa."""
    hook, spec = hierarchical(across=chain(error_feedback(), Nothing())), bucket((4, 2))
    brought = [torch.ones(8)] * 4
    done = simulate(hook, brought, spec=spec, hosts=[[0, 1], [2, 3]])
    saved = [hook.save(state, spec) for state in done.states]

    def owed(hosts: list[list[int]]) -> list[float]:
        states = [hook.load(one, spec) for one in saved]
        done = simulate(hook, [torch.zeros(8)] * 4, spec=spec, states=states, step=1, hosts=hosts)
        return [hook.save(s, spec)["p0"]["across"]["state"]["residual"].sum().item() for s in done.states]

    assert owed([[0, 1], [2, 3]]) == [4.0] * 4
    assert owed([[0, 2], [1, 3]]) == [8.0, 0.0, 0.0, 8.0]


class Odd(CommHook):
    """Runs a script as its reduction."""

    def __init__(self, script: Any) -> None:
        self._script = script

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        yield from self._script(turn)
        return Reduced(grad, grad)

    def __repr__(self) -> str:
        return "odd()"


def test_a_hook_inside_must_not_choose_its_scope() -> None:
    odd = Odd(lambda turn: [all_reduce(torch.ones(1)).among(Scope.INSIDE)])
    with pytest.raises(HookError, match="the hook inside yielded .* which has a scope already"):
        simulate(hierarchical(inside=odd, across=mean()), [torch.ones(1)] * 2, hosts=[[0], [1]])


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (
            lambda t: [all_reduce(torch.ones(1)).among(Scope.INSIDE if t.rank % 2 else Scope.WORLD)],
            CollectiveMismatch,
            r"ranks wait for each other: rank 0 yields all_reduce\(float32\[1\], SUM\), rank 1 yields .*scope=inside",
        ),
        (
            lambda t: [all_reduce(torch.ones(1)).among(Scope.ACROSS)] if t.rank == 3 else [],
            CollectiveMismatch,
            r"ranks \[0, 1, 2\] have returned, but rank 3 yields all_reduce\(float32\[1\], SUM, scope=across\)",
        ),
        (
            lambda t: [all_reduce(torch.ones(1 + t.rank // 3)).among(Scope.INSIDE)],
            CollectiveMismatch,
            r"ranks differ in shape: rank 3 has \[\[2\]\], .*Submitted: rank 2: .*; rank 3: ",
        ),
    ],
)
def test_ranks_that_do_not_meet_are_named(script: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulate(Odd(script), [torch.ones(1)] * 4, hosts=[[0, 1], [2, 3]])


def test_only_carriers_communicate_with_other_hosts() -> None:
    odd = Odd(lambda turn: [all_reduce(torch.ones(1)).among(Scope.ACROSS)])
    with pytest.raises(UsageError, match="rank 1 yields .*, but only the first 1 ranks of each host"):
        simulate(odd, [torch.ones(1)] * 3, hosts=[[0, 1], [2]])
    with pytest.raises(UsageError, match="have 2 ranks. Pass one gradient per rank"):
        simulate(odd, [torch.ones(1)] * 3, hosts=[[0, 1]])


@pytest.mark.parametrize("wrapper", [Recording, Verified, NanCheck])
def test_wrappers_accept_it_or_raise(wrapper: Any) -> None:
    hook = hierarchical(across=HALF)

    def rank_main(world: Group) -> Any:
        with wrapper(two_hosts(world, Layout(((0, 1), (2, 3))))) as group:
            try:
                value = reduce_on(group, hook, torch.full((8,), float(world.rank)))
            except UsageError as error:
                return str(error)
            return value.tolist(), [signature.scope for signature in group.submitted]

    for result in run_ranks(rank_main, 4, kind="threads"):
        if wrapper is Recording:
            assert result == ([1.5] * 8, [Scope.INSIDE, Scope.ACROSS, Scope.INSIDE])
        else:
            assert f"{wrapper.__name__} needs all of them for every operation. Wrap the parts" in result


def test_a_group_without_hosts_is_one_host() -> None:
    def rank_main(group: Group) -> Tensor:
        values = [reduce_on(group, hierarchical(across=HALF), torch.full((4,), 1.0 + group.rank * 2**-11))]
        odd = Odd(lambda t: [all_reduce(grad).among(scope) for scope in (Scope.INSIDE, Scope.ACROSS)])
        grad = torch.ones(1)
        reduce_on(group, odd, torch.zeros(2))
        return torch.cat([*values, grad])

    for result in run_ranks(rank_main, 2, kind="threads"):
        assert result.tolist() == [1.0 + 2**-12] * 4 + [2.0]


def test_replicas_train_with_it() -> None:
    start = mlp(seed=0)  # here: thread ranks share one generator, and would disturb each other's weights

    def rank_main(world: Group) -> tuple[Tensor, Tensor]:
        model = copy.deepcopy(start)
        with two_hosts(world, Layout(((0, 1), (2, 3)))) as group:
            replica = replicate(model, group=group, hook=hierarchical(across=FED))
            fed = train(model, group.rank, range(4))
            replica.detach()
            plain = copy.deepcopy(start)
            replica = replicate(plain, group=group)
            exact = train(plain, group.rank, range(4))
            replica.detach()
            return fed, exact

    result = run_ranks(rank_main, 4, kind="threads")
    for fed, exact in result:
        assert torch.equal(fed, result[0][0])
        torch.testing.assert_close(fed, exact, rtol=2e-2, atol=2e-2)
        assert not torch.equal(fed, exact)


def test_it_runs_as_one_of_torchs_hooks() -> None:
    def rank_main(world: Group) -> list[float]:
        weight = torch.zeros(4, 2)
        with two_hosts(world, Layout(((0, 1), (2, 3)))) as group:
            hook = as_torch_hook(hierarchical(across=FED), group, named_parameters=[("weight", weight)])
            for step in range(2):
                value = hook(None, TorchBucket([weight], world.rank + step)).wait()
            return value.tolist()

    assert run_ranks(rank_main, 4, kind="threads") == [[2.5] * 8] * 4
