"""Checks whose result the host reads one step later: which optimizers skip a bad step, and which are waited for."""

import contextlib
import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.autograd import optimizer_steps
from gradwire.errors import NonFiniteGradient
from gradwire.groups import Group, ThreadGroup
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.policies import NonFinite
from gradwire.reducer.checks import late as late_checks
from gradwire.testing import run_ranks
from helpers.late_checks import all_finite, attached, checked_model, fused, step, train_step, train_until
from helpers.poisoned_model import FLAGS, Model, inputs
from helpers.rank_tests import on_ranks

pytestmark = pytest.mark.usefixtures("emulate_device")


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


WAITS: dict[str, Any] = {
    "no optimizer": lambda ddp, params: None,
    "not attached": lambda ddp, params: torch.optim.Adam(params, fused=True),
    "not fused": lambda ddp, params: attached(ddp, torch.optim.Adam(params)),
    "not all parameters": lambda ddp, params: attached(ddp, torch.optim.Adam(params[:2], fused=True)),
    "cannot be fused": lambda ddp, params: attached(ddp, torch.optim.RMSprop(params)),
}


@pytest.mark.parametrize("make", WAITS.values(), ids=WAITS)
@on_ranks(2)
def test_without_an_optimizer_that_can_skip_the_same_backward_raises(group: Group, make: Any) -> None:
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


@on_ranks(2)
def test_a_step_that_the_attached_optimizer_may_not_make_is_waited_for(group: Group) -> None:
    """In the first step, and if it has not stepped since the last one: another may have taken its place."""
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = attached(ddp, fused(ddp, torch.optim.SGD, momentum=0.9))
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


def test_with_a_grad_scaler_either_skips_the_step(group: Group) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
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


@pytest.mark.parametrize("policy", [NonFinite.SKIP, NonFinite.RAISE])
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_a_backward_in_the_closure_of_a_step(group: Group, policy: NonFinite, keyword: bool) -> None:
    """As Lightning calls it: the flag of that backward counts, not the one before."""
    ddp, optimizer = checked_model(group, policy)
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


