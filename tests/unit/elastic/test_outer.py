"""Runs in rounds (DiLoCo): members die, leave and join at chosen points, and no survivor repeats or loses a step."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire import hooks
from gradwire.elasticity.outer import OuterTraining
from gradwire.elasticity.quorum import Limits
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.state import save
from gradwire.errors import HookError, TooFewMembers, UsageError
from helpers.elastic_threads import STEPS, Killed, Threads, at, deal, make_model, replaced
from helpers.waiting import wait_until

EVERY = 4
DILOCO = hooks.diloco(every=EVERY, outer_lr=0.7, outer_momentum=0.5)
SPARSE = hooks.sparse_loco(every=EVERY, k=2, chunk=64)


class Rounds(Threads):
    """Members of a run in rounds. For each round: who has committed it, with which slots it made which steps."""

    def __init__(self, path: Path, hook: Any = DILOCO, **options: Any) -> None:
        path.mkdir(exist_ok=True)
        super().__init__(path, hook=lambda: hook, **options)
        self.made: dict[str, dict[int, list[tuple[int, list[int]]]]] = {}
        self.averaged: dict[str, list[str]] = {}
        self.counted: dict[int, frozenset[str]] = {}
        """By round: whose progress it has."""

    def prepare(self, me: str, run: ElasticRun) -> None:
        super().prepare(me, run)
        training, made = run.training, self.made.setdefault(me, {})
        assert isinstance(training, OuterTraining)
        commit, outer_step = training.commit, training.outer_step

        def logged() -> None:
            here = frozenset(self.averaged[me])
            assert self.counted.setdefault(training.committed, here) == here
            commit()
            self.fault(self, me, "commit", run)

        def step() -> None:
            self.fault(self, me, "outer", run)
            outer_step()
            self.averaged[me] = [one for rank, one in enumerate(run.view.members) if rank not in training._absent]
            self.fault(self, me, "averaged", run)

        training.commit, training.outer_step = logged, step  # type: ignore[method-assign]
        training.update = lambda: self.update(me, run)
        self.made[me] = made

    def update(self, me: str, run: ElasticRun) -> None:
        self.fault(self, me, "update", run)
        run.optimizer.step()
        self.made[me].setdefault(run.training.committed, []).append((run.training.opened, list(run.training.slots)))


def expected(world: Rounds, seed: int) -> dict[str, Tensor]:
    """The same rounds, member by member, without gradwire: of those that have committed a round, and had moved."""
    anchor = {name: p.detach().clone() for name, p in make_model(seed)[0].named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in anchor.items()}
    optimizers: dict[str, Any] = {}
    for number, counted in sorted(world.counted.items()):
        progress = []
        for me in sorted(counted):
            model, optimizer = make_model(seed)
            if me in optimizers:
                optimizer.load_state_dict(optimizers[me])
            model.load_state_dict(anchor)
            for step, slots in world.made[me][number]:
                optimizer.zero_grad()
                for slot in slots:
                    x, y = deal().batch(step, slot)
                    (model(x).squeeze(1) - y).square().mean().backward()
                for p in model.parameters():
                    p.grad /= len(slots)
                optimizer.step()
            optimizers[me] = optimizer.state_dict()
            progress.append({name: anchor[name] - p.detach() for name, p in model.named_parameters()})
        for name, p in anchor.items():
            mean = sum(one[name] for one in progress) / len(progress)
            momentum[name] = 0.5 * momentum[name] + mean
            anchor[name] = p - 0.7 * (mean + 0.5 * momentum[name])
    return anchor


def check_rounds(
    world: Rounds, seed: int = 1, *, dead: Collection[str] = (), joiners: bool = False, late: Collection[str] = ()
) -> None:
    assert not world.errors, world.errors
    assert world.results.keys() == world.runs.keys() - set(dead)
    states = list(world.results.values())
    for state in states:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    taken = Counter(
        (step, slot)
        for number, counted in world.counted.items()
        for me in counted
        for step, slots in world.made[me][number]
        for slot in slots
    )
    assert max(taken.values()) == 1
    for me in set.union(*map(set, world.counted.values())) - set(dead):
        steps = [step for _, made in sorted(world.made[me].items()) for step, _ in made]
        assert len(set(steps)) == len(steps)
        assert me in {"joiner", *late} or steps == list(range(STEPS)) or world.runs[me].left
    if not joiners:  # whose optimizers begin with the state of others
        wanted = expected(world, seed)
        for name, value in states[0].items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


def begin_from(paths: list[Path], world: Rounds) -> None:
    prepare = world.prepare

    def load(me: str, run: ElasticRun) -> None:
        prepare(me, run)
        run.load_state_dict(paths)

    world.prepare = load  # type: ignore[method-assign]


def dies(_: Threads) -> None:
    raise Killed


def test_without_faults_it_is_diloco(tmp_path: Path) -> None:
    world = Rounds(tmp_path)
    for me in "abc":
        world.start(me, 3)
    world.join()
    check_rounds(world)
    assert [run.committed for run in world.runs.values()] == [STEPS] * 3
    assert [*world.counted.values()] == [{"a", "b", "c"}] * 3


@pytest.mark.parametrize("place", ["forward", "vote", "update", "outer", "averaged", "commit"])
@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("join", [False, True])
def test_a_member_dies(place: str, who: str, join: bool, tmp_path: Path) -> None:
    step = {"outer": 8, "averaged": 8, "commit": 8}.get(place, 5)
    world = Rounds(tmp_path, fault=at(place, who, step, replaced if join else dies))
    for me in "abc":
        world.start(me, 3)
    world.join()
    check_rounds(world, dead={who}, joiners=join)
    assert world.counted[0] == {"a", "b", "c"}
    if place in ("forward", "vote", "update", "outer"):
        assert world.counted[1] == {"a", "b", "c"} - {who}
    assert "joiner" not in world.counted[1]  # it may be late for the last round, too


def test_two_die_in_one_round_and_one_in_its_outer_step(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        step = {"b": ("forward", 5), "c": ("update", 6), "d": ("averaged", 8)}.get(me)
        if step == (place, run.training.opened):
            raise Killed

    world = Rounds(tmp_path, fault=fault)
    for me in "abcde":
        world.start(me, 5)
    world.join()
    check_rounds(world, dead={"b", "c", "d"})
    assert world.counted[1] in ({"a", "e"}, {"a", "d", "e"})
    assert world.counted[2] == {"a", "e"}


def test_survivors_that_have_the_average_commit_it(tmp_path: Path) -> None:
    """The one that dies had taken part in the average, and all others are prepared: its progress counts."""

    def dies_when_others_have_voted(world: Threads) -> None:
        wait_until(lambda: all(world.runs[me].performer.member.prepared for me in "bc"), "b and c are prepared")
        raise Killed

    world = Rounds(tmp_path, fault=at("averaged", "a", 8, dies_when_others_have_voted))
    for me in "abc":
        world.start(me, 3)
    world.join()
    check_rounds(world, dead={"a"})
    assert world.counted[1] == {"a", "b", "c"}


@pytest.mark.parametrize("hook", [DILOCO, SPARSE])
def test_a_member_leaves_at_the_end_of_its_round(hook: Any, tmp_path: Path) -> None:
    owed: dict[str, Tensor] = {}

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and place == "forward" and run.training.opened == 5:
            run.leave()
        if place == "commit" and run.training.committed == 2:
            owed.setdefault(me, owed_by(run))  # before it is handed over
        if place == "forward" and run.training.opened == 8:
            owed.setdefault(f"{me} then", owed_by(run))

    world = Rounds(tmp_path, hook, fault=fault)
    for me in "abc":
        world.start(me, 3)
    world.join()
    assert world.runs["b"].left
    assert world.runs["b"].committed == 8
    assert [*world.counted.values()] == [{"a", "b", "c"}, {"a", "b", "c"}, {"a", "c"}]
    if hook is DILOCO:
        check_rounds(world, dead={"b"})
    else:
        assert not world.errors
        before, then = owed["a"] + owed["b"] + owed["c"], owed["a then"] + owed["c then"]
        torch.testing.assert_close(then, before, rtol=1e-6, atol=0)
        assert owed["a"].any()


def owed_by(run: ElasticRun) -> Tensor:
    parts = run.training.replica.hook.owed(run.training.replica.runner.state_dict()["state"]) or ()
    return torch.cat([part.reshape(-1) for _, part in sorted(parts, key=lambda one: one[0])] or [torch.zeros(1)])


def test_one_that_joins_begins_with_a_round(tmp_path: Path) -> None:
    world = Rounds(tmp_path, fault=at("forward", "a", 1, lambda world: world.start("joiner")))
    for me in "ab":
        world.start(me, 2)
    world.join()
    check_rounds(world, joiners=True)
    assert world.counted[0] == {"a", "b"}
    (first, made), *_ = sorted(world.made["joiner"].items())
    assert [step for step, _ in made] == list(range(first * EVERY, first * EVERY + EVERY))


@pytest.mark.parametrize("dies_too", [False, True])
def test_a_member_that_is_late_ends_the_round_with_the_step_that_it_is_in(dies_too: bool, tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        dies = dies_too and (me, place, run.training.opened) == ("d", "outer", 8)
        if dies or (me, place, run.training.opened) == ("b", "vote", 5):
            wait_until(lambda: world.runs["b"].performer.quorum.late(1), "the others have waited for b")
        if dies:
            raise Killed

    world = Rounds(tmp_path, fault=fault, quorum=2)
    for me in "abcd":
        world.start(me, 4)
    world.join()
    check_rounds(world, dead={"d"} if dies_too else set(), late="abcd")  # without a grace, each may be
    assert [step for step, _ in world.made["b"][1]] == [4, 5]
    assert world.counted[1] == set("abc" if dies_too else "abcd")


def test_a_last_round_may_be_short_and_a_loop_of_ones_own_may_end_in_a_round(tmp_path: Path) -> None:
    class Own(Rounds):
        def train(self, me: str, run: ElasticRun, starters: int) -> None:
            run.steps = 6 if self.options["short"] else None
            limits = Limits(starters=starters, patience=30.0)
            run.start(me, lambda: RunRecords(self.records), lambda *view: self.build(*view), limits)
            for step in run:
                for x, y in step:
                    (run.model(x).squeeze(1) - y).square().mean().backward()
                step.commit()
                if run.training.opened == 6:
                    break
            run.close()

    for short in (True, False):
        world = Own(tmp_path / str(short), short=short)
        for me in "ab":
            world.start(me, 2)
        world.join()
        assert not world.errors
        assert [run.committed for run in world.runs.values()] == [6, 6]
        for name, value in world.results["a"].items():
            assert torch.equal(value, world.results["b"][name])
            torch.testing.assert_close(value, expected(world, 1)[name], rtol=1e-9, atol=1e-12)


def test_a_state_within_a_round_is_that_of_one_member(tmp_path: Path) -> None:
    """`save` refuses it; too few members, of which one is left, save it, and a run goes on from there with that one's steps."""
    path, errors = tmp_path / "rescued", []

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        run.rescue = path
        if place == "forward" and run.training.opened == 5 and not errors:
            with pytest.raises(
                UsageError, match=r"in a round of diloco\(.*Save it after the last step of a round"
            ) as error:
                run.save(path)
            errors.append(error)
        if me == "b" and place == "forward" and run.training.opened == 6:
            raise Killed

    world = Rounds(tmp_path, fault=fault, min_ranks=2, patience=0.5)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert isinstance(world.errors["a"], TooFewMembers)
    assert errors
    again = Rounds(tmp_path / "again")
    begin_from([path], again)
    for me in "ac":
        again.start(me, 2)
    again.join()
    assert not again.errors
    again.counted |= {0: world.counted[0]}
    again.made["a"][1] = world.made["a"].get(1, []) + again.made["a"].get(1, [])
    for me in "ab":
        again.made[me] = {**again.made.get(me, {}), 0: world.made[me][0]}
    assert [*again.counted.values()] == [{"a"}, {"a", "c"}, {"a", "b"}]
    assert [step for step, _ in again.made["a"][1]] == [4, 5, 6, 7]
    assert all(torch.equal(value, again.results["c"][name]) for name, value in again.results["a"].items())


