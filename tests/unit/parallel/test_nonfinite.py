"""`NonFinite`: NaN and infinity are named by rank, parameter, index and origin on every rank, and training goes on."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwire import observe
from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import (
    CommHook,
    Reduced,
    Reduction,
    Turn,
    cast,
    chain,
    dgc,
    diloco,
    error_feedback,
    every,
    mean,
    power_sgd,
    quantize,
    top_k,
)
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.parallel import replicate
from gradwire.policies import Buckets, Gradients, NonFinite, ScaleCheck
from gradwire.reducer import nonfinite_search
from gradwire.testing import run_ranks

SMALL = 0.0001
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"bucket_cap_mb": SMALL},
    "one bucket": {},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "lazy": {"lazy_bucket_allocation": True},
    "mixed": {
        "mixed_precision": SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=None)
    },
}
HOOKS: dict[str, Callable[[], CommHook]] = {
    "mean": mean,
    "cast": lambda: chain(cast(torch.bfloat16), mean()),
    "top_k": lambda: chain(error_feedback(), top_k(ratio=0.5)),
    "quantize": lambda: chain(error_feedback(), quantize(bits=8)),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor, poison: float = 1.0) -> Tensor:
        return self.last(_Scale.apply(torch.tanh(self.first(x)), poison)) + self.empty.sum()


class _Scale(torch.autograd.Function):
    """Multiplies gradients alone, so that those of `first` are poisoned and the loss is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.rand(3, 4, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.1


def alone(model: nn.Module, rank: int, step: int, poison: float) -> dict[str, Tensor]:
    """The gradients of one rank."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(inputs(rank, step), poison).pow(2).sum().backward()
    return {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}


def means(model: nn.Module, n: int, step: int) -> list[Tensor]:
    copied = copy.deepcopy(model)
    copied.zero_grad()
    for rank in range(n):
        copied(inputs(rank, step)).pow(2).sum().div(n).backward()
    return [p.grad for p in copied.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_rank_raises_with_rank_and_parameter_and_the_next_step_is_right(flags: Any, value: float) -> None:
    def rank_main(group: Group) -> None:
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

    run_ranks(rank_main, 3)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_every_hook(hook: Callable[[], CommHook]) -> None:
    def rank_main(group: Group) -> list[Tensor]:
        model = Model()
        replica = replicate(
            model,
            group=group,
            hook=hook(),
            nonfinite=NonFinite.RAISE,
            gradients=Gradients.COPIES,
        )
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


def test_ranks_that_do_not_average_their_gradients_raise_together() -> None:
    def rank_main(group: Group) -> None:
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

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
def test_a_gradient_that_float16_cannot_hold_is_an_overflow_on_its_rank(on_host: bool, gradients: Gradients) -> None:
    def rank_main(group: Group) -> None:
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

    run_ranks(rank_main, 3)


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
def test_a_sum_that_overflows_is_nobodys_gradient(gradients: Gradients) -> None:
    def rank_main(group: Group) -> None:
        model = nn.Linear(2, 2, bias=False)
        replica = replicate(model, group=group, nonfinite=NonFinite.RAISE, gradients=gradients)
        with pytest.raises(NonFiniteGradient, match="finite on every rank, but their average is not, at") as caught:
            (model(torch.ones(1, 2))[0, 1] * 3e38).backward()
        error = caught.value
        assert (error.rank, error.origin, error.parameter, error.index) == (None, Origin.OVERFLOW, "weight", (1, 0))
        replica.detach()

    run_ranks(rank_main, 2)


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
def test_what_a_hook_makes_of_finite_gradients_is_the_hooks(ranks: tuple[int, ...], gradients: Gradients) -> None:
    def rank_main(group: Group) -> None:
        model = nn.Linear(2, 2, bias=False)
        replica = replicate(model, group=group, hook=_Broken(*ranks), nonfinite=NonFinite.RAISE, gradients=gradients)
        for _ in range(2):
            with pytest.raises(NonFiniteGradient, match="what the hook _Broken.* is infinite") as caught:
                model(torch.ones(1, 2)).sum().backward()
            error = caught.value
            assert (error.origin, error.parameter, error.index) == (Origin.HOOK, "weight", (0, 1))
            assert error.rank == (None if len(ranks) == 3 else 1)
        assert group.failure is None
        replica.detach()

    run_ranks(rank_main, 3)


def test_a_hook_written_for_torch() -> None:
    def spoil(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() / (0.0 if state.rank == 1 else 1.0))
        return future

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


def test_what_a_hook_hides_is_found() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        ddp.set_hook(_Hides())
        with pytest.raises(NonFiniteGradient) as caught:
            ddp(inputs(group.rank), math.nan if group.rank == 1 else 1.0).sum().backward()
        assert (caught.value.rank, caught.value.origin) == (1, Origin.GRADIENT)

    run_ranks(rank_main, 2)


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


@pytest.mark.filterwarnings("ignore:averaging gradients in step 2")
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_skipped_step_leaves_no_trace(flags: Any) -> None:
    """As if the bad batch had not been there, on all ranks; also in the state of Adam."""
    start = Model()

    def rank_main(group: Group) -> None:
        results = []
        for bad in (2, None):
            ddp = DDP(copy.deepcopy(start), process_group=group, nonfinite=NonFinite.SKIP, **flags)
            optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1, weight_decay=0.1)
            for step in range(5):
                if step == 2 and bad is None:
                    continue
                poison = math.nan if step == bad and group.rank == 1 else 1.0
                ddp(inputs(group.rank, step), poison).float().pow(2).sum().backward()
                assert all((p.grad is None) == (step == bad) for p in ddp.parameters())
                optimizer.step()
                optimizer.zero_grad()
            assert group.failure is None
            results.append([p.detach() for p in ddp.parameters()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    run_ranks(rank_main, 2)


def test_recorded_gradients_are_averaged_like_any_other(tmp_path: Path) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RECORD)
        for step in range(4):
            ddp.zero_grad()
            ddp(inputs(group.rank), math.nan if step in (1, 2) and group.rank == 1 else 1.0).sum().backward()
            finite = [bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None]
            assert finite == [not (step in (1, 2) and n.startswith("first")) for n, _ in ddp.module.named_parameters()]

    observe.start(tmp_path, rank=0, size=1)
    try:
        with pytest.warns(RuntimeWarning, match=r"on rank 1 .* Later ones are recorded only\.") as caught:
            run_ranks(rank_main, 2)
    finally:
        observe.stop()
    assert len(caught) == 1  # in the first step that is bad, on rank 0
    warnings = observe.read_warnings(observe.read_rings(tmp_path))
    assert [warning.step for warning in warnings] == [1, 2]
    assert all("on rank 1 the gradient of first.bias is NaN" in warning.text for warning in warnings)


STATEFUL: dict[str, Callable[[], CommHook]] = {
    "top_k": lambda: chain(error_feedback(), top_k(ratio=0.3)),
    "quantize": lambda: chain(error_feedback(), quantize(bits=4)),
    "power_sgd": lambda: chain(error_feedback(), power_sgd(rank=1)),
    "dgc": lambda: dgc(0.3, momentum=0.5),
    "every": lambda: every(2, mean()),
}


@pytest.mark.filterwarnings("ignore:averaging gradients")
@pytest.mark.parametrize("policy", [NonFinite.SKIP, NonFinite.RAISE])
@pytest.mark.parametrize("hook", STATEFUL.values(), ids=STATEFUL)
def test_a_dropped_step_leaves_the_state_of_the_hook_as_it_was(hook: Callable[[], CommHook], policy: NonFinite) -> None:
    """Also the finite rest of its gradients, which may be huge, is not sent later."""
    start = Model()

    def rank_main(group: Group) -> None:
        runs = []
        for bad in (True, False):
            model = copy.deepcopy(start)
            replica = replicate(model, group=group, hook=hook(), nonfinite=policy)
            for step in (0, 1, 2, None, 3) if bad else (0, 1, 2, 3):
                if step is None:
                    before = replica.hook_state_dict()
                    loss = (model(inputs(group.rank), math.nan if group.rank == 1 else 1.0) * 1e20).sum()
                    with contextlib.suppress(NonFiniteGradient):
                        loss.backward()
                    after = replica.hook_state_dict()
                    for part in ("state", "step", "owed"):
                        torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)
                else:
                    model(inputs(group.rank, step)).sum().backward()
                    runs.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                model.zero_grad()
            replica.detach()
        for ours, wanted in zip(runs[:4], runs[4:], strict=True):
            for a, b in zip(ours, wanted, strict=True):
                assert torch.equal(a, b)

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_a_skipped_step_does_not_part_a_hook_that_moves_parameters_from_what_is_saved_of_it() -> None:
    start = Model()

    def rank_main(group: Group) -> None:
        runs = []
        for policy in (NonFinite.SKIP, NonFinite.PASS):
            model = copy.deepcopy(start)
            replica = replicate(model, group=group, hook=diloco(every=2), nonfinite=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            replica.attach_optimizer(optimizer)
            for step in range(8):
                bad = step == 3 and group.rank == 1 and policy is NonFinite.SKIP
                model(inputs(group.rank, step), math.nan if bad else 1.0).pow(2).sum().backward()
                if step == 3:
                    optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
            runs.append(replica.hook_state_dict()["state"])
            replica.detach()
        torch.testing.assert_close(*runs, rtol=0, atol=0)

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:averaging gradients in step 1")
def test_a_gradient_that_is_not_finite_is_not_a_wrong_scale() -> None:
    def rank_main(group: Group) -> None:
        model = Model()
        replica = replicate(model, group=group, nonfinite=NonFinite.RECORD, scale_check=ScaleCheck())
        for step in range(3):
            model.zero_grad()
            model(inputs(group.rank), math.nan if step == 1 and group.rank == 1 else 1.0).sum().backward()
            assert bool(model.first.weight.grad.isfinite().all()) == (step != 1)
        replica.detach()

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:averaging gradients")
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_first_step_may_be_skipped_and_what_was_accumulated_goes_with_it(flags: Any) -> None:
    start = Model()

    def rank_main(group: Group) -> None:
        ddp = DDP(copy.deepcopy(start), process_group=group, nonfinite=NonFinite.SKIP, **flags)
        static = "static_graph" in flags  # which has no steps without synchronization
        for step in range(5):
            bad = step in (0, 3)
            with ddp.no_sync() if not static else contextlib.nullcontext():
                if not static:
                    poison = math.inf if bad and group.rank == 1 else 1.0
                    ddp(inputs(group.rank, step), poison).float().pow(2).sum().backward()
            poison = math.inf if static and bad and group.rank == 1 else 1.0
            ddp(inputs(group.rank, step), poison).float().pow(2).sum().backward()
            assert all((p.grad is None) == bad for p in ddp.parameters()), step
            if not bad:
                for p, want in zip(ddp.parameters(), means(start, group.size, step), strict=True):
                    torch.testing.assert_close(p.grad, want * (1 if static else 2), rtol=0.1, atol=0.1)
            ddp.zero_grad()

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_with_grad_scaler_as_the_page_says() -> None:
    """All ranks skip the same steps, and RECORD does not get in the way; SKIP leaves it no gradients."""

    def rank_main(group: Group, policy: NonFinite) -> tuple[float, list[Tensor]]:
        ddp = DDP(Model(), process_group=group, nonfinite=policy)
        optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = ddp(inputs(group.rank, step), math.inf if step == 1 and group.rank == 1 else 1.0).pow(2).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), [p.detach() for p in ddp.parameters()]

    (scale, first), (other, second) = run_ranks(lambda group: rank_main(group, NonFinite.RECORD), 2)
    assert scale == other == 2.0
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        run_ranks(lambda group: rank_main(group, NonFinite.SKIP), 2)


def test_an_optimizer_that_has_stepped_in_backward_cannot_skip() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        ddp.replica.reducer.leave_gradients = True
        with pytest.raises(NonFiniteGradient):
            ddp(inputs(0), math.nan).sum().backward()

    with pytest.warns(RuntimeWarning):
        run_ranks(rank_main, 1)


@pytest.mark.filterwarnings("ignore:averaging gradients")
@pytest.mark.parametrize("policy", [NonFinite.SKIP, NonFinite.RAISE])
def test_a_rank_without_inputs_takes_part(policy: NonFinite) -> None:
    """Its own gradients are left from its last step, and nobody's concern."""

    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=policy)

        def train() -> None:
            with ddp.join():
                for step in range(4 if group.rank == 1 else 2):
                    ddp.zero_grad()
                    ddp(inputs(group.rank, step), math.nan if step == 3 else 1.0).sum().backward()
                    if group.rank == 0 and step == 1:
                        ddp.module.first.weight.grad.fill_(math.nan)

        if policy is NonFinite.SKIP:
            train()
            return
        with pytest.raises(NonFiniteGradient) as caught:
            train()
        assert (caught.value.rank, caught.value.origin) == (1, Origin.GRADIENT)

    run_ranks(rank_main, 2)


