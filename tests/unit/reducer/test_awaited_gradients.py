"""Which gradients a model waits for, asked in the middle of a backward, in every mode."""

import gc
import os

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import observe
from gradwire.observe.hangs.gradient_questions import Awaited
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.reducer.intake.intake import awaited_gradients
from helpers.backward_calls import in_backward


class Scale(nn.Module):
    """Its two gradients are accumulated before its backward continues below."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return torch.addcmul(self.bias, x, self.weight)


class Stacked(nn.Module):
    """Three layers; backward calls `call` when the gradients of the third are there."""

    def __init__(self, call, unused=False):
        super().__init__()
        self.first, self.second, self.third = Scale(), Scale(), Scale()
        if unused:
            self.unused = Scale()
        self.call = call

    def forward(self, x):
        return self.third(in_backward(self.second(self.first(x)), self.call))


@pytest.fixture
def group():
    gc.collect()  # models of other tests
    [group] = gw.ThreadGroup.world(1, name="one")
    yield group
    group.close()


def mine(found):
    return [(one["bucket"], sorted(one["missing"])) for one in found if one["group"] == "one"]


STEPS = 16
"""DDP listens to events in the first ten, for its logging data, and then every gradient calls."""
BELOW = ["first.bias", "first.weight", "second.bias", "second.weight"]


@pytest.mark.parametrize(
    ("set_to_none", "flags"),
    [
        (True, {}),
        (False, {"gradient_as_bucket_view": True}),
        (True, {"find_unused_parameters": True}),
        (True, {"static_graph": True}),
    ],
)
def test_only_those_that_have_not_arrived_are_missing(group, set_to_none, flags):
    seen = []
    model = Stacked(lambda: seen.append(mine(awaited_gradients())))
    ddp = gw.DistributedDataParallel(model, process_group=group, **flags)
    for _ in range(STEPS):
        ddp(torch.ones(2, 4)).sum().backward()
        assert mine(awaited_gradients()) == []  # nothing is expected between steps
        ddp.zero_grad(set_to_none=set_to_none)
    assert seen == [[(0, BELOW)]] * STEPS


def test_a_parameter_without_a_gradient_is_named_after_backward_has_ended(group):
    ddp = gw.DistributedDataParallel(Stacked(lambda: None, unused=True), process_group=group)
    ddp(torch.ones(2, 4)).sum().backward()
    assert mine(awaited_gradients()) == [(0, ["unused.bias", "unused.weight"])]
    del ddp
    gc.collect()
    assert mine(awaited_gradients()) == []


def test_the_last_bucket_waits_for_the_end_of_backward(group):
    """All gradients are there, and the one that called is followed by a node of the graph."""
    seen = []
    ddp = gw.DistributedDataParallel(Scale(), process_group=group)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        ddp(in_backward(x, lambda: seen.append(mine(awaited_gradients())))).sum().backward()
        ddp.zero_grad()
    assert seen == [[(0, [])]] * 3


def test_the_process_answers_from_another_thread(group, tmp_path):
    """As a hang report asks it: over the process, while the main thread is in backward."""
    seen = []
    observe.start(tmp_path, rank=0, size=1)
    run = RunFollower(tmp_path)

    def ask():
        run.look()
        seen.append(run.ask(run.ranks.values(), within=60.0)())

    try:
        ddp = gw.DistributedDataParallel(Stacked(ask), process_group=group)
        for _ in range(4):
            ddp(torch.ones(2, 4)).sum().backward()
            ddp.zero_grad()
    finally:
        run.close()
        observe.stop()
    for step, answers in enumerate(seen):
        [answer] = [one for one in answers[0] if one.group_id == group.ledger.events.group_id]
        assert answer == Awaited(group.ledger.events.group_id, 1, 0, step, 0, answer.missing)
        assert sorted(answer.missing) == BELOW
    run = RunFollower(tmp_path)
    run.look()
    [how] = run.ranks[0].descriptions["questions"]
    reader, writer = os.pipe()
    if how["descriptor"] not in (reader, writer):
        os.dup2(writer, how["descriptor"])  # a file of the user's may have the number now
    os.set_blocking(reader, False)
    assert run.ask(run.ranks.values(), within=0.0)() == {}  # nothing listens any more
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)  # and nothing was written there
    for fd in {reader, writer, how["descriptor"]}:
        os.close(fd)
    run.close()