@pytest.mark.parametrize("hook", [DILOCO, SPARSE])
@pytest.mark.parametrize("step", [8, 6])
def test_states_of_all_members_go_on_as_they_were(step: int, hook: Any, tmp_path: Path) -> None:
    """Saved after a round, bit for bit. Rescued in one, with the progress of the first."""

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if place == "forward" and run.training.opened == step:
            save(run.saved_state(run.group.rank, rescued=step == 6), tmp_path / me)

    world, again = Rounds(tmp_path / "first", hook, fault=fault), Rounds(tmp_path / "again", hook)
    begin_from([tmp_path / "a", tmp_path / "b"], again)
    for one in (world, again):
        for me in "ab":
            one.start(me, 2)
        assert not one.join().errors
    assert all(torch.equal(value, again.results["b"][name]) for name, value in again.results["a"].items())
    if step == 8:
        assert all(torch.equal(value, world.results["a"][name]) for name, value in again.results["a"].items())
    else:
        assert [*again.counted.values()] == [{"a"}, {"a", "b"}]


def test_members_that_change_in_the_first_round_keep_their_own_optimizers(tmp_path: Path) -> None:
    def saves(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if place == "forward" and run.training.opened == EVERY:
            save(run.saved_state(run.group.rank, rescued=False), tmp_path / me)

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if (place, run.training.opened) == ("forward", 5) and run.view.epoch == 0:
            if me == "b":
                world.start("joiner")
                wait_until(lambda: run.performer._lobby and {world.runs[m].training.opened for m in "ac"} == {5}, "all")
                raise Killed
            wait_until(lambda: run.performer.frozen, "b is lost")
        if place == "outer" and run.training.moved and me in "ac":
            assert {int(state["step"]) for state in run.optimizer.state.values()} == {run.training.opened}

    world, again = Rounds(tmp_path / "first", fault=saves), Rounds(tmp_path / "again", fault=fault)
    begin_from([tmp_path / one for one in "abc"], again)
    for one in (world, again):
        for me in "abc":
            one.start(me, 3)
        assert not one.join().errors
    assert again.counted[1] == {"a", "c"}


@pytest.fixture
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm")
def test_a_member_that_is_alone_leaves_at_once(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        run.rescue = tmp_path / "rescued"
        if place == "forward" and run.training.opened == 5:
            run.leave()

    world = Rounds(tmp_path, fault=fault)
    world.start("a", 1)
    world.join()
    assert isinstance(error := world.errors["a"], TooFewMembers)
    assert "nobody goes on" in str(error)
    model, optimizer = make_model(9)
    with gw.elastic(model, optimizer, hook=DILOCO, data=deal(), steps=STEPS, state=tmp_path / "rescued") as run:
        assert run.training.opened == 6
        for step in run:
            for x, y in step:
                (model(x).squeeze(1) - y).square().mean().backward()
            step.commit()
    reference = Rounds(tmp_path / "whole")
    reference.start("a", 1)
    reference.join()
    assert all(torch.equal(value, reference.results["a"][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{"quorum": 0, "hook": DILOCO}, {"quorum": 2}])
def test_a_quorum_is_of_rounds(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="only hooks such as diloco"):
        gw.elastic(*make_model(), data=deal(), **options)


@pytest.mark.parametrize(
    "hook", [hooks.local_sgd(every=2), hooks.streaming_diloco(every=4, fragments=2), hooks.gossip()]
)
def test_hooks_after_which_members_differ_are_refused(hook: Any) -> None:
    model, optimizer = make_model()
    with pytest.raises(HookError, match=r"Choose diloco\(\) or sparse_loco\(\)"):
        ElasticRun(model, optimizer, hook=hook)


@pytest.mark.usefixtures("_sigterm")
def test_the_optimizer_steps_at_a_commit_alone(tmp_path: Path) -> None:
    model, optimizer = make_model()
    with (
        gw.elastic(model, optimizer, hook=DILOCO, data=deal(), steps=2),
        pytest.raises(UsageError, match="Call commit"),
    ):
        optimizer.step()
