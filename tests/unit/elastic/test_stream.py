"""A member receives the state while the others train. Members are threads; faults come at each place of a join."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.elasticity import stream
from gradwire.elasticity.deal import Deal
from gradwire.elasticity.run import ElasticRun
from gradwire.errors import TooFewMembers
from gradwire.policies import Graph
from helpers import elastic_threads
from helpers.elastic_threads import Killed, Threads, alone, check
from helpers.waiting import wait_until

BEGINS, FOLLOWS = 3, 4
"""The step in which joiners are started, and how many steps they follow before something happens."""


class Streams(Threads):
    """Training goes on until all `joiners` have computed some steps with the others."""

    joiners: tuple[str, ...] = ("joiner",)

    def prepare(self, me: str, run: ElasticRun) -> None:
        super().prepare(me, run)
        run.steps = 60
        catch_up = run.training.catch_up

        def visited(lost: Callable[[], bool]) -> bool:
            self.fault(self, me, "behind", run)
            return catch_up(lost)

        run.training.catch_up = visited  # type: ignore[method-assign]

    def pace(self, run: ElasticRun, step: int) -> bool:
        view = run.view
        if step == BEGINS and run.performer.member.me == "a":  # whose vote the others wait for: all join in one view
            joiners = set(self.joiners)
            for name in self.joiners:
                self.start(name)
            wait_until(lambda: joiners <= {*run.performer._lobby} or run.performer.frozen, "joiners are in the lobby")
        if view.epoch and not view.fresh and run.steps == 60:
            run.steps = view.step + 3
        return False

    def behind(self, name: str = "joiner") -> int:
        """How many steps this joiner has kept."""
        run = self.runs.get(name)
        return -1 if run is None or run.training.joins.lag is None else len(run.training.joins._kept)

    def join(self, *, dead: str = "", expected: bool = True) -> Streams:
        super().join()
        if expected:
            check(self, alone(1, steps=max(run.committed for run in self.runs.values())), dead=set(dead.split()))
        return self


def started(path: Path, fault: Callable[..., Any] | None = None, *, members: str = "ab", **options: Any) -> Streams:
    world = Streams(path, fault=fault, **options)
    for me in members:
        world.start(me, len(members))
    return world


@pytest.fixture(autouse=True)
def _all_states_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LARGE", 0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Donors wait with what they send until it is set."""
    event, send = threading.Event(), stream.send

    def waits(*args: Any, pause: Callable[[float], Any]) -> None:
        while not event.wait(0.01) and not pause(0.0):
            continue
        send(*args, pause=pause)

    monkeypatch.setattr(stream, "send", waits)
    yield event
    event.set()


def test_the_others_train_meanwhile(tmp_path: Path, held: threading.Event) -> None:
    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if place == "forward" and run.view.fresh:
            assert (me != "joiner", run.group.size, run.training.gate) == (True, 2, None)
            if world.behind() >= FOLLOWS:
                held.set()

    world = started(tmp_path, fault).join()
    joined, computes = world.views[1], world.views[2]
    assert (joined.fresh, len(world.views)) == (("joiner",), 3)
    assert computes.step > joined.step + FOLLOWS
    assert world.committed["joiner"] == list(range(joined.step, computes.step + 3))
    assert all(group.closed for group in [run.group for run in world.runs.values()])


