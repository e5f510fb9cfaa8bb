"""Every shape that a training graph can have: the gradients are the mean of what each rank would have got alone."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import GraphChanged, GroupAborted, ReadyTwice, Unfinished
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.models import inputs
from helpers.rank_tests import on_ranks

SMALL = 0.0001
"""MiB: buckets of a hundred bytes, so that a model has several."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class Branches(nn.Module):
    """Uses the given layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, used: str) -> Tensor:
        x = self.shared(x)
        return sum((getattr(self, name)(x) for name in used), x)


class Tied(nn.Module):
    """Tied input and output matrices, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(x)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 2).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(self.single(x).double()).bfloat16()).float()


class Shuffled(nn.Module):
    """Runs its layers in a given order, so that gradients arrive in a different order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


@pytest.fixture
def assert_same_as_alone(local_means: Callable[..., Any], assert_gradients: Callable[..., None]) -> Callable[..., None]:
    """Three steps on `n` ranks, each compared with the mean of local gradients."""

    def check(
        make: Callable[[], nn.Module], loss: Callable[..., Tensor], n: int = 2, steps: int = 3, **flags: Any
    ) -> None:
        model = make()

        def rank_main(group: Group) -> None:
            ddp = DDP(copy.deepcopy(model), process_group=group, **flags)
            for step in range(steps):
                expected = local_means(group, ddp.module, lambda m: loss(m, group.rank, step))
                ddp.zero_grad()
                loss(ddp, group.rank, step).backward()
                assert_gradients(ddp.module, expected)
            assert ddp.replica.reducer.steps == steps

        run_ranks(rank_main, n)

    return check


FLAGS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": SMALL},
    {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
    {"static_graph": True, "bucket_cap_mb": SMALL},
    {"find_unused_parameters": True, "bucket_cap_mb": SMALL},
    {"bucket_cap_mb_list": [0.0001, 0.0002]},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_plain(assert_same_as_alone: Callable[..., None], flags: dict[str, Any], n: int) -> None:
    assert_same_as_alone(mlp, lambda m, rank, step: m(inputs(rank, step)).pow(2).sum(), n, **flags)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_shared_parameters(assert_same_as_alone: Callable[..., None], flags: dict[str, Any]) -> None:
    assert_same_as_alone(Tied, lambda m, rank, step: m(torch.tensor([rank, 1, 2 + step])).pow(2).sum(), **flags)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_two_forwards_one_backward(assert_same_as_alone: Callable[..., None], flags: dict[str, Any]) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step)).sum() + model(inputs(rank, step + 50)).pow(2).sum()

    assert_same_as_alone(mlp, loss, **flags)


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_gradients_that_come_in_another_order_in_every_step_and_on_every_rank(
    assert_same_as_alone: Callable[..., None], flags: dict[str, Any]
) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step), ORDERS[(7 * step * (step > 2) + 5 * rank) % 24]).pow(2).sum()

    assert_same_as_alone(Shuffled, loss, n=2, steps=8, **flags)


def test_mixed_dtypes_get_buckets_of_their_own(assert_same_as_alone: Callable[..., None]) -> None:
    assert_same_as_alone(MixedDtypes, lambda m, rank, step: m(inputs(rank, step)).sum())


def test_complex_parameters(assert_same_as_alone: Callable[..., None]) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
            self.b = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.w).abs() + self.b

    assert_same_as_alone(Complex, lambda m, rank, step: m(inputs(rank, step)).sum())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_layers_without_elements(assert_same_as_alone: Callable[..., None]) -> None:
    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.full, self.none = nn.Linear(4, 2), nn.Linear(4, 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.full(x).sum() + self.none(x).sum()

    assert_same_as_alone(Hollow, lambda m, rank, step: m(inputs(rank, step)), bucket_cap_mb=SMALL)
    assert_same_as_alone(Hollow, lambda m, rank, step: m(inputs(rank, step)), gradient_as_bucket_view=True)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("flags", [{}, {"static_graph": True}, {"bucket_cap_mb": SMALL}], ids=str)
def test_checkpoint(assert_same_as_alone: Callable[..., None], reentrant: bool, flags: dict[str, Any]) -> None:
    assert_same_as_alone(
        lambda: Checkpointed(reentrant=reentrant), lambda m, rank, step: m(inputs(rank, step)).sum(), **flags
    )


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_one_part_checkpointed_twice_in_a_static_graph(
    assert_same_as_alone: Callable[..., None], reentrant: bool
) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step), times=2).sum()

    assert_same_as_alone(lambda: Checkpointed(reentrant=reentrant), loss, static_graph=True, bucket_cap_mb=SMALL)


def test_one_part_checkpointed_twice_reentrantly_is_ready_twice() -> None:
    def rank_main(group: Group) -> str:
        ddp = DDP(Checkpointed(reentrant=True), process_group=group)
        with pytest.raises(ReadyTwice, match="Expected to mark a variable ready only once") as caught:
            ddp(inputs(0), times=2).sum().backward()
        return str(caught.value)

    (said,) = run_ranks(rank_main, 1)
    assert "with name middle.0." in said


def test_unused_here_but_used_elsewhere_gets_the_mean(assert_same_as_alone: Callable[..., None]) -> None:
    used = ["ab", "b", "bc"]
    assert_same_as_alone(
        Branches,
        lambda m, rank, step: m(inputs(rank, step), used[(rank + step) % 3]).pow(2).sum(),
        n=3,
        find_unused_parameters=True,
        bucket_cap_mb=SMALL,
    )


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_unused_on_all_ranks_is_left_alone(group: Group, views: bool) -> None:
    ddp = DDP(Branches(), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=views)
    c = ddp.module.c.weight
    ddp(inputs(group.rank), "ab").sum().backward()
    assert c.grad is None
    mine = c.grad = torch.full((4, 4), float(group.rank))
    ddp(inputs(group.rank), "a").sum().backward()
    assert c.grad is mine
    assert c.grad.eq(group.rank).all()


def test_an_output_that_is_not_part_of_the_loss(assert_same_as_alone: Callable[..., None]) -> None:
    for flags in ({"find_unused_parameters": True}, {"static_graph": True}):
        assert_same_as_alone(TwoHeads, lambda m, rank, step: m(inputs(rank, step))[0].sum(), **flags)


def test_the_used_map_counts_ranks() -> None:
    def rank_main(group: Group) -> list[int]:
        ddp = DDP(Branches(), process_group=group, find_unused_parameters=True)
        ddp(inputs(group.rank), "ab" if group.rank else "a").sum().backward()
        return ddp.reducer._get_local_used_map().tolist()

    assert run_ranks(rank_main, 3) == [[3, 3, 3, 3, 2, 2, 0, 0]] * 3


@pytest.mark.parametrize("good_steps", [0, 4])
@pytest.mark.parametrize("flags", FLAGS[:2], ids=lambda flags: " ".join(flags) or "plain")
def test_unused_without_asking_is_an_error_that_names_them_and_the_model_goes_on(
    good_steps: int, flags: dict[str, Any]
) -> None:
    def rank_main(group: Group) -> str:
        ddp = DDP(Branches(), process_group=group, **flags)
        for _ in range(good_steps):
            ddp(inputs(group.rank), "abc").sum().backward()
        ddp(inputs(group.rank), "ab").sum().backward()
        group.barrier()  # or the faster rank's error reaches this one in its first step
        with pytest.raises(RuntimeError) as caught:
            ddp(inputs(group.rank), "abc")
        ddp.zero_grad()
        ddp(inputs(group.rank), "abc").sum().backward()
        assert ddp.module.c.weight.grad is not None
        group.barrier()
        return f"{type(caught.value).__name__}: {caught.value}"

    said = run_ranks(rank_main, 2)
    assert any(
        text.startswith("Unfinished: Expected to have finished reduction in the prior iteration") for text in said
    )
    assert all("Parameters which did not receive grad for rank" in text and "c.weight, c.bias" in text for text in said)


@on_ranks(1)
def test_a_static_graph_that_changes_is_an_error(group: Group) -> None:
    ddp = DDP(Branches(), process_group=group, static_graph=True)
    ddp(inputs(0), "ab").sum().backward()
    with pytest.raises(GraphChanged, match="Your training graph has changed in this iteration") as caught:
        ddp(inputs(0), "abc").sum().backward()
    assert "(c." in str(caught.value)
    ddp(inputs(0), "ab").sum().backward()  # the failed step is over; the graph is recorded again
    ddp(inputs(0), "a").sum().backward()
    with pytest.raises((GraphChanged, Unfinished), match="b.weight, b.bias"):
        ddp(inputs(0), "ab")


@pytest.mark.parametrize("flags", FLAGS[:3], ids=lambda flags: " ".join(flags) or "plain")
def test_two_backwards_of_one_forward(
    local_means: Callable[..., Any], assert_gradients: Callable[..., None], flags: dict[str, Any]
) -> None:
    model = TwoHeads()

    def rank_main(group: Group) -> None:
        ddp = DDP(copy.deepcopy(model), process_group=group, **flags)
        for step in range(5):
            x = inputs(group.rank, step)
            expected = local_means(group, ddp.module, lambda m, x=x: m(x)[0].sum() + m(x)[1].pow(2).sum())
            ddp.zero_grad()
            left, right = ddp(x)
            left.sum().backward()
            right.pow(2).sum().backward()
            assert_gradients(ddp.module, expected)

    run_ranks(rank_main, 2)


def test_forward_without_backward_any_number_of_times(assert_same_as_alone: Callable[..., None]) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        for _ in range(rank + 2):
            model(inputs(rank))
        with torch.no_grad():
            model(inputs(rank))
        return model(inputs(rank, step)).sum()

    assert_same_as_alone(mlp, loss)


@pytest.mark.parametrize("good_steps", [0, 4])
def test_a_backward_that_was_interrupted_on_all_ranks_is_over(
    local_means: Callable[..., Any], assert_gradients: Callable[..., None], good_steps: int
) -> None:
    model = mlp()

    def explode(_: Tensor) -> None:
        raise KeyError("in the middle")

    def rank_main(group: Group) -> None:
        ddp = DDP(copy.deepcopy(model), process_group=group, bucket_cap_mb=SMALL)
        for _ in range(good_steps):
            ddp(inputs(group.rank)).sum().backward()
        handle = ddp.module[0].weight.register_hook(explode)
        with pytest.raises((KeyError, GroupAborted), match="in the middle"):  # the first to fail aborts the others
            ddp(inputs(group.rank)).sum().backward()
        handle.remove()
        expected = local_means_after_recovery(group, ddp)
        ddp.zero_grad()
        ddp(inputs(group.rank)).sum().backward()
        assert_gradients(ddp.module, expected)

    def local_means_after_recovery(group: Group, ddp: DDP) -> Any:
        ddp.replica.recovery.recover()
        return local_means(group, ddp.module, lambda m: m(inputs(group.rank)).sum())

    run_ranks(rank_main, 2)
