"""Checks whose result the host reads one step later: what is found and reported.

The device is emulated on the host: see `helpers/late_checks.py`. tests/gpu has the same on CUDA.
"""

import gc
import math
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from gradwire.collectives.finite import overflow_limit
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import BucketSpec, CommHook, Reduction, Turn, cast, chain, error_feedback, mean, top_k
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import BucketMemory, Buckets, Gradients, NonFinite
from gradwire.reducer.checks.late import LateCheck
from gradwire.reducer.checks.nonfinite import NonFiniteChecked
from gradwire.reducer.checks.nonfinite_search import NonFiniteKind
from helpers.late_checks import all_finite, attached, checked_model, fused, step, train_step, train_until
from helpers.poisoned_model import FLAGS, Model, Scale, means
from helpers.rank_tests import on_ranks
from helpers.recorded_warnings import recorded_warnings

pytestmark = pytest.mark.usefixtures("emulate_device")


@pytest.mark.parametrize("keep", [False, True], ids=["set_to_none", "kept"])
@pytest.mark.parametrize("place", range(len(FLAGS)), ids=FLAGS)
@on_ranks(3)
def test_the_next_backward_raises_with_rank_and_parameter(group: Group, place: int, keep: bool) -> None:
    flags, value = list(FLAGS.values())[place], (math.nan, -math.inf)[(place + keep) % 2]  # every pair of the three
    ddp, optimizer = checked_model(group, NonFinite.RAISE, **flags)
    for number in range(7):
        optimizer.zero_grad(set_to_none=not keep)
        before = [p.detach().clone() for p in ddp.parameters()]
        if number == 4:  # after the bad one
            with pytest.raises(NonFiniteGradient, match="The optimizer has not used it") as caught:
                step(ddp, group.rank, number)
            error = caught.value
            assert (error.rank, error.origin, error.step) == (1, Origin.GRADIENT, 3)
            assert error.parameter in ("first.weight", "first.bias")
            assert error.index is None  # the gradients are gone
            continue
        step(ddp, group.rank, number, value if number == 3 and group.rank == 1 else 1.0)
        if number != 3:
            for p, want in zip(ddp.parameters(), means(ddp.module, group.size, number), strict=True):
                torch.testing.assert_close(p.grad, want, rtol=0.1, atol=0.1)
        optimizer.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert moved == (number != 3)
    assert group.failure is None


@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
@on_ranks(2)
def test_overflows(group: Group, gradients: Gradients) -> None:
    """Of one rank's gradient in float16, and of a sum that no rank's gradient explains."""
    for hook, scale, ranks, rank in ((chain(cast(torch.float16), mean()), 1e9, (1,), 1), (mean(), 3e38, (0, 1), None)):
        model = nn.Linear(1, 1, bias=False)
        replica = replicate(model, group=group, hook=hook, nonfinite=NonFinite.RAISE, gradients=gradients)
        optimizer = attached(replica, fused(model, torch.optim.SGD))
        for number in range(3):
            optimizer.zero_grad()
            bad = number == 1 and group.rank in ranks
            loss = model(torch.full((1, 1), scale if bad else 1.0)).sum()
            if number == 2:
                with pytest.raises(NonFiniteGradient) as caught:
                    loss.backward()
                assert (caught.value.rank, caught.value.origin) == (rank, Origin.OVERFLOW)
                assert (caught.value.parameter, caught.value.index) == ("weight", None)
            else:
                loss.backward()
                optimizer.step()
        replica.detach()


def test_recorded_gradients_need_no_optimizer(tmp_path: Path) -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.RECORD)
        for number in range(5):
            ddp.zero_grad()
            step(ddp, group.rank, number, math.nan if number in (1, 4) and group.rank == 1 else 1.0)
        ddp.finish_checks()
        ddp.finish_checks()

    found = recorded_warnings(tmp_path, rank_main, 2, match=r"on rank 1 .* Later ones are recorded only\.")
    assert [warning.step for warning in found] == [1, 4]


@pytest.mark.parametrize("policy", [NonFinite.RAISE, NonFinite.SKIP])
@on_ranks(2)
def test_the_last_step_is_reported_by_finish_checks(group: Group, policy: NonFinite) -> None:
    ddp, optimizer = checked_model(group, policy)
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
    train_step(ddp, optimizer, group.rank, 3)
    ddp.finish_checks()


@on_ranks(2)
def test_a_hook_that_may_hide_a_nan_is_waited_for(group: Group) -> None:
    model = Model()
    hook = chain(error_feedback(), top_k(ratio=0.5))
    replica = replicate(model, group=group, hook=hook, nonfinite=NonFinite.RAISE)
    optimizer = attached(replica, fused(model))
    for number in range(3):
        model.zero_grad()
        if number == 2:
            with pytest.raises(NonFiniteGradient, match="No average was written"):
                step(model, group.rank, number, math.nan if group.rank else 1.0)
        else:
            step(model, group.rank, number)
            optimizer.step()
    replica.detach()


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.filterwarnings("ignore:averaging gradients")
@on_ranks(2)
def test_a_loop_that_does_not_zero_gradients_goes_on_after_a_skipped_step(group: Group, flags: Any) -> None:
    """NaN stays in `.grad` until the host reads the flag, one step later: that step is lost too, and no other."""
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP, **flags)
    optimizer = attached(ddp, fused(ddp, torch.optim.SGD))
    skipped = []
    for number in range(8):
        before = [p.detach().clone() for p in ddp.parameters()]
        step(ddp, group.rank, number, math.nan if number == 3 and group.rank == 1 else 1.0)
        optimizer.step()
        if all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)):
            skipped.append(number)
        else:
            optimizer.zero_grad()
    assert skipped == [3, 4]
    assert ddp.skipped_steps == 2
    assert all_finite(ddp)