class Norms(nn.Module):
    """With buffers, and with a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.last, self.unused = nn.Linear(8, 1), nn.Linear(1, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


FEEDBACK = hooks.error_feedback()


@pytest.mark.parametrize(
    "hook",
    [
        None,
        hooks.chain(FEEDBACK, hooks.top_k(ratio=0.1)),
        hooks.chain(FEEDBACK, hooks.power_sgd(rank=1, min_compression=1)),
        hooks.chain(FEEDBACK, hooks.quantize(bits=4)),
    ],
    ids=str,
)
def test_hooks_buffers_and_what_is_registered_follow(
    hook: Any, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_threads, "make_model", make_norms)
    rates: dict[str, Any] = {}
    averages: dict[str, nn.Module] = {}

    class Registers(Streams):
        def prepare(self, me: str, run: ElasticRun) -> None:
            super().prepare(me, run)
            rates[me] = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.9)
            averages[me] = torch.optim.swa_utils.AveragedModel(run.model, use_buffers=True)  # type: ignore[no-untyped-call]
            run.register(rates=rates[me], average=averages[me])

        def update(self, me: str, run: ElasticRun) -> None:
            super().update(me, run)
            rates[me].step()
            averages[me].update_parameters(run.model)  # type: ignore[operator]

    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if world.behind() >= FOLLOWS:
            held.set()

    world = Registers(tmp_path, fault=fault, hook=lambda: hook)
    world.graph = Graph.FIND_UNUSED
    for me in "ab":
        world.start(me, 2)
    world.join(expected=False)
    assert not world.errors
    assert world.views[2].step > world.views[1].step + FOLLOWS
    assert len(world.results) == 3
    for me in ("b", "joiner"):
        assert rates[me].state_dict() == rates["a"].state_dict()
        for name, value in [*world.results["a"].items(), *averages["a"].state_dict().items()]:
            other = {**world.results[me], **averages[me].state_dict()}[name]
            assert torch.equal(value, other), (me, name)


def make_norms(seed: int = 0, *, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Norms()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("place", ["forward", "vote", "update"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_member_dies_while_a_state_is_sent(who: str, place: str, tmp_path: Path, held: threading.Event) -> None:
    """The one that sends it, and the other."""

    def fault(world: Streams, me: str, here: str, run: ElasticRun) -> None:
        if me == who and here == place and world.behind() >= 2 and run.view.epoch == 1:
            held.set()
            raise Killed

    world = started(tmp_path, fault, members="abc").join(dead=who)
    assert world.views[2].fresh == ("joiner",)
    assert world.runs["joiner"].training.joins._room == stream.ROOM // 16  # it has begun again once


@pytest.mark.parametrize("place", ["behind", "update", "caught up"])
def test_the_joiner_dies(place: str, tmp_path: Path, held: threading.Event) -> None:
    def fault(world: Streams, me: str, here: str, run: ElasticRun) -> None:
        if world.behind() >= FOLLOWS:
            held.set()
        caught_up = here == "behind" and place == "caught up" and run.training.joins.lag == 0
        if me == "joiner" and (here == place or caught_up):
            if place == "behind" and world.behind() < 2:
                return
            raise Killed

    world = started(tmp_path, fault).join(dead="joiner")
    assert world.views[max(world.views)].members == ("a", "b")
    steps = list(range(world.runs["a"].committed))
    assert world.committed["a"] == world.committed["b"] == steps


def test_two_join_at_once(tmp_path: Path, held: threading.Event) -> None:
    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if world.behind("other") >= FOLLOWS:
            held.set()

    world = Streams(tmp_path, fault=fault)
    world.joiners = ("joiner", "other")
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert sorted(world.views[1].fresh) == ["joiner", "other"]
    assert world.views[2].fresh == ()


def test_buffers_are_those_of_a_member_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that join the first in rank order is still behind when the only other one dies."""
    monkeypatch.setattr(elastic_threads, "make_model", make_norms)
    send, held, counts = stream.send, {1: threading.Event(), 2: threading.Event()}, list[int]()
    monkeypatch.setattr(stream, "ROOM", 60)  # the one that is held is not to stop the other

    def waits(group: Any, *args: Any, pause: Callable[[float], Any]) -> None:
        while not (held[1 if group.name.endswith("/state-1") else 2]).wait(0.01) and not pause(0.0):
            continue
        send(group, *args, pause=pause)

    monkeypatch.setattr(stream, "send", waits)

    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if me == "a" and place == "forward" and run.view.epoch == 1:
            held[2].set()
            if world.runs[run.view.members[2]].performer.member.holds:
                raise Killed
        if place == "vote" and run.view.epoch == 2:
            counts.append(int(run.model.norm.num_batches_tracked))  # type: ignore[union-attr, arg-type]
            assert {*run.training.state_dict()["slots"]} == {0}  # as in a run of one
        if len(counts) == FOLLOWS:
            held[1].set()

    world = Streams(tmp_path, fault=fault)
    world.joiners, world.graph = ("joiner", "other"), Graph.FIND_UNUSED
    world.start("a", 1)
    world.join(expected=False)
    assert (world.errors, world.views[2].fresh) == ({}, world.views[2].members[:1])
    assert counts == [elastic_threads.SLOTS * (world.views[2].step + n) for n in range(1, len(counts) + 1)]


