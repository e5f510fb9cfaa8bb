"""Checks whose result the host reads one step later, while fused optimizers skip the step by themselves.

The device is the host here: `helpers.eager_scan` does what the kernels do. tests/gpu has the same on CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwire import observe
from gradwire.errors import GroupAborted, NonFiniteGradient, Origin
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import BucketSpec, CommHook, GradBucket, Reduction, Turn, cast, chain, error_feedback, mean, top_k
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.parallel import replicate
from gradwire.policies import BucketMemory, Buckets, Gradients, NonFinite
from gradwire.reducer import nonfinite_late, nonfinite_scan
from gradwire.reducer.nonfinite import NonFiniteChecked
from gradwire.reducer.nonfinite_search import Kind
from gradwire.testing import run_ranks
from helpers import eager_scan
from helpers.poisoned_model import FLAGS, Model, Scale, inputs, means


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite_late, "on_device", lambda device: True)
    monkeypatch.setattr(nonfinite_scan, "kernels", lambda module: eager_scan)
    monkeypatch.setattr(Group, "orders_streams", lambda self, device: True)


def fused(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=0.05, fused=True, **options)


def step(model: nn.Module, rank: int, number: int, poison: float = 1.0) -> None:
    model(inputs(rank, number), poison).float().pow(2).sum().backward()


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.filterwarnings("ignore:averaging gradients in step 2")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_skipped_step_leaves_no_trace(flags: Any, optimizer: Any) -> None:
    """As if the bad batch had not been there; nothing waits, and gradients stay, as the host does not know."""
    start = Model()
    kind, options = optimizer

    def rank_main(group: Group) -> None:
        results = []
        for bad in (2, None):
            ddp = DDP(copy.deepcopy(start), process_group=group, nonfinite=NonFinite.SKIP, **flags)
            optim = fused(ddp, kind, **options)
            ddp.attach_optimizer(optim)
            for number in range(6):
                if number == 2 and bad is None:
                    continue
                step(ddp, group.rank, number, math.nan if number == bad and group.rank == 1 else 1.0)
                assert not any(p.grad is None for n, p in ddp.module.named_parameters() if n != "empty")
                optim.step()
                assert not hasattr(optim, "found_inf")
                optim.zero_grad()
            results.append([p.detach() for p in ddp.parameters()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("keep", [False, True], ids=["set_to_none", "kept"])
@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_next_backward_raises_with_rank_and_parameter(flags: Any, value: float, keep: bool) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE, **flags)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        wanted: dict[str, tuple[int, ...]] = {}
        for number in range(9):
            optimizer.zero_grad(set_to_none=not keep)
            before = [p.detach().clone() for p in ddp.parameters()]
            if number == 4:  # after the bad one
                with pytest.raises(NonFiniteGradient, match="The optimizer has not used it") as caught:
                    step(ddp, group.rank, number)
                error = caught.value
                assert (error.rank, error.origin, error.step) == (1, Origin.GRADIENT, 3)
                assert error.parameter in ("first.weight", "first.bias")
                assert error.index == wanted[error.parameter]
                continue
            if number == 3:
                wanted = _bad_places(ddp.module, 1, number, value)
            step(ddp, group.rank, number, value if number == 3 and group.rank == 1 else 1.0)
            if number != 3:
                for p, want in zip(ddp.parameters(), means(ddp.module, group.size, number), strict=True):
                    torch.testing.assert_close(p.grad, want, rtol=0.1, atol=0.1)
            optimizer.step()
            moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert moved == (number != 3)
        assert group.failure is None

    run_ranks(rank_main, 3)


def _bad_places(model: nn.Module, rank: int, number: int, value: float) -> dict[str, tuple[int, ...]]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    step(alone, rank, number, value)
    places = {name: (~p.grad.isfinite()).nonzero() for name, p in alone.named_parameters() if p.grad is not None}
    return {name: tuple(found[0].tolist()) for name, found in places.items() if len(found)}


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
def test_overflows(gradients: Gradients) -> None:
    """Of one rank's gradient in float16, and of a sum that no rank's gradient explains."""

    def rank_main(group: Group) -> None:
        for hook, scale, ranks, rank in (
            (chain(cast(torch.float16), mean()), 1e9, (1,), 1),
            (mean(), 3e38, (0, 1), None),
        ):
            model = nn.Linear(1, 1, bias=False)
            replica = replicate(model, group=group, hook=hook, nonfinite=NonFinite.RAISE, gradients=gradients)
            optimizer = fused(model, torch.optim.SGD)
            replica.attach_optimizer(optimizer)
            for number in range(3):
                optimizer.zero_grad()
                bad = number == 1 and group.rank in ranks
                loss = model(torch.full((1, 1), scale if bad else 1.0)).sum()
                if number == 2:
                    with pytest.raises(NonFiniteGradient) as caught:
                        loss.backward()
                    assert (caught.value.rank, caught.value.origin) == (rank, Origin.OVERFLOW)
                    assert (caught.value.parameter, caught.value.index) == ("weight", (0, 0))
                else:
                    loss.backward()
                    optimizer.step()
            replica.detach()

    run_ranks(rank_main, 2)


def test_recorded_gradients_need_no_optimizer(tmp_path: Path) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RECORD)
        for number in range(5):
            ddp.zero_grad()
            step(ddp, group.rank, number, math.nan if number in (1, 4) and group.rank == 1 else 1.0)
        ddp.finish_checks()
        ddp.finish_checks()

    observe.start(tmp_path, rank=0, size=1)
    try:
        with pytest.warns(RuntimeWarning, match=r"on rank 1 .* Later ones are recorded only\.") as caught:
            run_ranks(rank_main, 2)
    finally:
        observe.stop()
    assert len(caught) == 1
    assert [warning.step for warning in observe.read_warnings(observe.read_rings(tmp_path))] == [1, 4]


@pytest.mark.parametrize("policy", [NonFinite.RAISE, NonFinite.SKIP])
def test_the_last_step_is_reported_by_finish_checks(policy: NonFinite) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=policy)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        ddp.finish_checks()
        for number in range(3):
            optimizer.zero_grad()
            step(ddp, group.rank, number, math.nan if number == 2 and group.rank == 0 else 1.0)
            if number < 2:
                optimizer.step()
        if policy is NonFinite.RAISE:
            with pytest.raises(NonFiniteGradient) as caught:
                ddp.finish_checks()
            assert (caught.value.rank, caught.value.step) == (0, 2)
        elif group.rank == 0:
            with pytest.warns(RuntimeWarning, match="step 2: on rank 0"):
                ddp.finish_checks()
        else:
            ddp.finish_checks()
        optimizer.step()  # which the flag still reaches
        assert all(bool(p.isfinite().all()) for p in ddp.parameters())
        optimizer.zero_grad()
        step(ddp, group.rank, 3)
        optimizer.step()
        ddp.finish_checks()

    run_ranks(rank_main, 2)


WAITS: dict[str, Any] = {
    "no optimizer": lambda ddp, params: None,
    "not attached": lambda ddp, params: torch.optim.Adam(params, fused=True),
    "not fused": lambda ddp, params: _attached(ddp, torch.optim.Adam(params)),
    "not all parameters": lambda ddp, params: _attached(ddp, torch.optim.Adam(params[:2], fused=True)),
    "cannot be fused": lambda ddp, params: _attached(ddp, torch.optim.RMSprop(params)),
}


def _attached(ddp: DDP, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    ddp.attach_optimizer(optimizer)
    return optimizer


@pytest.mark.parametrize("make", WAITS.values(), ids=WAITS)
def test_without_an_optimizer_that_can_skip_the_same_backward_raises(make: Any) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        optimizer = make(ddp, list(ddp.parameters()))
        for number in range(4):
            ddp.zero_grad()
            if number == 2:
                with pytest.raises(NonFiniteGradient, match="No average was written"):
                    step(ddp, group.rank, number, math.nan)
            else:
                step(ddp, group.rank, number)
                if optimizer is not None:
                    optimizer.step()

    run_ranks(rank_main, 2)


def test_a_hook_that_may_hide_a_nan_is_waited_for() -> None:
    def rank_main(group: Group) -> None:
        model = Model()
        hook = chain(error_feedback(), top_k(ratio=0.5))
        replica = replicate(model, group=group, hook=hook, nonfinite=NonFinite.RAISE)
        optimizer = fused(model)
        replica.attach_optimizer(optimizer)
        for number in range(3):
            model.zero_grad()
            if number == 2:
                with pytest.raises(NonFiniteGradient, match="No average was written"):
                    step(model, group.rank, number, math.nan if group.rank else 1.0)
            else:
                step(model, group.rank, number)
                optimizer.step()
        replica.detach()

    run_ranks(rank_main, 2)


def test_a_step_that_the_attached_optimizer_may_not_make_is_waited_for() -> None:
    """In the first step, and if it has not stepped since the last one: another may have taken its place."""

    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        optimizer = fused(ddp, torch.optim.SGD, momentum=0.9)
        ddp.attach_optimizer(optimizer)
        with pytest.raises(NonFiniteGradient, match="No average was written"):
            step(ddp, group.rank, 0, math.nan)
        for number in range(3):
            ddp.zero_grad()
            step(ddp, group.rank, number)
            if number < 2:
                optimizer.step()
        ddp.zero_grad()
        with pytest.raises(NonFiniteGradient, match="No average was written"):
            step(ddp, group.rank, 3, math.nan)

    run_ranks(rank_main, 2)


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_bad_steps_in_a_row() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        for number in range(12):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in ddp.parameters()]
            bad = number in (2, 3, 4, 7, 9)
            step(ddp, group.rank, number, math.nan if bad and group.rank == number % 2 else 1.0)
            optimizer.step()
            assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (not bad)

    run_ranks(rank_main, 2)


def test_after_a_step_that_has_failed_nothing_is_left_of_it() -> None:
    """A recovery drops the result that was pending, on all ranks, and what the failed step had found."""

    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE, bucket_cap_mb=0.0001)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        for number in range(3):
            optimizer.zero_grad()
            step(ddp, group.rank, number)
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises((RuntimeError, GroupAborted)):  # in the forward, if the other rank has failed before it
            loss = ddp(inputs(group.rank, 3), math.nan).sum()
            if group.rank == 1:
                loss = _fails(loss)
            (loss + 0 * sum(p.sum() for p in ddp.parameters() if p.numel())).backward()
        for number in range(4, 8):
            optimizer.zero_grad()
            step(ddp, group.rank, number)
            optimizer.step()
        ddp.finish_checks()

    run_ranks(rank_main, 2)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no")


def _fails(loss: Tensor) -> Tensor:
    out: Tensor = _Fails.apply(loss)
    return out


def test_ranks_with_uneven_inputs_wait() -> None:
    """Those that have none left make no steps, and could not tell when the others read a result; one from before is read."""

    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        bad, seen = {2, 5, 8}, []
        for number in range(3):
            optimizer.zero_grad()
            step(ddp, group.rank, number, math.nan if number in bad else 1.0)
            optimizer.step()
        with ddp.join():
            for number in range(3, 4 if group.rank == 1 else 8):
                optimizer.zero_grad()
                step(ddp, group.rank, number, math.nan if number in bad else 1.0)
                seen += [number] if all(p.grad is None for p in ddp.parameters()) else []
                optimizer.step()
        assert seen == ([5] if group.rank == 0 else [])
        for number in range(8, 11):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in ddp.parameters()]
            step(ddp, group.rank, number, math.nan if number in bad else 1.0)
            optimizer.step()
            moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert moved == (number not in bad)

    with pytest.warns(RuntimeWarning, match="step 2"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_without_any_inputs(first: int) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        with ddp.join():
            for number in range(5 if group.rank == 0 else first):
                optimizer.zero_grad()
                step(ddp, group.rank, number, math.nan if number in (2, 3) else 1.0)
                optimizer.step()

    with pytest.warns(RuntimeWarning, match="step 2"):
        run_ranks(rank_main, 2)


def test_with_a_grad_scaler_either_skips_the_step() -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = fused(ddp)
    ddp.attach_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(8):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        bad = number in (3, 5)
        with pytest.warns(RuntimeWarning) if number == 4 else contextlib.nullcontext():
            scaler.scale(ddp(inputs(0, number), math.inf if bad else 1.0).pow(2).sum()).backward()
        if number == 6:  # only the scaler's own
            scaler._found_inf_per_device(optimizer)  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            for found in scaler._found_inf_per_device(optimizer).values():  # type: ignore[no-untyped-call]
                found.fill_(1.0)
            bad = True
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
        assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (not bad)
    group.close()


@pytest.mark.parametrize("policy", [NonFinite.SKIP, NonFinite.RAISE])
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_a_backward_in_the_closure_of_a_step(policy: NonFinite, keyword: bool) -> None:
    """As Lightning calls it: the flag of that backward counts, not the one before."""
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=policy)
    optimizer = fused(ddp)
    ddp.attach_optimizer(optimizer)
    for number in range(9):
        before = [p.detach().clone() for p in ddp.parameters()]

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = ddp(inputs(0, number), math.nan if number in (3, 6) else 1.0).pow(2).sum()
            loss.backward()
            return loss.detach()

        raises = policy is NonFinite.RAISE and number in (4, 7)
        with pytest.raises(NonFiniteGradient, match="has not used it") if raises else contextlib.nullcontext():
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)  # type: ignore[arg-type]
            assert isinstance(loss, Tensor)
        moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert moved == (number not in (3, 6) and not raises)
        assert raises or not hasattr(optimizer, "found_inf")
    group.close()


@pytest.mark.parametrize("case", ["first two bad", "late parameter", "momentum later"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_momentum_is_never_left_uninitialized(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty_like is what fused SGD begins with, and a step that the device skips does not write to it."""
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, 1e30))
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    first, last = list(ddp.module.first.parameters()), list(ddp.module.last.parameters())
    groups = [{"params": first}, {"params": [*last, ddp.module.empty]}]
    start = 0.0 if case == "momentum later" else 0.9
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=start, fused=True)
    ddp.attach_optimizer(optimizer)
    for number in range(6):
        optimizer.zero_grad()
        if case == "momentum later" and number == 3:
            for one in optimizer.param_groups:
                one["momentum"] = 0.9
        bad = number in {"first two bad": (0, 1)}.get(case, (3,))
        step(ddp, 0, number, math.nan if bad else 1.0)
        if case == "late parameter" and number < 3:
            for p in first:
                p.grad = None
        optimizer.step()
        assert all(float(p.detach().abs().max()) < 100 for p in ddp.parameters() if p.numel())
    group.close()


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_an_optimizer_that_cannot_skip_any_more_is_waited_for() -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = fused(ddp)
    ddp.attach_optimizer(optimizer)
    for number in range(5):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        step(ddp, 0, number, math.nan if number == 3 else 1.0)
        if number == 3:
            for one in optimizer.param_groups:
                one["fused"] = None
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (number != 3)
    group.close()


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_one_optimizer_of_two_models() -> None:
    """Either model has it skip, and nothing of it is left on the optimizer."""
    (group,) = ThreadGroup.world(1)
    models = [DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP) for _ in range(2)]
    both = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.Adam(both, lr=0.05, fused=True)
    for model in models:
        model.attach_optimizer(optimizer)
    for number in range(10):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in both]
        bad = {3: models[0], 4: models[1], 7: models[1]}.get(number)
        for model in models:
            step(model, 0, number, math.nan if model is bad else 1.0)
        optimizer.step()
        assert not hasattr(optimizer, "found_inf")
        assert any(not torch.equal(a, b) for a, b in zip(before, both, strict=True)) == (bad is None)
    group.close()


