"""Loops that people write: an elastic run, in which members change twice, has the bits of a plain loop over the same batches."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.elasticity.deal import fixed_hash

SLOTS, STEPS = 4, 12


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 8, generator=numbers), torch.randn(64, 1, generator=numbers))


class Loop:
    """A model and what belongs to it: gradients are clipped, the rate has a schedule, and an evaluation follows each step."""

    def __init__(self, *, compiled: bool, mixed: bool) -> None:
        torch.manual_seed(0)
        hidden = (nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
        self.model = nn.Sequential(nn.Linear(8, 16), *hidden, nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.rates = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=STEPS + 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=mixed)  # the first steps overflow
        self.mixed, self.net = mixed, torch.compile(self.model, backend="aot_eager") if compiled else self.model
        self.losses: list[float] = []

    def backward(self, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", enabled=self.mixed):
            loss = mse_loss(self.net(x).float(), y)
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.rates.step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.losses.append(float(mse_loss(self.net(data().tensors[0]), data().tensors[1])))
        self.model.train()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_bits_of_a_plain_loop(compiled: bool, mixed: bool) -> None:
    plain, ours = Loop(compiled=compiled, mixed=mixed), Loop(compiled=compiled, mixed=mixed)
    deal = gw.Deal(data(), global_batch=16, slots=SLOTS, seed=0)
    for step in range(STEPS):
        plain.optimizer.zero_grad()
        for slot in range(SLOTS):
            torch.manual_seed(fixed_hash(0, step, slot))
            plain.backward(*deal.batch(step, slot))
        for parameter in plain.model.parameters():
            parameter.grad.div_(SLOTS)  # type: ignore[union-attr]
        plain.update()
        plain.evaluate()

    register: dict[str, Any] = {"rates": ours.rates, "scaler": ours.scaler}
    changes, graphs = [3, 7], torch._dynamo.utils.counters["stats"]
    begins = {"update": ours.update, "register": register, "warm_up": lambda: ours.backward(*deal.batch(5, 0))}
    with gw.elastic(ours.model, ours.optimizer, data=deal, steps=STEPS, **begins) as run:
        warm = graphs["unique_graphs"]
        for step in run:
            for x, y in step:
                ours.backward(x, y)
                assert graphs["unique_graphs"] - warm <= (step.number > 0), "the first step compiles nothing"
            if step.number in changes:
                changes.remove(step.number)
                run.performer.lost()  # the step is computed again
            if step.commit():
                ours.evaluate()
    assert run.view.epoch == 2
    assert ours.losses == plain.losses
    assert all(map(torch.equal, ours.model.state_dict().values(), plain.model.state_dict().values()))
    assert ours.rates.state_dict() == plain.rates.state_dict()
    assert ours.scaler.state_dict() == plain.scaler.state_dict()
    assert not mixed or ours.scaler.get_scale() < 2.0**127