@pytest.fixture(scope="module", params=[True, False], ids=["at once", "later"])
def on_host(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether values are read at once, as on the CPU, or at the end of the step, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite_search, "on_host", lambda t: request.param)
        yield request.param


@settings(max_examples=40, deadline=None)
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
        module.forward = lambda: sum((p.abs() if p.is_complex() else p).float().sum() for p in module.parameters())
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
            assert (error.rank, error.parameter, error.index) == (culprit, f"p{chosen}", index)
            assert (error.origin, error.step) == (Origin.GRADIENT, steps - 1)
        replica.detach()

    run_ranks(rank_main, n)


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_on_processes(kind: str) -> None:
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


def test_huge_but_finite_gradients_pass() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Linear(4, 4, bias=False), process_group=group, nonfinite=NonFinite.RAISE)
        (ddp(torch.ones(1, 4)).sum() * 2e38).backward()  # their sum is infinite

    run_ranks(rank_main, 1)


def test_sparse_gradients(on_host: bool) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Embedding(5, 3, sparse=True), process_group=group, nonfinite=NonFinite.RAISE)
        for factor in (1.0, math.nan, 1.0):
            ddp.zero_grad()
            loss = (ddp(torch.tensor([1, 2])) * (factor if group.rank == 1 else 1.0)).sum()
            if math.isnan(factor):
                with pytest.raises(NonFiniteGradient, match=r"on rank 1 the gradient of weight is NaN at \[1, 0\]"):
                    loss.backward()
            else:
                loss.backward()

    run_ranks(rank_main, 2)


def test_it_costs_no_collective_with_a_hook_that_passes_nan_on_and_one_with_any_other() -> None:
    def rank_main(group: Group) -> None:
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

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("name", ["ddp.md", "silent-errors.md"])
def test_the_pages_tell_the_truth(name: str) -> None:
    page = Path(__file__).parents[3] / "docs" / name
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_a_model_dropped_in_the_middle_of_a_step_is_freed_at_once() -> None:
    (group,) = ThreadGroup.world(1)
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
    group.close()
