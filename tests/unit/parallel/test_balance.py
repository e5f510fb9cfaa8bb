"""`Balance`: shares by speed, with times that a model makes up, and gradients that are the mean over all samples."""

import copy
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.collectives import Collective
from gradwire.errors import GroupAborted, UsageError
from gradwire.groups import Group, GroupWrapper, Work
from gradwire.parallel import Balance, DistributedDataParallel as DDP, replicate
from gradwire.parallel.balance import divide
from gradwire.testing import run_ranks

SMALL = 0.0001


class MadeUpTime(threading.local):
    """A clock for each rank, which only `spend` moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MadeUpTime:
    made_up = MadeUpTime()
    monkeypatch.setattr("gradwire.reducer.model_events.time", made_up)
    return made_up


class Timed(nn.Module):
    """A model whose forward takes `cost(samples)` seconds."""

    def __init__(self, clock: MadeUpTime, cost: Callable[[int], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.clock, self.cost = clock, cost

    def forward(self, x: Tensor) -> Tensor:
        self.clock.spend(self.cost(len(x)))
        return self.layers(x)


def samples(step: int, total: int) -> Tensor:
    return torch.randn(total, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def part(balance: Balance, group: Group, batch: Tensor) -> Tensor:
    n = balance.batch_size(len(batch))
    assert sum(balance.shares) == len(batch)
    assert min(balance.shares) >= 1
    mine = batch.split(list(balance.shares))[group.rank]
    assert len(mine) == n
    return mine


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def assert_mean_over_all(ddp: Any, *batches: Tensor) -> None:
    """The gradients are those of the mean over all samples, or of the sum of several such means."""
    alone = copy.deepcopy(ddp.module.layers)
    alone.zero_grad()
    for batch in batches:
        loss(alone, batch).backward()
    for got, want in zip(ddp.module.layers.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-14)


def train(group: Group, clock: MadeUpTime, cost: Callable[[int, int], float], steps: int, *, total: int = 32) -> Any:
    """The shares of each step. `cost(step, samples)` is the time that a forward takes on this rank."""
    now = itertools.count()
    ddp = DDP(Timed(clock, lambda n: cost(next(now), n)), process_group=group, bucket_cap_mb=SMALL)
    balance, seen = Balance(ddp, every=5), []
    for step in range(steps):
        batch = samples(step, total)
        ddp.zero_grad()
        loss(ddp, part(balance, group, batch)).backward()
        assert_mean_over_all(ddp, batch)
        seen.append(balance.shares)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_whole_at_least_one_and_in_proportion(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(300):
        speeds = [10 ** generator.uniform(-4, 4) for _ in range(generator.randint(1, 9))]
        total = generator.randint(len(speeds), 200)
        shares = divide(total, speeds)
        assert sum(shares) == total
        assert min(shares) >= 1
        for share, other, speed, its in zip(shares, shares[1:], speeds, speeds[1:], strict=False):
            assert share <= other or speed >= its or share == 1
    assert divide(32, [2.0, 1.0]) == [21, 11]
    assert divide(3, [1e300, 1.0, 1.0]) == [1, 1, 1]


def test_shares_follow_speed_and_noise_does_not_move_them(clock: MadeUpTime) -> None:
    def rank_main(group: Group) -> Any:
        noise = random.Random(group.rank)
        first = 1000.0 * (2 - group.rank)  # which says nothing about the others
        return train(group, clock, lambda s, n: n * (1 + group.rank) * noise.uniform(0.95, 1.05) if s else first, 60)

    first, second = run_ranks(rank_main, 2)
    assert first == second
    assert first[:5] == [(16, 16)] * 5
    assert first[5:] == [(21, 11)] * 55


@pytest.mark.parametrize(
    ("fixed", "each", "shares"), [((10.0, 0.0), (1.0, 2.0), (18, 14)), ((0.0, 1.0), (1.0, 500.0), (31, 1))]
)
def test_ranks_end_equally_long_with_fixed_costs_too(clock: MadeUpTime, fixed: Any, each: Any, shares: Any) -> None:
    def rank_main(group: Group) -> Any:
        return train(group, clock, lambda _, n: fixed[group.rank] + n * each[group.rank], 60)[-1]

    assert run_ranks(rank_main, 2) == [shares] * 2


def test_a_rank_that_was_slow_for_a_while_gets_its_share_back(clock: MadeUpTime) -> None:
    def cost(step: int, n: int, rank: int) -> float:
        return n * (9.0 if rank == 1 and 10 <= step < 20 else 1.0)

    shares = run_ranks(lambda group: train(group, clock, lambda step, n: cost(step, n, group.rank), 60), 2)[0]
    assert shares[9] == (16, 16)
    assert shares[24][1] < 8
    assert shares[-1] in {(16, 16), (17, 15)}


class Blocking(GroupWrapper):
    """A group whose submit waits on rank 0, as if for rank 1."""

    clock: MadeUpTime

    def submit(self, op: Collective) -> Work:
        self.clock.spend(100.0 if self.rank == 0 else 0.0)
        return super().submit(op)


def test_only_forward_and_backward_count(clock: MadeUpTime) -> None:
    """Not waits for other ranks, user code, evaluation, batches that are skipped; but what is accumulated."""
    Blocking.clock = clock

    def rank_main(group: Group) -> Any:
        cost = float(1 + group.rank)
        ddp = DDP(Timed(clock, lambda n: n * cost), process_group=group, bucket_cap_mb=SMALL)
        balance = Balance(ddp, every=4)
        for step in range(13):
            batch = samples(step, 30)
            ddp.zero_grad()
            if step % 3 == 1:
                loss(ddp, part(balance, group, batch))
                assert ddp.agree_to_skip(group.rank == 1)
            with ddp.no_sync():
                loss(ddp, part(balance, group, batch)).backward()
            output = loss(ddp, part(balance, group, batch))
            clock.spend(50.0 * (group.rank == 0))
            assert not ddp.agree_to_skip(False)
            output.backward()
            assert_mean_over_all(ddp, batch, batch)
            with torch.no_grad():
                ddp.eval()(batch)
            ddp.train()
            mine = part(balance, group, batch)  # one call, several backwards
            ddp.zero_grad()
            with ddp.no_sync():
                loss(ddp, mine).backward()
            output = loss(ddp, mine)
            ddp.agree_to_skip(False)
            output.backward()
            assert_mean_over_all(ddp, batch, batch)
        return balance.shares

    assert run_ranks(rank_main, 2, wrap=Blocking) == [(20, 10), (20, 10)]


def test_two_models_and_replicate(clock: MadeUpTime) -> None:
    def rank_main(group: Group) -> Any:
        a = DDP(Timed(clock, lambda n: n * float(1 + group.rank)), process_group=group)
        b = Timed(clock, lambda n: n * float(2 - group.rank))
        replica = replicate(b, group=group)
        balances = Balance(a, every=3), Balance(replica, every=2)
        for step in range(8):
            for model, balance in zip((a, b), balances, strict=True):
                loss(model, part(balance, group, samples(step, 9))).backward()
        return [balance.shares for balance in balances]

    assert run_ranks(rank_main, 2) == [[(6, 3), (3, 6)]] * 2


def test_totals_may_change_and_must_agree(clock: MadeUpTime) -> None:
    def rank_main(group: Group) -> list[Any]:
        ddp = DDP(Timed(clock, lambda n: n * float(1 + group.rank)), process_group=group)
        balance, found = Balance(ddp, every=3), []
        for total in [12, 12, 12, 24, 6, 6, 6, 2, 2, 1, 6, 6, 6, 6 + group.rank, 6]:
            try:
                loss(ddp, part(balance, group, samples(0, total))).backward()
                found.append(balance.shares)
            except (GroupAborted, UsageError) as error:
                found.append(str(error))
        return found

    for found in run_ranks(rank_main, 2):
        assert found[:9] == [*[(6, 6)] * 3, (12, 12), (3, 3), (3, 3), (4, 2), (1, 1), (1, 1)]
        assert "not an int of at least one sample for each of 2 ranks. Pass one." in found[9]
        assert "ranks differ in the total (6 on rank 0, 7 on rank 1), in `every`, or" in found[13]
        assert found[10:13] + found[14:] == [(4, 2)] * 4


def test_what_would_not_be_the_mean_over_samples_is_refused(group: Group) -> None:
    def torchs(state: Any, bucket: Any) -> Any:
        raise NotImplementedError

    model = DDP(nn.Linear(4, 2).double(), process_group=group)
    balance = Balance(model)
    assert balance.batch_size(4) == 4
    model.set_hook(hooks.chain(hooks.cast(torch.bfloat16), hooks.weighted_mean()))
    assert balance.batch_size(4) == 4
    with model.no_sync():
        loss(model, samples(0, 4)).backward()
    with pytest.raises(UsageError, match=r"accumulated with a total of 4, and it has one weight. Pass that\."):
        balance.batch_size(8)
    assert balance.batch_size(4) == 4
    with model.no_sync():
        loss(model, samples(0, 4)).backward()
    assert model.agree_to_skip(True)
    assert balance.batch_size(8) == 8  # what was accumulated is dropped
    with pytest.raises(UsageError, match="not an int of at least one sample"):
        balance.batch_size(4.0)  # type: ignore[arg-type]
    for hook in (hooks.mean(), hooks.partition({"weight": hooks.weighted_mean(), "*": hooks.mean()})):
        model.set_hook(hook)
        with pytest.raises(
            UsageError, match="average is not the mean over all samples of unequal batches. Call set_hook"
        ):
            balance.batch_size(4)
    with model.join(), pytest.raises(UsageError, match=r"Balance.batch_size on rank 0 under join\(\)"):
        balance.batch_size(4)
    other = DDP(nn.Linear(4, 2), process_group=group)
    other.register_comm_hook(None, torchs)
    with pytest.raises(UsageError, match=r"Balance\(\) on rank 0: with the hook .*torchs"):
        Balance(other)
    with pytest.raises(UsageError, match=r"Balance\(Linear\): not replicated by gradwire"):
        Balance(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"every=0"):
        Balance(model, every=0)


def test_shares_are_saved_and_restored(clock: MadeUpTime) -> None:
    def rank_main(group: Group) -> Any:
        ddp = DDP(Timed(clock, lambda n: n * float(1 + group.rank)), process_group=group)
        balance = Balance(ddp, every=2)
        for step in range(5):
            loss(ddp, part(balance, group, samples(step, 9))).backward()
        saved, again = balance.state_dict(), Balance(ddp)
        again.load_state_dict(saved)
        assert again.batch_size(9) == balance.batch_size(9)
        again.load_state_dict({"seconds": [1.0], "used": [1.0]})  # of another world
        again.batch_size(8)
        assert again.shares == (4, 4)
        loss(ddp, samples(0, 4)).backward()
        again.load_state_dict(saved if group.rank else {"seconds": [1.0, 1.0], "used": []})
        with pytest.raises(UsageError, match="or in the state that they have loaded. Use the same on every rank"):
            again.batch_size(9)
        return saved

    first, second = run_ranks(rank_main, 2)
    assert first == second == {"seconds": [1.0, 2.0], "used": [1.0, 2.0]}


def test_a_step_that_fails_on_one_rank(clock: MadeUpTime) -> None:
    def rank_main(group: Group) -> Any:
        ddp = DDP(Timed(clock, lambda n: n * float(1 + group.rank)), process_group=group)
        balance, failed = Balance(ddp, every=3), 0
        for step in range(12):
            try:
                mine = part(balance, group, samples(step, 9))
                ddp.zero_grad()
                loss(ddp, None if group.rank == 1 and step in (2, 6) else mine).backward()  # type: ignore[arg-type]
                assert_mean_over_all(ddp, samples(step, 9))
            except (TypeError, GroupAborted):
                failed += 1
        return failed, balance.shares

    assert run_ranks(rank_main, 2) == [(2, (6, 3))] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_did_not_get_the_result_of_an_agreement(clock: MadeUpTime, late: int) -> None:
    """Another one had it, and has failed at once."""

    def rank_main(group: Group) -> Any:
        group.set_timeout(5)
        ddp = DDP(Timed(clock, lambda n: n * float(1 + group.rank)), process_group=group)
        balance, failed = Balance(ddp, every=4), []
        gather = ddp.replica.agreement._gather

        def gather_late(subject: str, step: int, values: Any) -> Any:
            rows = gather(subject, step, values)
            while group.rank == late and step == 4:
                group.check_peers()
            return rows

        ddp.replica.agreement._gather = gather_late  # type: ignore[method-assign]
        for step in range(12):
            try:
                mine = part(balance, group, samples(step, 9))
                ddp.zero_grad()
                loss(ddp, None if step == 4 else mine).backward()  # type: ignore[arg-type]
                assert_mean_over_all(ddp, samples(step, 9))
            except (TypeError, GroupAborted):
                failed.append(step)
        return failed, balance.shares

    assert run_ranks(rank_main, 2) == [([4], (6, 3))] * 2