def test_an_optimizer_whose_step_has_raised_keeps_nothing() -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = fused(ddp)
    ddp.attach_optimizer(optimizer)
    for number in range(3):
        optimizer.zero_grad()
        step(ddp, 0, number, math.nan if number == 2 else 1.0)
        if number < 2:
            optimizer.step()

    def closure() -> float:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        optimizer.step(closure)
    optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match="step 2"):
        step(ddp, 0, 3)
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    assert not hasattr(optimizer, "found_inf")
    group.close()


def _train(ddp: nn.Module, optimizer: torch.optim.Optimizer, *, bad: int) -> None:
    """Steps up to the bad one, whose optimizer's step is left to the caller."""
    for number in range(bad + 1):
        optimizer.zero_grad()
        step(ddp, 0, number, math.nan if number == bad else 1.0)
        if number < bad:
            optimizer.step()


def _finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


AFTER_BACKWARD: dict[str, Callable[[DDP, torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "attached again": lambda ddp, optimizer: _attached(ddp, optimizer),
    "detached": lambda ddp, optimizer: (ddp.replica.detach(), optimizer)[1],
    "another attached": lambda ddp, optimizer: _attached(ddp, fused(ddp)),
    "another, not attached": lambda ddp, optimizer: torch.optim.SGD(ddp.parameters(), lr=0.1),
    "another, of some parameters": lambda ddp, optimizer: torch.optim.SGD(list(ddp.parameters())[:1], lr=0.1),
}


@pytest.mark.parametrize("change", AFTER_BACKWARD.values(), ids=AFTER_BACKWARD)
def test_no_other_optimizer_uses_a_bad_step(change: Any) -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = _attached(ddp, fused(ddp))
    _train(ddp, optimizer, bad=3)
    before = [p.detach().clone() for p in ddp.parameters()]
    other = change(ddp, optimizer)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    for one in (optimizer, other):
        assert not hasattr(one, "found_inf")
    group.close()


@pytest.mark.parametrize("how", ["finish_checks", "dropped", "no_sync"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_steps_after_a_bad_one_are_made(how: str) -> None:
    """Whatever computes their gradients: the flag was for one step."""
    (group,) = ThreadGroup.world(1)
    module = Model()
    ddp = DDP(module, process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = _attached(ddp, fused(ddp))
    _train(ddp, optimizer, bad=3)
    optimizer.step()
    if how == "finish_checks":
        ddp.finish_checks()
    elif how == "dropped":
        del ddp
    for number in range(3):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in module.parameters()]
        with ddp.no_sync() if how == "no_sync" else contextlib.nullcontext():
            step(ddp if how == "no_sync" else module, 0, number)
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    group.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_a_compiled_step_of_the_optimizer_skips(backend: str) -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = _attached(ddp, fused(ddp))
    compiled = torch.compile(optimizer.step, backend=backend)
    for number in range(5):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        step(ddp, 0, number, math.nan if number == 3 else 1.0)
        compiled()
        assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (number != 3)
    torch._dynamo.reset()
    group.close()


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_what_a_step_without_an_optimizer_has_left_in_parameters_that_the_next_does_not_use() -> None:
    """It is not looked at with the next one's averages, and must not be used with them either."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool, factor: float) -> Tensor:
            out: Tensor = self.always(x)
            return out + self.sometimes(x) * factor if both else out

    (group,) = ThreadGroup.world(1)
    flags = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5}
    ddp = DDP(Two(), process_group=group, nonfinite=NonFinite.SKIP, **flags)  # type: ignore[arg-type]
    optimizer = _attached(ddp, fused(ddp))
    for number in range(6):
        optimizer.zero_grad()
        for both in (True, False):
            ddp(torch.ones(1, 4), both, math.nan if number == 3 else 1.0).sum().backward()
        optimizer.step()
    assert _finite(ddp)
    group.close()


def test_an_optimizer_attached_on_one_rank_only_is_waited_for() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        optimizer = fused(ddp)
        if group.rank == 0:
            ddp.attach_optimizer(optimizer)
        for number in range(6):
            optimizer.zero_grad()
            if number == 4:
                with pytest.raises(NonFiniteGradient, match="No average was written"):
                    step(ddp, group.rank, number, math.nan)
            else:
                step(ddp, group.rank, number)
                optimizer.step()

    run_ranks(rank_main, 2)


def test_an_optimizer_attached_in_the_middle_of_training() -> None:
    """Ranks ask each other again, in fewer and fewer steps."""
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(ddp)
    late = []
    for number in range(20):
        if number == 5:
            ddp.attach_optimizer(optimizer)
        optimizer.zero_grad()
        step(ddp, 0, number)
        late.append(ddp.reads_late)
        optimizer.step()
    assert late == [False] * 8 + [True] * 12
    ddp.finish_checks()
    assert not ddp.reads_late
    group.close()


def test_after_join_ranks_begin_again() -> None:
    """A rank that had no inputs has made no step; those that have must wait with it."""

    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        with ddp.join():
            for number in range(3 if group.rank == 0 else 0):
                optimizer.zero_grad()
                step(ddp, group.rank, number)
                optimizer.step()
        with ddp.join(enable=False):
            for number in range(3, 9):
                optimizer.zero_grad()
                step(ddp, group.rank, number, math.nan if number in (3, 6) and group.rank == 0 else 1.0)
                optimizer.step()
        assert _finite(ddp)
        ddp.finish_checks()
        assert ddp.skipped_steps == 2

    with pytest.warns(RuntimeWarning, match="step 3"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize("how", ["set_hook", "load_hook_state_dict"])
def test_what_replaces_the_states_reports_first(how: str) -> None:
    (group,) = ThreadGroup.world(1)
    model = Model()
    replica = replicate(model, group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(model)
    replica.attach_optimizer(optimizer)
    _train(model, optimizer, bad=3)
    optimizer.step()
    saved = replica.hook_state_dict()
    with pytest.raises(NonFiniteGradient, match="in step 3"):
        replica.set_hook(mean()) if how == "set_hook" else replica.load_hook_state_dict(saved)
    replica.detach()
    group.close()


class _Stateful(CommHook):
    """A mean that counts what it has seen."""

    passes_nonfinite = True
    collectives = 1

    def init(self, spec: BucketSpec) -> Any:
        return torch.zeros(1)

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        state += 1
        return (yield from mean().reduce(grad, None, turn))

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return {name: state.clone() for name in spec.names}


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_the_state_of_a_hook_is_restored() -> None:
    (group,) = ThreadGroup.world(1)
    model = Model()
    replica = replicate(model, group=group, hook=_Stateful(), nonfinite=NonFinite.SKIP)
    optimizer = fused(model)
    replica.attach_optimizer(optimizer)
    for number in range(5):
        optimizer.zero_grad()
        step(model, 0, number, math.nan if number == 3 else 1.0)
        optimizer.step()
    assert {float(part) for part in replica.hook_state_dict()["state"].values()} == {
        3.0
    }  # the first buckets are others
    replica.detach()
    group.close()


def test_the_first_parameter_in_a_model_of_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            out: Tensor = self.c(Scale.apply(self.b(self.a(x).double()), factor).float())
            return out

    (group,) = ThreadGroup.world(1)
    ddp = DDP(Mixed(), process_group=group, nonfinite=NonFinite.RAISE, bucket_cap_mb=1e-5)
    optimizer = _attached(ddp, fused(ddp))
    for number in range(5):
        optimizer.zero_grad()
        loss = ddp(torch.ones(1, 3), math.nan if number == 3 else 1.0).sum()
        if number == 4:
            with pytest.raises(NonFiniteGradient) as caught:
                loss.backward()
            assert caught.value.parameter == "b.bias"
        else:
            loss.backward()
            optimizer.step()
    group.close()


def test_a_rank_that_cannot_compile_makes_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a host without a C compiler; the others must not read results a step later than it."""
    calls: list[str] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            raise FileNotFoundError("gcc")

    broken = types.SimpleNamespace(TILE=eager_scan.TILE, find=eager_scan.find, detect=fail)
    monkeypatch.setattr(nonfinite_scan, "kernels", lambda module: broken)

    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        for number in range(5):
            optimizer.zero_grad()
            if number == 3:
                with pytest.raises(NonFiniteGradient, match="No average was written"):
                    step(ddp, group.rank, number, math.nan if group.rank == 0 else 1.0)
            else:
                step(ddp, group.rank, number)
                optimizer.step()

    with pytest.warns(RuntimeWarning, match=r"the host waits for the device in every step \(FileNotFoundError: gcc\)"):
        run_ranks(rank_main, 2)
    assert len(calls) == 2


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_group_with_a_new_rank_begins_again(bad: int) -> None:
    """A rank that has made no step yet waits; the others must wait with it, and read together from the next step on."""

    def rank_main(group: Group) -> None:
        model = Model()
        for p in model.parameters():
            p.data.fill_(0.01)
        (alone,) = ThreadGroup.world(1)
        replica = replicate(model, group=alone, nonfinite=NonFinite.RAISE)
        optimizer = fused(model)
        replica.attach_optimizer(optimizer)
        for number in range(3 if group.rank == 0 else 0):
            optimizer.zero_grad()
            step(model, 0, number)
            optimizer.step()
        replica.move_to_group(group)
        for number in range(4):
            optimizer.zero_grad()
            poison = math.nan if number == bad and group.rank == 1 else 1.0
            if number == bad + (bad > 0):
                with pytest.raises(NonFiniteGradient) as caught:
                    step(model, group.rank, number, poison)
                assert caught.value.rank == 1
            else:
                step(model, group.rank, number, poison)
                optimizer.step()
        replica.detach()

    run_ranks(rank_main, 2)


def test_an_optimizer_with_a_step_of_its_own_is_waited_for() -> None:
    class Mine(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        p -= 0.1 * p.grad

    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(ddp, Mine)
    ddp.attach_optimizer(optimizer)
    for number in range(3):
        optimizer.zero_grad()
        step(ddp, 0, number)
        optimizer.step()
    with pytest.raises(NonFiniteGradient, match="No average was written"):
        step(ddp, 0, 3, math.nan)
    group.close()


def test_a_pending_result_keeps_no_bucket() -> None:
    """Their memory is released at the end of backward, if it is allocated for each."""
    (group,) = ThreadGroup.world(1)
    model = Model()
    memory = Buckets(memory=BucketMemory.DURING_BACKWARD)
    replica = replicate(model, group=group, nonfinite=NonFinite.RECORD, buckets=memory)
    for number in range(3):
        model.zero_grad()
        step(model, 0, number)
    runner = replica.reducer.reductions.runner
    assert isinstance(runner, NonFiniteChecked)
    late = runner._late.take(replica.runner)
    assert late is not None
    held = [value for holder in (late.scan, runner) for value in vars(holder).values() if isinstance(value, list)]
    assert not any(isinstance(part, Tensor | GradBucket) for value in held for one in value for part in _parts(one))
    assert not runner._started
    replica.detach()
    group.close()


def _parts(one: object) -> tuple[object, ...]:
    return one if isinstance(one, tuple) else (one,)


def test_a_healthy_step_costs_no_collective() -> None:
    def rank_main(group: Group) -> None:
        counted = Recording(group)
        ddp = DDP(Model(), process_group=counted, nonfinite=NonFinite.RAISE)
        optimizer = fused(ddp)
        ddp.attach_optimizer(optimizer)
        counts = []
        for number in range(5):
            optimizer.zero_grad()
            before = len(counted.submitted)
            step(ddp, group.rank, number)
            optimizer.step()
            counts.append(len(counted.submitted) - before)
        assert set(counts[2:]) == {1}

    run_ranks(rank_main, 2)


def test_a_model_dropped_with_a_result_pending_is_freed_at_once() -> None:
    (group,) = ThreadGroup.world(1)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(ddp)
    ddp.attach_optimizer(optimizer)
    for number in range(3):
        step(ddp, 0, number)
        optimizer.step()
        optimizer.zero_grad()
    gone = weakref.ref(ddp)
    gc.collect()
    gc.disable()
    try:
        del ddp
        assert gone() is None, sys.getrefcount(gone())
    finally:
        gc.enable()
    optimizer.step()
    group.close()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_found_is_what_a_search_finds(data: st.DataObject) -> None:
    """Any elements of any parameters, in any layout of memory, kept in `.grad` or overwritten."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5))
    gradients = data.draw(st.sampled_from(list(Gradients)))
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    for p in model:
        if p.dim() > 1 and data.draw(st.booleans()):
            p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)
    if not any(p.numel() for p in model):
        return
    values = data.draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=3))
    bad: dict[int, tuple[int, float]] = {}
    for value in values:
        number = data.draw(st.sampled_from([k for k, p in enumerate(model) if p.numel()]))
        bad.setdefault(number, (data.draw(st.integers(0, model[number].numel() - 1)), value))
    keep = data.draw(st.booleans())
    (group,) = ThreadGroup.world(1)
    replica = replicate(model, group=group, nonfinite=NonFinite.RECORD, gradients=gradients)
    for turn in range(2):
        for p in model:
            if keep and p.grad is not None:
                p.grad.zero_()
            else:
                p.grad = None
        factors = [torch.ones(p.shape) for p in model]
        if turn == 1:
            for number, (place, value) in bad.items():
                factors[number].view(-1)[place] = value
        _loss(model, factors, replica).backward()
    runner = replica.reducer.reductions.runner
    late = runner._late.take(replica.runner)  # type: ignore[attr-defined]
    assert late.scan.wait()
    found, averages = late.scan.found()
    kinds = {k: Kind.NAN if math.isnan(v) else Kind.INFINITE for k, (_, v) in bad.items()}
    wanted = {(kinds[number], number, place) for number, (place, _) in bad.items()}
    assert set(found) == set(averages) == wanted
    replica.detach()
    group.close()


def _loss(model: nn.ParameterList, factors: list[Tensor], replica: Any) -> Tensor:
    replica.before_forward()
    total = sum(((2 * p) * f).sum() for p, f in zip(model, factors, strict=True))
    out: Tensor = replica.after_forward(total)
    return out


GRADS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "with gaps": lambda g: torch.stack([g, torch.full_like(g, math.nan)], dim=-1)[..., 0],
    "a view": lambda g: torch.cat([g.new_full((1,), math.nan), g.flatten()])[1:].view(g.shape),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("layout", GRADS.values(), ids=GRADS)
def test_gradients_in_other_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    """What lies between their elements, or before them, is not looked at."""
    (group,) = ThreadGroup.world(1)
    model = nn.Linear(3, 2, bias=False)
    replica = replicate(model, group=group, nonfinite=NonFinite.RAISE)
    optimizer = fused(model)
    replica.attach_optimizer(optimizer)
    for number in range(3):
        optimizer.zero_grad()
        replica.before_forward()
        factor = torch.ones(2, 3)
        if number == 1:
            factor[1, 2] = math.nan
            model.weight.grad = layout(
                torch.zeros(2, 3)
            ).detach()  # to which the gradient is added in place, if it can be
        if number == 2:
            with pytest.raises(NonFiniteGradient) as caught:
                replica.after_forward((2 * model.weight * factor).sum()).backward()
            assert (caught.value.parameter, caught.value.index) == ("weight", (1, 2))
        else:
            replica.after_forward((2 * model.weight * factor).sum()).backward()
            optimizer.step()
    group.close()


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_the_limit_of_a_dtype(narrow: torch.dtype) -> None:
    least = torch.tensor(nonfinite_scan.limit(narrow), dtype=torch.float32)
    assert float(least) == nonfinite_scan.limit(narrow)
    assert least.to(narrow).isinf()
    assert torch.nextafter(least, torch.tensor(0.0)).to(narrow).isfinite()
