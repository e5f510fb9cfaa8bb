"""A member receives the state while the others train; members are threads, and each fault comes at each place of a join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.elasticity import stream
from gradwire.elasticity.run import ElasticRun
from helpers.elastic_threads import Threads, alone, check
from helpers.waiting import wait_until

BEGINS, FOLLOWS = 3, 4
"""The step in which a joiner is started, and how many it keeps before the state is sent."""


class Streams(Threads):
    """The joiners that `join` names are in the view before step 4, and training goes on until all of them have computed 3 steps."""

    joiners: tuple[str, ...] = ("joiner",)
    first = "a"
    sent = 0
    """How many states were sent completely."""

    def prepare(self, me: str, run: ElasticRun) -> None:
        super().prepare(me, run)
        run.steps, run.check_every = 60, 0
        run.on_view  # noqa: B018

    def pace(self, run: ElasticRun, step: int) -> None:
        view = run.view
        if step == BEGINS and run.group.rank == 0:
            for name in self.joiners:
                if name not in self.runs:
                    self.start(name)
        if step == BEGINS + 1 and view.epoch == 0:
            wait_until(
                lambda: set(self.joiners) <= {*run.performer._lobby} or run.performer.frozen, "joiners are in the lobby"
            )
        if not view.fresh and view.epoch and set(self.joiners) & {*view.members}:
            run.steps = view.step + 3

    def expected(self, me: str = "a") -> dict[str, torch.Tensor]:
        return alone(1, steps=self.runs[me].committed)


@pytest.fixture(autouse=True)
def _all_states_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LARGE", 0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Donors wait with what they send until it is set."""
    event, send = threading.Event(), stream.send

    def waits(*args: Any, pause: Callable[[float], Any], **options: Any) -> None:
        while not event.wait(0.01) and not pause(0.0):
            continue
        send(*args, pause=pause, **options)

    monkeypatch.setattr(stream, "send", waits)
    yield event
    event.set()


def kept(world: Streams, name: str = "joiner") -> int:
    run = world.runs.get(name)
    joining = None if run is None else run.training._joining
    return 0 if joining is None else len(joining._kept)


def test_the_others_train_while_a_member_receives_the_state(tmp_path: Path, held: threading.Event) -> None:
    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if place == "forward" and kept(world) >= FOLLOWS:
            held.set()
        if place == "forward" and run.view.fresh:
            assert run.group.size == 2
            assert me != "joiner"

    world = Streams(tmp_path, fault=fault)
    for me in "ab":
        world.start(me, 2)
    world.join()
    check(world, world.expected())
    joined, computes = world.views[1], world.views[2]
    assert (joined.fresh, computes.fresh, len(world.views)) == (("joiner",), (), 3)
    assert computes.step >= joined.step + FOLLOWS + 1
    assert world.committed["joiner"] == list(range(joined.step, computes.step + 3))