@pytest.mark.parametrize("how", ["set_hook", "load_hook_state_dict"])
def test_what_replaces_the_states_reports_first(group: Group, how: str) -> None:
    model = Model()
    replica = replicate(model, group=group, nonfinite=NonFinite.RAISE)
    optimizer = attached(replica, fused(model))
    train_until(model, optimizer, bad=3)
    optimizer.step()
    saved = replica.hook_state_dict()
    with pytest.raises(NonFiniteGradient, match="in step 3"):
        replica.set_hook(mean()) if how == "set_hook" else replica.load_hook_state_dict(saved)
    replica.detach()


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
def test_the_state_of_a_hook_is_restored(group: Group) -> None:
    model = Model()
    replica = replicate(model, group=group, hook=_Stateful(), nonfinite=NonFinite.SKIP)
    optimizer = attached(replica, fused(model))
    for number in range(5):
        train_step(model, optimizer, 0, number, math.nan if number == 3 else 1.0)
    assert {float(part) for part in replica.hook_state_dict()["state"].values()} == {
        3.0
    }  # the first buckets are others
    replica.detach()


def test_the_first_parameter_in_a_model_of_several_dtypes(group: Group) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            out: Tensor = self.c(Scale.apply(self.b(self.a(x).double()), factor).float())
            return out

    ddp = DDP(Mixed(), process_group=group, nonfinite=NonFinite.RAISE, bucket_cap_mb=1e-5)
    optimizer = attached(ddp, fused(ddp))
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


def test_a_pending_result_keeps_no_bucket(group: Group) -> None:
    """Their memory is released at the end of backward, if it is allocated for each."""
    model = Model()
    memory = Buckets(memory=BucketMemory.DURING_BACKWARD)
    replica = replicate(model, group=group, nonfinite=NonFinite.RECORD, buckets=memory)
    for number in range(3):
        model.zero_grad()
        step(model, 0, number)
    held = [number for look in _pending(replica).check._before for number in look.norms]
    assert len(held) == 5
    assert all(number.untyped_storage().nbytes() <= 64 for number in held)
    replica.detach()


@on_ranks(2)
def test_a_healthy_step_costs_no_collective(group: Group) -> None:
    counted = Recording(group)
    ddp = DDP(Model(), process_group=counted, nonfinite=NonFinite.RAISE)
    optimizer = attached(ddp, fused(ddp))
    counts = []
    for number in range(5):
        optimizer.zero_grad()
        before = len(counted.submitted)
        step(ddp, group.rank, number)
        optimizer.step()
        counts.append(len(counted.submitted) - before)
    assert set(counts[2:]) == {1}


def test_a_model_dropped_with_a_result_pending_is_freed_at_once(group: Group) -> None:
    ddp, optimizer = checked_model(group, NonFinite.RAISE)
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


@settings(max_examples=40)
@given(data=st.data())
def test_the_right_parameters_are_found(data: st.DataObject) -> None:
    """Of any shape, in any layout of memory, kept in `.grad` or overwritten."""
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
    late = _pending(replica)
    assert late.is_bad()
    found, averages = late.check.released()
    kinds = {k: NonFiniteKind.NAN if math.isnan(v) else NonFiniteKind.INFINITE for k, (_, v) in bad.items()}
    assert set(found) == {(kinds[number], number, None) for number in bad}
    assert averages
    replica.detach()
    group.close()


def _pending(replica: Any) -> LateCheck:
    runner = replica.reducer.reductions.runner
    assert isinstance(runner, NonFiniteChecked)
    late = runner._late.take(replica.runner)
    assert late is not None
    return late


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
def test_gradients_in_other_layouts(group: Group, layout: Callable[[Tensor], Tensor]) -> None:
    """What lies between their elements, or before them, is not examined."""
    model = nn.Linear(3, 2, bias=False)
    replica = replicate(model, group=group, nonfinite=NonFinite.RAISE)
    optimizer = attached(replica, fused(model))
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
            assert caught.value.parameter == "weight"
        else:
            replica.after_forward((2 * model.weight * factor).sum()).backward()
            optimizer.step()


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_the_limit_of_a_dtype(narrow: torch.dtype) -> None:
    least = torch.tensor(overflow_limit(narrow), dtype=torch.float32)
    assert float(least) == overflow_limit(narrow)
    assert least.to(narrow).isinf()
    assert torch.nextafter(least, torch.tensor(0.0)).to(narrow).isfinite()
