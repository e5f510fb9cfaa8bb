"""Uneven inputs, and what else needs torch.distributed itself: copies, pickles, the default group."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.collectives import ReduceOp, all_gather, all_reduce
from gradwire.errors import UsageRuntimeError
from gradwire.events import CollectiveSubmitted
from gradwire.groups import Group
from gradwire.hooks import CommHook, Reduced, Reduction, Turn, cast, chain, mean, weighted_mean
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.models import descend, inputs, mlp
from helpers.rank_tests import on_ranks
from helpers.through_file import through_file

SMALL = 0.0001


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected(model: nn.Module, ranks: list[int], step: int, divisor: int) -> list[Tensor]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in ranks:
        alone(inputs(rank, step)).pow(2).sum().div(divisor).backward()
    return gradients(alone)


def assert_gradients(model: nn.Module, want: list[Tensor]) -> None:
    for got, value in zip(gradients(model), want, strict=True):
        torch.testing.assert_close(got, value)


BATCHES = [2, 5, 3]
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": SMALL},
    "finding unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def train_unevenly(
    group: Group, model: nn.Module, *, divide: bool, hook: CommHook | None = None, **flags: Any
) -> list[Tensor]:
    """Every rank has its own number of batches. Gradients are compared with plain arithmetic in every step."""
    ddp = DDP(model, process_group=group if flags.pop("own_group", False) else None, **flags)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(BATCHES[group.rank]):
            training = [rank for rank in range(group.size) if BATCHES[rank] > step]
            want = expected(ddp.module, training, step, group.size if divide else len(training))
            ddp.zero_grad()
            ddp(inputs(group.rank, step)).pow(2).sum().backward()
            assert_gradients(ddp, want)
            descend(ddp, 0.05)
    return [p.detach().clone() for p in ddp.parameters()]


def test_uneven_inputs(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> dict[str, Any]:
        done = {}
        with torch_world(group, "gloo"):
            for name, flags in FLAGS.items():
                for divide in (True, False):
                    done[f"{name} {divide}"] = train_unevenly(group, mlp(seed=0), divide=divide, **flags)
        return done

    a, *others = run_ranks(rank_main, 3, kind="gloo")
    for other in others:
        for name, parameters in a.items():
            assert all(torch.equal(p, q) for p, q in zip(parameters, other[name], strict=True)), name


@on_ranks(3, kind="gloo")
def test_all_in_step_again_after_join(group: Group, torch_world: Callable[..., Any]) -> None:
    """Ranks that ran out first have seen fewer backwards; nothing later may depend on that."""
    with torch_world(group, "gloo"):
        ddp = DDP(mlp(seed=0), bucket_cap_mb=SMALL, static_graph=True)
        for _ in range(2):
            with ddp.join():
                for step in range(0 if group.rank == 0 else BATCHES[group.rank]):
                    ddp.zero_grad()
                    ddp(inputs(group.rank, step)).pow(2).sum().backward()
        ddp.set_hook(chain(cast(torch.float32), mean()))
        want = expected(ddp.module, list(range(group.size)), 7, group.size)
        ddp.zero_grad()
        ddp(inputs(group.rank, 7)).pow(2).sum().backward()
        assert_gradients(ddp, want)


def test_buffers_hooks_and_weights_are_shadowed(torch_world: Callable[..., Any]) -> None:
    def hook(state: Any, bucket: Any) -> Any:
        state.append(float(bucket.buffer().abs().sum()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())

    def rank_main(group: Group) -> list[Any]:
        with torch_world(group, "gloo"):
            calls: list[float] = []
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            ddp = DDP(model)
            ddp.register_comm_hook(calls, hook)
            with ddp.join():
                for step in range(1 + 2 * group.rank):
                    ddp(inputs(group.rank, step)).pow(2).sum().backward()
            weighted = DDP(mlp(seed=0))
            weighted.register_comm_hook(None, weighted_mean())
            with weighted.join():
                for step in range(1 + group.rank):
                    weighted.set_weight(3)
                    weighted.zero_grad()
                    weighted(inputs(group.rank, step)).pow(2).sum().backward()
            alone = expected(weighted.module, [1], 1, 1)
            return [calls, list(model.buffers()), gradients(weighted), alone]

    (calls0, buffers0, _, _), (calls1, buffers1, grads, alone) = run_ranks(rank_main, 2, kind="gloo")
    assert len(calls0) == len(calls1) == 3
    assert calls0[1:] == [0.0, 0.0]
    assert all(torch.equal(p, q) for p, q in zip(buffers0, buffers1, strict=True))
    for got, value in zip(grads, alone, strict=True):
        torch.testing.assert_close(got, value)  # the joined rank's weight does not count


class Shares(CommHook):
    """A mean as lossy hooks make it: over all ranks, and then multiplied by `turn`'s share."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        shares = [torch.empty(2, dtype=torch.float64) for _ in range(turn.world_size)]
        mine = torch.tensor([turn.share, float(turn.divisor or 0)], dtype=torch.float64)
        yield all_gather(shares, mine)
        assert all(torch.equal(other, mine) for other in shares), shares  # all ranks compute the same value
        value = grad.clone()
        yield all_reduce(value, op=ReduceOp.AVG)
        return Reduced(value.mul_(turn.share), grad)