@pytest.mark.parametrize("case", ["first two bad", "late parameter", "momentum later"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_momentum_is_never_left_uninitialized(group: Group, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty_like is what fused SGD begins with, and a step that the device skips does not write to it."""
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, 1e30))
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


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_an_optimizer_that_cannot_skip_any_more_is_waited_for(group: Group) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
    for number in range(5):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        step(ddp, 0, number, math.nan if number == 3 else 1.0)
        if number == 3:
            for one in optimizer.param_groups:
                one["fused"] = None
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (number != 3)


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_one_optimizer_of_two_models(group: Group) -> None:
    """Either model has it skip, and nothing of it is left on the optimizer."""
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


def test_an_optimizer_whose_step_has_raised_keeps_nothing(group: Group) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
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


AFTER_BACKWARD: dict[str, Callable[[DDP, torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "attached again": lambda ddp, optimizer: attached(ddp, optimizer),
    "detached": lambda ddp, optimizer: (ddp.replica.detach(), optimizer)[1],
    "another attached": lambda ddp, optimizer: attached(ddp, fused(ddp)),
    "another, not attached": lambda ddp, optimizer: torch.optim.SGD(ddp.parameters(), lr=0.1),
    "another, of some parameters": lambda ddp, optimizer: torch.optim.SGD(list(ddp.parameters())[:1], lr=0.1),
}


@pytest.mark.parametrize("change", AFTER_BACKWARD.values(), ids=AFTER_BACKWARD)
def test_no_other_optimizer_uses_a_bad_step(group: Group, change: Any) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append("began"))  # torch iterates over ours and these
    optimizer.register_step_post_hook(lambda *_: steps.append("ended"))
    train_until(ddp, optimizer, bad=3)
    before = [p.detach().clone() for p in ddp.parameters()]
    other = change(ddp, optimizer)
    other.step()
    assert steps == ["began", "ended"] * (4 if other is optimizer else 3)
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    for one in (optimizer, other):
        assert not hasattr(one, "found_inf")


@pytest.mark.parametrize("how", ["finish_checks", "dropped", "no_sync"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_steps_after_a_bad_one_are_made(group: Group, how: str) -> None:
    """Whatever computes their gradients: the flag was for one step."""
    module = Model()
    ddp = DDP(module, process_group=group, nonfinite=NonFinite.SKIP)
    optimizer = attached(ddp, fused(ddp))
    train_until(ddp, optimizer, bad=3)
    optimizer.step()
    if how == "finish_checks":
        ddp.finish_checks()
        assert all(p.grad is None for p in module.parameters())  # none of the skipped step
    elif how == "dropped":
        del ddp
    for number in range(3):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in module.parameters()]
        with ddp.no_sync() if how == "no_sync" else contextlib.nullcontext():
            step(ddp if how == "no_sync" else module, 0, number)
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_a_compiled_step_of_the_optimizer_skips(group: Group, backend: str) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
    compiled = torch.compile(optimizer.step, backend=backend)
    for number in range(5):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        step(ddp, 0, number, math.nan if number == 3 else 1.0)
        compiled()
        assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (number != 3)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_what_a_step_without_an_optimizer_has_left_in_parameters_that_the_next_does_not_use(group: Group) -> None:
    """It is not looked at with the next one's averages, and must not be used with them either."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool, factor: float) -> Tensor:
            out: Tensor = self.always(x)
            return out + self.sometimes(x) * factor if both else out

    flags = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5}
    ddp = DDP(Two(), process_group=group, nonfinite=NonFinite.SKIP, **flags)  # type: ignore[arg-type]
    optimizer = attached(ddp, fused(ddp))
    for number in range(6):
        optimizer.zero_grad()
        for both in (True, False):
            ddp(torch.ones(1, 4), both, math.nan if number == 3 else 1.0).sum().backward()
        optimizer.step()
    assert all_finite(ddp)


def test_an_optimizer_with_a_step_of_its_own_is_waited_for(group: Group) -> None:
    class Mine(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        p -= 0.1 * p.grad

    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RAISE)
    optimizer = attached(ddp, fused(ddp, Mine))
    for number in range(3):
        train_step(ddp, optimizer, 0, number)
    with pytest.raises(NonFiniteGradient, match="No average was written"):
        step(ddp, 0, 3, math.nan)


def step_in_order(ddp: DDP, a: torch.optim.Optimizer, order: str) -> None:
    """Optimizer steps, in this order, on the same gradients: A is attached, B is not."""
    b = torch.optim.SGD(list(ddp.parameters())[:2], lr=0.1)
    for one in {"B, A": (b, a), "A, B": (a, b), "A, A": (a, a), "A, B, A": (a, b, a)}[order]:
        one.step()


@pytest.mark.parametrize("order", ["B, A", "A, B", "A, A", "A, B, A"])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_no_later_step_uses_bad_gradients(group: Group, order: str) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
    train_until(ddp, optimizer, bad=3)
    before = [p.detach().clone() for p in ddp.parameters()]
    step_in_order(ddp, optimizer, order)
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    optimizer.zero_grad()
    step(ddp.module, 0, 4)  # of no concern to the check: the flag is of other gradients
    step_in_order(ddp, optimizer, "A, B")
    assert not any(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True) if a.numel())
    assert all_finite(ddp)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_of_two_optimizers_one_has_begun_earlier(group: Group, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both skip a bad step, whichever of them is first in a round."""
    monkeypatch.setattr(late_checks, "on_device", lambda device: late)
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    parameters = list(ddp.parameters())
    first, second = (torch.optim.AdamW(some, fused=True) for some in (parameters[:2], parameters[2:]))
    ddp.attach_optimizer(first, second)
    for number in range(7):
        ddp.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        step(ddp, 0, number, math.nan if number == 5 else 1.0)
        if number:
            first.step()
        second.step()
        assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)) == (number == 5)
    assert (ddp.reads_late, ddp.skipped_steps) == (late, 1)


@pytest.mark.filterwarnings("ignore:averaging gradients")
def test_an_optimizer_that_is_not_attached_steps_with_a_closure(group: Group) -> None:
    ddp, optimizer = checked_model(group, NonFinite.SKIP)
    train_until(ddp, optimizer, bad=3)
    optimizer.step()
    other = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [p.detach().clone() for p in ddp.parameters()]

    def closure() -> float:
        other.zero_grad()
        step(ddp, 0, 4, math.nan)
        return 5.0

    assert other.step(closure) == 5.0
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))


def test_a_grad_scaler_of_an_optimizer_without_gradients(group: Group) -> None:
    """torch then sets found_inf to the int 0, not to a tensor."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.always(x) + (self.sometimes(x) if both else 0)

    ddp = DDP(Two(), process_group=group, nonfinite=NonFinite.SKIP, find_unused_parameters=True)
    optimizers = [fused(part) for part in (ddp.module.always, ddp.module.sometimes)]
    ddp.attach_optimizer(*optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(6):
        ddp.zero_grad()
        scaler.scale(ddp(torch.ones(1, 4), number != 4).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert ddp.reads_late


def test_what_a_grad_scaler_finds_after_a_step_that_has_raised(group: Group) -> None:
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
    extra = nn.Parameter(torch.ones(3))
    optimizer = attached(ddp, torch.optim.AdamW([*ddp.parameters(), extra], lr=0.05, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def refuse(*_: Any) -> None:
        if number == 3:
            raise torch.OutOfMemoryError("on purpose")

    optimizer.register_step_pre_hook(refuse)
    for number in range(6):
        optimizer.zero_grad()
        loss = ddp(inputs(0, number)).pow(2).sum() + (extra * (math.inf if number == 4 else 1.0)).sum()
        scaler.scale(loss).backward()
        try:
            scaler.step(optimizer)
        except torch.OutOfMemoryError:
            del optimizer.grad_scale  # type: ignore[attr-defined]
        scaler.update()
    assert ddp.reads_late
    assert bool(extra.isfinite().all())
    assert all_finite(ddp)


def test_models_that_are_gone_leave_no_hook() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    gc.collect()
    optimizer.step()  # takes out those of other tests
    before = len(optimizer_steps._before)
    for _ in range(3):
        (group,) = ThreadGroup.world(1)
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        train_until(ddp, attached(ddp, fused(ddp)), bad=3)
        group.close()
    assert len(optimizer_steps._before) > before
    del ddp
    gc.collect()
    optimizer.step()
    assert len(optimizer_steps._before) == before
