"""An exception under `model.join()` ends the context on every rank at once, wherever a rank is: training, or out of inputs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import kinds, run_ranks
from gradwire.testing.mpi import missing

FAILING = 1
PLACES = ("data loader", "between forward and backward", "after backward", "under no_sync")


class Reader:
    """A data loader that cannot read its third batch on one rank."""

    def __init__(self, rank: int, batches: int, place: str) -> None:
        self.rank, self.batches, self.place = rank, batches, place

    def check(self, place: str, step: int) -> None:
        if (place, step, self.rank) == (self.place, 2, FAILING):
            raise ValueError("bad file")

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for step in range(self.batches):
            self.check("data loader", step)
            yield step, torch.full((1, 1), float(step + self.rank))


def train(ddp: DDP, rank: int, batches: int, place: str = "") -> None:
    reader = Reader(rank, batches, place)
    with ddp.join():
        for step, batch in reader:
            ddp.zero_grad()
            if place == "under no_sync":
                with ddp.no_sync():
                    ddp(batch).sum().backward()
                    reader.check(place, step)
            loss = ddp(batch).sum()
            reader.check("between forward and backward", step)
            loss.backward()
            reader.check("after backward", step)


def fail_and_go_on(ddp: DDP, group: Group, place: str) -> tuple[str, float]:
    """The error that this rank got, and the gradient of a step after that."""
    batches = 1 if group.rank == 0 else 5  # rank 0 has run out of inputs when rank 1 fails
    with pytest.raises((ValueError, gw.GroupAborted)) as caught:
        train(ddp, group.rank, batches, place)
    outcome = f"{type(caught.value).__name__}: {caught.value}"
    del caught  # a cycle through this frame, which would keep the model and its group
    train(ddp, group.rank, 2)
    assert ddp.module.weight.grad is not None
    return outcome, ddp.module.weight.grad.item()


def check(outcome: list[tuple[str, float]]) -> None:
    for rank, (error, gradient) in enumerate(outcome):
        if rank == FAILING:
            assert error == "ValueError: bad file"
        else:
            assert error.startswith("GroupAborted")
            assert f"failed on rank {FAILING} with ValueError: bad file" in error
        assert gradient == 2.0  # 1, 2 and 3 in the last step


def linear() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


@pytest.mark.parametrize("place", PLACES)
def test_every_place(place: str) -> None:
    def rank_main(group: Group) -> Any:
        return fail_and_go_on(DDP(linear(), process_group=group), group, place)

    check(run_ranks(rank_main, 3))


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_of_group(kind: str) -> None:
    if kind == "mpi" and missing() is not None:
        pytest.skip(str(missing()))

    def rank_main(group: Group) -> Any:
        return fail_and_go_on(DDP(linear(), process_group=group), group, "data loader")

    check(run_ranks(rank_main, 3, kind=kind))


@pytest.mark.parametrize("buffer", [False, True], ids=["", "buffer"])
def test_torchs_process_group(torch_world: Callable[..., Any], buffer: bool) -> None:
    def rank_main(group: Group) -> Any:
        with torch_world(group, "gloo"):
            model = linear()
            if buffer:
                model.register_buffer("seen", torch.zeros(3))
            return fail_and_go_on(DDP(model), group, "data loader")

    check(run_ranks(rank_main, 3, kind="gloo"))


def test_a_step_that_failed_and_was_caught_inside_is_recovered_from() -> None:
    def rank_main(group: Group) -> list[str]:
        ddp, story = DDP(linear(), process_group=group), []
        with ddp.join():
            for step in range(5):
                ddp.zero_grad()
                try:
                    x = torch.full((1, 1 + (step == 2 and group.rank == 1)), float(step + group.rank))
                    ddp(x).sum().backward()
                except RuntimeError as error:
                    story.append(type(error).__name__)
                else:
                    story.append(f"{ddp.module.weight.grad.item():g}")
        return story

    first, second = run_ranks(rank_main, 2)
    assert first == ["0.5", "1.5", "GroupAborted", "3.5", "4.5"]
    assert second == ["0.5", "1.5", "RuntimeError", "3.5", "4.5"]


def test_without_effect_where_join_is_disabled() -> None:
    def rank_main(group: Group) -> bool:
        ddp = DDP(linear(), process_group=group)
        with pytest.raises(ValueError, match="bad file"), ddp.join(enable=False):
            raise ValueError("bad file")
        return group.failure is None

    assert run_ranks(rank_main, 2) == [True, True]


@pytest.mark.parametrize("kind", kinds())
def test_one_step_more_points_to_join(kind: str) -> None:
    if kind == "mpi" and missing() is not None:
        pytest.skip(str(missing()))

    def rank_main(group: Group) -> str | None:
        model = gw.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if group.rank != 1:
            group.close()
            return None
        with pytest.raises(gw.PeerLost) as caught:
            model(torch.ones(1, 2)).sum().backward()
        return str(caught.value)

    outcome = run_ranks(rank_main, 2, kind=kind)[1]
    assert "fewer batches" in outcome
    assert "model.join()" in outcome
