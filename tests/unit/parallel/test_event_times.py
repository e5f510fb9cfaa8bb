"""Events have the time at which things happened, and listening to them changes nothing."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.events import BucketLaunched, BucketReduced, Emitter, Event, GradientReady, StepEnded
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from helpers.backward_calls import in_backward
from helpers.rank_tests import on_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(in_backward(self.a(x), self.note_time))
        return out

    def note_time(self) -> None:
        self.between = time.perf_counter()


@pytest.mark.parametrize("flags", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("steps_before", [1, 15])
@pytest.mark.parametrize("none", [True, False])
@on_ranks(1)
def test_a_gradient_is_ready_and_its_bucket_launched_before_what_comes_next(
    group: Group, steps_before: int, none: bool, flags: dict[str, Any]
) -> None:
    ddp = DDP(Model(), process_group=group, bucket_cap_mb=1e-6, **flags)
    times: dict[Any, float] = {}

    def note(event: Any) -> None:
        if isinstance(event, GradientReady):
            times["ready", event.parameter] = event.time
        elif isinstance(event, BucketLaunched):
            times["launched", event.bucket] = event.time

    for i in range(steps_before + 3):
        if i == steps_before:
            ddp.replica.reducer.events.listen(note)
        ddp.zero_grad(set_to_none=none)
        ddp(torch.ones(1, 2)).sum().backward()
        if i >= steps_before:
            assert times["ready", "b.weight"] < ddp.module.between < times["ready", "a.weight"]
            if ddp.replica.reducer.order.rebuilt or "find_unused_parameters" in flags:
                assert times["launched", 0] < ddp.module.between < times["launched", 1]


@on_ranks(2)
def test_a_reduced_bucket_is_back_in_grad(group: Group) -> None:
    ddp = DDP(Model(), process_group=group, bucket_cap_mb=1e-6)
    seen: list[Any] = []

    def note(event: Any) -> None:
        if isinstance(event, (BucketReduced, StepEnded)):
            names = ddp.replica.reducer.layout.buckets[event.bucket].names if isinstance(event, BucketReduced) else ()
            seen.append([ddp.module.get_parameter(name).grad.clone() for name in names])

    for i in range(3):
        ddp.zero_grad()
        seen.clear()
        handle = ddp.replica.reducer.events.listen(note)
        ddp(torch.full((1, 2), float(i + group.rank))).sum().backward()
        handle.remove()
        averages = [g for gradients in seen for g in gradients]
        parameters = list(ddp.parameters())
        expected = [parameters[k].grad for bucket in ddp.replica.reducer.layout.members for k in bucket]
        assert all(map(torch.equal, averages, expected))
        assert len(averages) == 2


def test_a_listener_that_raises_is_warned_about_once() -> None:
    events = Emitter()

    def broken(event: Event) -> None:
        raise KeyError("here")

    events.listen(broken)
    with pytest.warns(UserWarning, match=r"broken.* raised KeyError: 'here'"):
        events.emit(Event(1.0))
    events.emit(Event(2.0))  # would be an error if it warned
    assert len(events.errors) == 2
