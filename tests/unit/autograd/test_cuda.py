"""On a GPU the engine runs nodes on a thread per device: hooks, the end of a backward and its failure come from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd import GradReady, attach, on_grad
from gradwire.errors import AutogradHookError

pytestmark = pytest.mark.gpu


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("on the way")


class Mixed(nn.Module):
    """Parameters on both devices."""

    def __init__(self) -> None:
        super().__init__()
        self.host = nn.Linear(4, 4)
        self.device = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.device(self.host(x).cuda())


def watch(params: list[torch.Tensor]) -> tuple[GradReady, list[Any]]:
    events: list[Any] = []
    ready = GradReady(
        params,
        events.append,
        on_backward_end=lambda: events.append("end"),
        on_interrupted=lambda: events.append("interrupted"),
    )
    return ready, events


def test_ready_then_end() -> None:
    model = Mixed()
    ready, events = watch(list(model.parameters()))
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        assert sorted(events[:-1]) == list(range(6))
        assert events[-1] == "end"
        assert not ready.interrupted
        events.clear()


def test_reentrant_checkpoints_end_once() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    ready, events = watch(list(inner.parameters()))

    def level(depth: int, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: level(depth - 1, x), x, use_reentrant=True) if depth else inner(x)

    for depth in (1, 3):
        level(depth, torch.ones(2, 4, device="cuda", requires_grad=True)).sum().backward()
        assert sorted(events[:-1]) == [0, 1, 2, 3]
        assert events[-1] == "end"
        assert not ready.interrupted
        events.clear()


def test_an_interruption_is_known_when_backward_has_raised() -> None:
    a, b = (torch.ones(4, device="cuda", requires_grad=True) for _ in range(2))
    ready, events = watch([a, b])
    for _ in range(20):
        with pytest.raises(ValueError, match="on the way"):
            (Fail.apply(b * 1) * a).sum().backward()
        assert ready.interrupted
        (a * b).sum().backward()
        assert events[:2] == [0, "interrupted"]
        assert sorted(map(str, events[2:])) == ["0", "1", "end"]
        events.clear()


@pytest.mark.parametrize("kind", ["on_grad", "before_node", "after_node", "after_accumulate"])
def test_every_kind_runs_and_names_its_parameter(kind: str) -> None:
    model, calls = Mixed(), []
    attach(model, "*", kind, lambda *args: calls.append(1))
    model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == 6


def test_a_change_of_device_is_refused() -> None:
    w = torch.ones(4, device="cuda", requires_grad=True)
    on_grad(w, lambda grad: grad.cpu())
    with pytest.raises(AutogradHookError, match=r"was torch.cuda.FloatTensor got torch.FloatTensor"):
        (w * 2).sum().backward()