@pytest.mark.parametrize("leavers", ["b", "a b", "joiner"])
def test_members_leave_while_a_state_is_sent(leavers: str, tmp_path: Path, held: threading.Event) -> None:
    """If all leave that have the state, the joiner gets it first."""

    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if world.behind() >= 2 and me in leavers.split() and place in ("forward", "behind"):
            run.leave()
        if run.view.epoch > 1 or (place == "forward" and world.behind() >= FOLLOWS):
            held.set()

    world = started(tmp_path, fault)
    world.join(dead=leavers)
    assert {name for name, run in world.runs.items() if run.left} == {*leavers.split()}
    assert ("joiner" in world.results) == (leavers != "joiner")


@pytest.mark.parametrize("large", [0, 2**22])
@pytest.mark.parametrize("what", ["model", "data=", "hook=", "optimizer", "steps="])
def test_one_that_trains_something_else_ends_alone(
    what: str, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LARGE", large)

    class Another(Streams):
        def live(self, me: str, starters: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if me == "joiner" and what == "hook=":
                self.hook = hooks.sign
            if me == "joiner" and what in ("model", "optimizer"):
                model = nn.Linear(4, 1).double() if what == "model" else model
                optimizer = torch.optim.SGD(model.parameters())
            super().live(me, starters, model, optimizer)

        def prepare(self, me: str, run: ElasticRun) -> None:
            super().prepare(me, run)
            run.steps = 50 if me == "joiner" and what == "steps=" else 60
            if me == "joiner" and what == "data=" and run.data is not None:
                run.data.dataset = elastic_threads.DATA[:-1]

    world = Another(tmp_path)
    for me in "ab":
        world.start(me, 2)
    world.join(expected=False)
    assert f"the others train with another {what}" in str(world.errors.pop("joiner"))
    assert (world.errors, world.results.keys()) == ({}, {"a", "b"})


def test_nobody_has_the_state_any_more(tmp_path: Path, held: threading.Event) -> None:
    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if world.behind() >= 2 and place == "forward":
            raise Killed

    world = started(tmp_path, fault).join(expected=False)
    assert world.errors.keys() == {"joiner"}
    assert isinstance(world.errors["joiner"], TooFewMembers)
    assert "nobody has the state" in str(world.errors["joiner"])


def test_the_others_wait_for_one_that_keeps_no_more(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ROOM", 2)

    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if place == "behind" and world.behind() == 2:
            threading.Timer(0.2, held.set).start()

    world = started(tmp_path, fault).join()
    joined, computes = world.views[1], world.views[2]
    # Two are kept; in the next one it is compared with the others, then it asks.
    assert computes.step == joined.step + 2 + 2


@pytest.mark.parametrize("how", ["raises", "differs"])
def test_the_others_wait_if_it_is_not_exact_to_catch_up(how: str, tmp_path: Path, held: threading.Event) -> None:
    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if world.behind() >= FOLLOWS:
            held.set()
        if me == "joiner" and place == "update" and run.view.epoch == 1:
            if how == "raises":
                raise RuntimeError("no scale() before update()")
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[0] += 1e-9

    with pytest.warns(UserWarning, match="update= cannot repeat here what the others have committed"):
        world = started(tmp_path, fault).join()
    assert [world.views[epoch].fresh for epoch in (1, 2, 3)] == [("joiner",), ("joiner",), ()]
    assert world.views[3].step == world.views[2].step  # they have waited


@pytest.mark.parametrize("how", ["after so many steps", "break"])
def test_training_ends_before_a_joiner_has_the_state(how: str, tmp_path: Path, held: threading.Event) -> None:
    class Ends(Streams):
        def pace(self, run: ElasticRun, step: int) -> bool:
            super().pace(run, step)
            return how == "break" and step == 8

    def fault(world: Streams, me: str, place: str, run: ElasticRun) -> None:
        if how != "break" and place == "update":
            run.steps = 8

    world = Ends(tmp_path, fault=fault)
    for me in "ab":
        world.start(me, 2)
    world.join(expected=False)
    assert not world.errors
    assert world.runs["joiner"].left
    assert not world.runs["joiner"].performer.member.holds
    assert world.results.keys() == {"a", "b"}


def test_members_with_their_own_data_wait() -> None:
    model, optimizer = elastic_threads.make_model()
    view = elastic_threads.View(1, ("a", "b"), 1, ("b",))
    for data, streams in ((None, False), (Deal([1], global_batch=1, slots=1), True)):
        run = ElasticRun(model, optimizer, data=data)
        assert run.training.joins.stream_in(view) is streams
        assert not run.training.joins.stream_in(view._replace(begins=True))
        run.release()
