"""`NonFinite.SKIP` and RAISE: a step that is dropped leaves no trace in parameters, optimizers, hooks and records."""

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import observe
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups import Group
from gradwire.hooks import CommHook, chain, dgc, diloco, error_feedback, every, mean, power_sgd, quantize, top_k
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import NonFinite, ScaleCheck
from gradwire.recorder.format import RecordKind
from gradwire.testing import run_ranks
from helpers.poisoned_model import FLAGS, Model, inputs, means
from helpers.rank_tests import on_ranks
from helpers.recorded_warnings import recorded_warnings


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

    # Once, in the first step that is bad, on rank 0.
    warnings = recorded_warnings(tmp_path, rank_main, 2, match=r"on rank 1 .* Later ones are recorded only\.")
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
@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_not_a_wrong_scale(group: Group) -> None:
    model = Model()
    replica = replicate(model, group=group, nonfinite=NonFinite.RECORD, scale_check=ScaleCheck())
    for step in range(3):
        model.zero_grad()
        model(inputs(group.rank), math.nan if step == 1 and group.rank == 1 else 1.0).sum().backward()
        assert bool(model.first.weight.grad.isfinite().all()) == (step != 1)
    replica.detach()


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
@on_ranks(2)
def test_a_rank_without_inputs_takes_part(group: Group, policy: NonFinite) -> None:
    """Its own gradients are left from its last step, and nobody's concern."""
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


def test_skipped_steps_are_counted_and_many_in_a_row_are_shown() -> None:
    def rank_main(group: Group) -> None:
        ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)
        for step in range(35):
            ddp.zero_grad()
            bad = step == 2 or step >= 20
            ddp(inputs(group.rank), math.nan if bad and group.rank == 1 else 1.0).sum().backward()
            assert ddp.skipped_steps == (step >= 2) + max(0, step - 19)
        assert DDP(Model(), process_group=group).skipped_steps == 0

    with pytest.warns(RuntimeWarning) as caught:
        run_ranks(rank_main, 2)
    first, many = (str(warning.message) for warning in caught)
    assert first.endswith("Later ones are recorded only.")
    assert many.startswith(
        "10 steps in a row were skipped, so the model no longer trains. The last one: averaging gradients in step 29"
    )


def test_a_skipped_step_is_a_warning_at_the_line_of_the_program_and_no_failure(group: Group, tmp_path: Path) -> None:
    ddp = DDP(Model(), process_group=group, nonfinite=NonFinite.SKIP)

    def train() -> None:
        for step in range(3):
            ddp.zero_grad()
            ddp(inputs(0, step), math.nan if step == 1 else 1.0).sum().backward()

    observe.start(tmp_path, rank=0, size=1)
    try:
        with pytest.warns(RuntimeWarning, match="The step is skipped") as caught:
            train()
    finally:
        observe.stop()
    assert caught[0].filename == __file__
    rings = observe.read_rings(tmp_path)
    kinds = [record.kind for ring in rings for record in ring.records]
    assert RecordKind.STEP_FAILED not in kinds
    assert kinds.count(RecordKind.STEP_ENDED) == 3
    assert [warning.step for warning in observe.read_warnings(rings)] == [1]
