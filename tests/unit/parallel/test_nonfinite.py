"""`NonFinite`: NaN and infinity are named by rank, parameter, index and origin on every rank, and training goes on."""

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups import Group, Recording
from gradwire.hooks import (
    CommHook,
    Reduced,
    Reduction,
    Turn,
    cast,
    chain,
    diloco,
    error_feedback,
    mean,
    quantize,
    top_k,
)
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import Buckets, Gradients, NonFinite
from gradwire.reducer.checks import nonfinite_search
from gradwire.testing import run_ranks
from helpers.futures import done
from helpers.poisoned_model import FLAGS, Model, inputs, means
from helpers.rank_tests import on_ranks

HOOKS: dict[str, Callable[[], CommHook]] = {
    "mean": mean,
    "cast": lambda: chain(cast(torch.bfloat16), mean()),
    "top_k": lambda: chain(error_feedback(), top_k(ratio=0.5)),
    "quantize": lambda: chain(error_feedback(), quantize(bits=8)),
}


def alone(model: nn.Module, rank: int, step: int, poison: float) -> dict[str, Tensor]:
    """The gradients of one rank."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(inputs(rank, step), poison).pow(2).sum().backward()
    return {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@on_ranks(3)
def test_every_rank_raises_with_rank_and_parameter_and_the_next_step_is_right(
    group: Group, flags: Any, value: float
) -> None:
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE, **flags)
    for step in range(8):
        ddp.zero_grad()
        bad = step in (0, 3, 4)
        loss = ddp(inputs(group.rank, step), value if bad and group.rank == 1 else 1.0).float().pow(2).sum()
        if bad:
            with pytest.raises(
                NonFiniteGradient, match=r"on rank 1 the gradient of first\.\w+ is (NaN|infinite) at \["
            ) as caught:
                loss.backward()
            error = caught.value
            assert (error.rank, error.origin, error.step) == (1, Origin.GRADIENT, step)
            assert error.parameter in ("first.weight", "first.bias")
            gradient = alone(ddp.module, 1, step, value)[error.parameter]
            assert error.index == tuple((~gradient.isfinite()).nonzero()[0].tolist())
        else:
            loss.backward()
            for p, want in zip(ddp.parameters(), means(ddp.module, group.size, step), strict=True):
                torch.testing.assert_close(p.grad, want, rtol=0.1, atol=0.1)
    assert group.failure is None


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_every_hook(hook: Callable[[], CommHook]) -> None:
    def rank_main(group: Group) -> list[Tensor]:
        model = Model()
        replica = replicate(model, group=group, hook=hook(), nonfinite=NonFinite.RAISE, gradients=Gradients.COPIES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(inputs(group.rank, step), math.nan if step == 2 and group.rank == 0 else 1.0).pow(2).sum()
            if step == 2:
                with pytest.raises(NonFiniteGradient) as caught:
                    loss.backward()
                assert caught.value.rank == 0
            else:
                loss.backward()
                optimizer.step()
        replica.detach()
        return [p.detach() for p in model.parameters()]

    first, second = run_ranks(rank_main, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


@on_ranks(2)
def test_ranks_that_do_not_average_their_gradients_raise_together(group: Group) -> None:
    model = Model()
    replica = replicate(model, group=group, hook=diloco(every=2), nonfinite=NonFinite.RAISE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica.attach_optimizer(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(inputs(group.rank, step), math.nan if step == 2 and group.rank == 0 else 1.0).pow(2).sum()
        if step == 2:
            with pytest.raises(NonFiniteGradient, match="on rank 0"):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
    replica.average_parameters()
    replica.detach()


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
@on_ranks(3)
def test_a_gradient_that_float16_cannot_hold_is_an_overflow_on_its_rank(
    group: Group, on_host: bool, gradients: Gradients
) -> None:
    model = Model()
    hook = chain(cast(torch.float16), mean())
    replica = replicate(model, group=group, hook=hook, nonfinite=NonFinite.RAISE, gradients=gradients)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        with pytest.raises(NonFiniteGradient, match=r"too large for the dtype .* cast\(torch.float16\)") as caught:
            model(inputs(group.rank), 1e7 if group.rank == 1 else 1.0).sum().backward()
        assert (caught.value.rank, caught.value.origin) == (1, Origin.OVERFLOW)
        assert caught.value.parameter in ("first.weight", "first.bias")
    replica.detach()


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
@on_ranks(2)
def test_a_sum_that_overflows_is_nobodys_gradient(group: Group, gradients: Gradients) -> None:
    model = nn.Linear(2, 2, bias=False)
    replica = replicate(model, group=group, nonfinite=NonFinite.RAISE, gradients=gradients)
    with pytest.raises(NonFiniteGradient, match="finite on every rank, but their average is not, at") as caught:
        (model(torch.ones(1, 2))[0, 1] * 3e38).backward()
    error = caught.value
    assert (error.rank, error.origin, error.parameter, error.index) == (None, Origin.OVERFLOW, "weight", (1, 0))
    replica.detach()


class _Broken(CommHook):
    """Averages, and spoils an element of the result on some ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value = grad.clone()
        yield all_reduce(value, op=ReduceOp.AVG)
        if turn.rank in self.ranks:
            value[1] = math.inf
        return Reduced(value, grad)


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)], ids=["everywhere", "on one rank"])
@on_ranks(3)
def test_what_a_hook_makes_of_finite_gradients_is_the_hooks(
    group: Group, ranks: tuple[int, ...], gradients: Gradients
) -> None:
    model = nn.Linear(2, 2, bias=False)
    replica = replicate(model, group=group, hook=_Broken(*ranks), nonfinite=NonFinite.RAISE, gradients=gradients)
    for _ in range(2):
        with pytest.raises(NonFiniteGradient, match="the result of the hook _Broken.* is infinite") as caught:
            model(torch.ones(1, 2)).sum().backward()
        error = caught.value
        assert (error.origin, error.parameter, error.index) == (Origin.HOOK, "weight", (0, 1))
        assert error.rank == (None if len(ranks) == 3 else 1)
    assert group.failure is None
    replica.detach()


