"""On a GPU the engine runs nodes on a thread per device: hooks, the end of a backward and its failure are reported there."""

from typing import Any

import pytest
import torch
from torch import nn

from gradwire.autograd import GradHooks, at_backward_end, on_grad
from gradwire.autograd.user_hooks.attach import attach
from gradwire.errors import AutogradHookError
from helpers.backward_calls import fail_in_backward

pytestmark = pytest.mark.gpu


class Mixed(nn.Module):
    """Parameters on both devices."""

    def __init__(self) -> None:
        super().__init__()
        self.host = nn.Linear(4, 4)
        self.device = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.device(self.host(x).cuda())


class Owner:
    """Records which gradients call, and the end of their backward, as a reducer does."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.events: list[Any] = []
        self.hooks = GradHooks(params, self.ready)

    def ready(self) -> None:
        if "end" not in self.events and not any(isinstance(e, int) for e in self.events):
            at_backward_end(self.ended, failed=self.failed)
        self.events += self.hooks.pop()

    def ended(self) -> None:
        self.events.append("end")

    def failed(self) -> None:
        self.events.append("failed")


def test_ready_then_end() -> None:
    model = Mixed()
    owner = Owner(list(model.parameters()))
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        assert sorted(e for e in owner.events if e != "end") == list(range(6))
        assert "end" in owner.events
        owner.events.clear()


def test_only_a_few_call_and_the_others_are_noted() -> None:
    model = Mixed()
    params = list(model.parameters())
    owner = Owner(params)
    owner.hooks.select([0])
    model(torch.ones(2, 4)).sum().backward()
    assert [e for e in owner.events if e != "end"][-1] == 0
    assert sorted([e for e in owner.events if e != "end"] + owner.hooks.pop()) == list(range(len(params)))
    owner.hooks.remove()
    owner.events.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert owner.events == []


def test_a_failure_is_known_when_backward_has_raised() -> None:
    a, b = (torch.ones(4, device="cuda", requires_grad=True) for _ in range(2))
    owner = Owner([a, b])
    for _ in range(20):
        with pytest.raises(ValueError, match="on the way"):
            (fail_in_backward(b * 1, ValueError, "on the way") * a).sum().backward()
        assert owner.events == [0, "failed"]
        owner.events.clear()
        (a * b).sum().backward()
        assert sorted(map(str, owner.events)) == ["0", "1", "end"]
        owner.events.clear()


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