@pytest.mark.parametrize("divide", [True, False])
def test_a_rank_that_has_joined_divides_as_the_others_do(divide: bool) -> None:
    """Under a hook that keeps state, such as error feedback, a joined rank's own result matters."""

    def rank_main(group: Group) -> list[Tensor]:
        flags: dict[str, Any] = {"own_group": True, "bucket_cap_mb": SMALL}
        return train_unevenly(group, copy.deepcopy(base), divide=divide, hook=Shares(), **flags)

    base = mlp(seed=0)
    first, *others = run_ranks(rank_main, 3)
    assert all(torch.equal(p, q) for other in others for p, q in zip(first, other, strict=True))


def test_no_sync_under_join(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> int:
        with torch_world(group, "gloo"):
            ddp = DDP(mlp(seed=0))
            with ddp.join():
                for step in range(4 + 2 * group.rank):
                    if step % 2 == 0:
                        with ddp.no_sync():
                            ddp(inputs(group.rank, step)).sum().backward()
                    else:
                        ddp(inputs(group.rank, step)).sum().backward()
            return ddp.replica.reducer.steps

    assert run_ranks(rank_main, 2, kind="gloo") == [3, 3]


def test_early_termination_is_reported_to_every_rank(torch_world: Callable[..., Any]) -> None:
    def rank_main(group: Group) -> int:
        with torch_world(group, "gloo"):
            ddp, steps = DDP(mlp(seed=0)), 0
            with pytest.raises(
                RuntimeError, match="Rank 0 exhausted all inputs|Detected at least one rank that exhausted inputs"
            ):
                with ddp.join(throw_on_early_termination=True):
                    for step in range(BATCHES[group.rank]):
                        ddp(inputs(group.rank, step)).sum().backward()
                        steps += 1
            return steps

    assert run_ranks(rank_main, 2, kind="gloo") == [2, 2]


def test_join_over_a_group_of_threads() -> None:
    """Without torch.distributed initialized at all."""
    base = mlp(seed=0)
    for divide in (True, False):
        results = run_ranks(
            lambda group, divide=divide: train_unevenly(
                group, copy.deepcopy(base), divide=divide, own_group=True, bucket_cap_mb=SMALL
            ),
            3,
        )
        assert all(torch.equal(p, q) for other in results[1:] for p, q in zip(results[0], other, strict=True))


@on_ranks(2)
def test_steps_after_join_communicate_as_before(group: Group) -> None:
    """torch's DDP counts ranks with inputs in every step from the first join() on; and a context may be entered again."""
    ddp = DDP(nn.Linear(2, 1), process_group=group)
    labels: list[str] = []
    group.events.listen(lambda event: labels.append(event.label), only=CollectiveSubmitted)

    def train(steps: int) -> None:
        for _ in range(steps):
            ddp(torch.ones(1, 2)).sum().backward()

    train(2)  # buckets are rebuilt after the first step
    labels.clear()
    train(1)
    before = list(labels)
    context = ddp.join()
    for _ in range(2):
        with context:
            train(2 + group.rank)
        labels.clear()
        train(1)
        assert labels == before
    with pytest.raises(ZeroDivisionError), ddp.join():
        train(1)
        raise ZeroDivisionError
    ddp.zero_grad()
    labels.clear()
    train(1)
    assert [label for label in labels if label == "uneven inputs"] == []


@on_ranks(2, kind="gloo")
def test_copies_and_pickles_on_the_default_group_train_on_their_own(
    group: Group, torch_world: Callable[..., Any]
) -> None:
    with torch_world(group, "gloo"):
        ddp = DDP(mlp(seed=0), bucket_cap_mb=SMALL)
        ddp.register_comm_hook(None, chain(cast(torch.float64), mean()))
        for _ in range(4):
            ddp(inputs(group.rank)).pow(2).sum().backward()
        for copied in (copy.deepcopy(ddp), through_file(ddp, weights_only=False)):
            want = expected(copied.module, [0, 1], 4, 2)
            copied.zero_grad()
            copied(inputs(group.rank, 4)).pow(2).sum().backward()
            assert_gradients(copied, want)
            assert copied.replica is not ddp.replica
            assert repr(copied.replica.hook) == "cast(torch.float64) > mean()"
        assert ddp.replica.reducer.steps == 4
        ddp(inputs(group.rank)).pow(2).sum().backward()
        assert ddp.replica.reducer.steps == 5


@on_ranks(1)
def test_a_model_on_a_group_of_its_own_cannot_be_pickled(group: Group) -> None:
    ddp = DDP(mlp(seed=0), process_group=group)
    with pytest.raises(UsageRuntimeError, match="only supported when using DDP with the default process group"):
        copy.deepcopy(ddp)
    state = copy.deepcopy(ddp.state_dict())
    assert list(state) == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]


def test_without_a_default_group_the_error_names_what_to_do() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized.*pass your own group"):
        DDP(mlp(seed=0))