def test_a_hook_written_for_torch() -> None:
    def spoil(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        return done(bucket.buffer() / (0.0 if state.rank == 1 else 1.0))

    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Linear(2, 2), process_group=group, nonfinite=NonFinite.RAISE)
        ddp.register_comm_hook(group, spoil)
        with pytest.raises(NonFiniteGradient, match="spoil") as caught:
            ddp(torch.ones(1, 2)).sum().backward()
        assert (caught.value.rank, caught.value.origin) == (1, Origin.HOOK)

    run_ranks(rank_main, 2)


class _Hides(CommHook):
    """Turns NaN into zero before it averages."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value = grad.nan_to_num(0.0, 0.0, 0.0)
        yield all_reduce(value, op=ReduceOp.AVG)
        return Reduced(value, grad)


@on_ranks(2)
def test_what_a_hook_hides_is_found(group: Group) -> None:
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    ddp.set_hook(_Hides())
    with pytest.raises(NonFiniteGradient) as caught:
        ddp(inputs(group.rank), math.nan if group.rank == 1 else 1.0).sum().backward()
    assert (caught.value.rank, caught.value.origin) == (1, Origin.GRADIENT)


def test_several_ranks_and_parameters_are_counted() -> None:
    def rank_main(group: Group) -> str:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        with pytest.raises(NonFiniteGradient) as caught:
            (ddp(inputs(group.rank)) * (math.nan if group.rank else 1.0)).sum().backward()
        return str(caught.value)

    texts = run_ranks(rank_main, 3)
    assert len(set(texts)) == 1
    assert (
        "on rank 1 the gradient of last.bias is NaN at [0], as in 3 other parameters. So it is on rank 2." in texts[0]
    )


@pytest.fixture(scope="module", params=[True, False], ids=["at once", "later"])
def on_host(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether values are read at once, as on the CPU, or at the end of the step, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite_search, "on_host", lambda t: request.param)
        yield request.param


@settings(max_examples=20)
@given(data=st.data())
def test_any_element_of_any_parameter_on_any_rank(on_host: bool, data: st.DataObject) -> None:
    """Of any dtype and layout, with copies and views: rank, parameter and index are exact, whatever the order of memory."""
    n = data.draw(st.integers(1, 3))
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    kinds = data.draw(st.lists(st.tuples(shapes, dtypes, st.booleans()), min_size=1, max_size=5))
    sizes = [math.prod(shape) for shape, _, _ in kinds]
    assume(any(sizes))
    chosen = data.draw(st.sampled_from([i for i, size in enumerate(sizes) if size]))
    element = data.draw(st.integers(0, sizes[chosen] - 1))
    culprit = data.draw(st.integers(0, n - 1))
    value = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    gradients, limit = data.draw(st.sampled_from(list(Gradients))), data.draw(st.sampled_from([1, 2**20]))
    keep, steps = data.draw(st.booleans()), data.draw(st.integers(1, 3))

    def rank_main(group: Group) -> None:
        module = nn.Module()
        for i, (shape, dtype, turned) in enumerate(kinds):
            p = torch.ones(shape, dtype=dtype)
            module.register_parameter(f"p{i}", nn.Parameter(p.mT.contiguous().mT if turned and p.dim() > 1 else p))
        # Times 2: the gradients of plain sums of one element would share memory, and then all of them be NaN.
        module.forward = lambda: sum(
            (2 * (p.abs() if p.is_complex() else p)).float().sum() for p in module.parameters()
        )
        replica = replicate(
            module, group=group, nonfinite=NonFinite.RAISE, gradients=gradients, buckets=Buckets((limit,))
        )
        for step in range(steps):
            if step == steps - 1 and group.rank == culprit:
                place = torch.zeros(sizes[chosen]).scatter(0, torch.tensor(element), 1.0).bool().view(kinds[chosen][0])
                module.get_parameter(f"p{chosen}").register_hook(lambda g: g.masked_fill(place, value))
            module.zero_grad(set_to_none=not keep)
            if step < steps - 1:
                module().backward()
                continue
            with pytest.raises(NonFiniteGradient) as caught:
                module().backward()
            error = caught.value
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), kinds[chosen][0]))
            assert (error.rank, error.parameter) == (culprit, f"p{chosen}")
            assert error.index == index or (error.index is None and not on_host)  # overwritten on a device
            assert (error.origin, error.step) == (Origin.GRADIENT, steps - 1)
        replica.detach()

    run_ranks(rank_main, n)


@on_ranks(1)
def test_huge_but_finite_gradients_pass(group: Group) -> None:
    ddp = DDP(nn.Linear(4, 4, bias=False), process_group=group, nonfinite=NonFinite.RAISE)
    (ddp(torch.ones(1, 4)).sum() * 2e38).backward()  # their sum is infinite
    assert torch.equal(ddp.module.weight.grad, torch.full((4, 4), 2e38))


def test_sparse_gradients(on_host: bool) -> None:
    where = r"is NaN at \[1, 0\]" if on_host else "is NaN"

    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Embedding(5, 3, sparse=True), process_group=group, nonfinite=NonFinite.RAISE)
        for factor in (1.0, math.nan, 1.0):
            ddp.zero_grad()
            loss = (ddp(torch.tensor([1, 2])) * (factor if group.rank == 1 else 1.0)).sum()
            if math.isnan(factor):
                with pytest.raises(NonFiniteGradient, match=f"on rank 1 the gradient of weight {where}"):
                    loss.backward()
            else:
                loss.backward()

    run_ranks(rank_main, 2)


@on_ranks(2)
def test_it_costs_no_collective_with_a_hook_that_passes_nan_on_and_one_with_any_other(group: Group) -> None:
    hooks = (mean(), NonFinite.PASS, 1), (mean(), NonFinite.RAISE, 1), (_Hides(), NonFinite.RAISE, 2)
    for hook, policy, count in hooks:
        recorded = Recording(group)
        model = Model()
        replica = replicate(model, group=recorded, hook=hook, nonfinite=policy)
        for _ in range(3):
            model.zero_grad()
            model(inputs(group.rank)).sum().backward()
        before = len(recorded.submitted)
        model.zero_grad()
        model(inputs(group.rank)).sum().backward()
        assert len(recorded.submitted) - before == count
        replica.detach()


def test_a_model_dropped_in_the_middle_of_a_step_is_freed_at_once(group: Group) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replica = replicate(module, group=group, nonfinite=NonFinite.RAISE, buckets=Buckets((1,), from_start=True))
    module(torch.ones(1, 2))
    module[1](torch.ones(1, 2)).sum().backward()  # half of the gradients
    weak = weakref.ref(module[0].weight)
    gc.collect()
    gc.disable()
    try:
        del module, replica
        assert weak() is None
    finally:
        gc.enable()
