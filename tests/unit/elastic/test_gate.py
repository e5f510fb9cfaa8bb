"""Votes that the device counts, here on the CPU: members learn the result a step later, and it is as if hosts had voted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.elasticity.device_vote import DeviceVote, wait_for
from gradwire.elasticity.machine import Abort, Commit, Member, MemberPhase, Publish, Standing, View
from gradwire.elasticity.performer import Performer
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.training import Training
from gradwire.errors import CollectiveTimeout, GroupError, ReplicasDiverged, TooFewMembers, UsageError
from gradwire.groups.threads_group import ThreadGroup
from gradwire.policies import Graph
from helpers.elastic_threads import STEPS, Killed, Threads, alone, at, check, deal, make_model, replaced
from helpers.waiting import wait_until

CPU = torch.device("cpu")
VIEW = View(0, ("a", "b"), 7)
GATE = Training.gate


class Gated(Threads):
    """Members whose device votes. The places of faults are "forward", "vote", "cast" and "behind": after the vote was enqueued."""

    fused = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.aborted: dict[int, tuple[threading.Barrier, str]] = {}
        """By step of the first view, of a vote whose collective is aborted on all members: who was not prepared."""

    def abort(self, step: int, members: str = "abc", late: str = "") -> Gated:
        self.aborted[step] = threading.Barrier(len(members)), late
        for me in members:
            self.start(me, len(members))
        return self

    def prepare(self, me: str, run: ElasticRun) -> None:
        run.steps, run.check_every, commit = STEPS, 0, run.training.commit

        def counted() -> None:
            number = run.training.committed
            commit()
            self.committed[me].append(number)

        run.training.commit = counted  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def votes(monkeypatch: pytest.MonkeyPatch) -> list[DeviceVote]:
    """All votes that devices have counted. A device does not fail when a collective is aborted: the gate stays closed."""
    made: list[DeviceVote] = []
    real = DeviceVote.cast

    def cast(self: DeviceVote) -> Tensor:
        made.append(self)
        try:
            return real(self)
        except GroupError:
            self._kept[2:] = 0  # nor is what comes late read
            return torch.ones(())

    monkeypatch.setattr(DeviceVote, "cast", cast)
    monkeypatch.setattr(Training, "gate", CPU)
    return made


def faulty(monkeypatch: pytest.MonkeyPatch, path: Path, fault: Callable[..., Any]) -> Gated:
    world = Gated(path, fault=fault)
    behind, cast = Training.commit_behind, DeviceVote.cast

    def here(run: ElasticRun) -> None:
        me = next(me for me, one in world.runs.items() if one is run)
        fault(world, me, "behind", run)

    def commit_behind(self: Training, closed: Tensor) -> None:
        behind(self, closed)
        here(next(run for run in world.runs.values() if run.training is self))

    def casts(self: DeviceVote) -> Tensor:
        me = threading.current_thread().name
        fault(world, me, "cast", run := world.runs[me])
        if run.view.epoch or run.training.opened not in world.aborted:
            return cast(self)
        barrier, late = world.aborted[run.training.opened]
        self._kept[:2] = self._rows * torch.tensor([[me not in late], [True]])
        barrier.wait(60.0)
        return torch.ones(())

    monkeypatch.setattr(Training, "commit_behind", commit_behind)
    monkeypatch.setattr(DeviceVote, "cast", casts)
    return world


@pytest.mark.parametrize("place", ["forward", "vote", "cast", "behind"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_member_that_dies_and_one_that_joins_change_nothing(
    place: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, votes: list[DeviceVote]
) -> None:
    world = faulty(monkeypatch, tmp_path, at(place, who, 4, replaced))
    for me in "abc":
        world.start(me, 3)
    world.join()
    check(world, alone(1, fused=True), dead={who})
    steps = list(range(STEPS))
    assert all(world.committed[me] == steps for me in {"a", "b", "c"} - {who})
    assert world.committed["joiner"] == steps[world.committed["joiner"][0] :]
    assert len(votes) > STEPS


@pytest.mark.parametrize("forward", [True, False])
def test_a_closed_gate(forward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`b` dies before it votes, when `a` has voted. `c` has voted too: forward; or it has not: the step is computed again."""
    died, updates = threading.Event(), []

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if run.training.opened == 4 and place == "vote" and run.view.epoch == 0:
            if me == "b":
                voted = lambda: sum(one.performer.pending for one in world.runs.values())  # noqa: E731
                wait_until(lambda: voted() > forward, "the others vote")
                died.set()
                raise Killed
            if me == "c" and not forward:
                wait_until(lambda: run.performer.frozen, "c is frozen")
        if me == "a" and place == "behind" and run.view.epoch == 0:
            updates.append(run.training.opened - 1)

    world = faulty(monkeypatch, tmp_path, fault)
    for me in "abc":
        world.start(me, 3)
    world.join()
    check(world, alone(1, fused=True), dead={"b"})
    assert world.committed["a"] == world.committed["c"] == list(range(STEPS))
    assert updates == [1, 2, 3, 4]  # behind the gate; it was closed for the last
    assert world.views[1].step == 4 + forward


def test_a_member_that_leaves_asks_for_a_vote_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and place == "forward" and run.training.opened == 5:
            run.leave()

    world = faulty(monkeypatch, tmp_path, fault)
    for me in "abc":
        world.start(me, 3)
    world.join()
    check(world, alone(1, fused=True), dead={"b"})
    # The one in which it was told, and the next, which hosts have counted.
    assert world.committed["b"] == list(range(7))


def test_members_that_differ_commit_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and place == "vote" and run.training.opened == 5:
            run.optimizer.param_groups[0]["lr"] = 0.5

    world = faulty(monkeypatch, tmp_path, fault)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert {me: type(error) for me, error in world.errors.items()} == {"a": ReplicasDiverged, "b": ReplicasDiverged}
    assert world.committed["a"] == world.committed["b"] == list(range(5))


def test_who_asks_for_the_count_or_the_state_waits_for_the_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, int, int]] = []

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if place == "forward" and run.training.opened in (3, 4):
            before = run.performer.pending
            count = run.committed if run.training.opened == 3 else unpacked(run.state_dict())
            seen.append((before, count, run.training.opened))

    world = faulty(monkeypatch, tmp_path, fault)
    world.start("a", 1)
    world.join()
    check(world, alone(1, fused=True))
    assert seen[0] == (True, 3, 3)
    assert (True, 4, 4) in seen


def unpacked(state: dict[str, Any]) -> int:
    return dict(json.loads(state["run"])[1])["committed"]


@pytest.mark.parametrize("late", ["", "c"], ids=["forward", "again"])
@pytest.mark.parametrize("who", ["a", "abc"])
@pytest.mark.parametrize("place", ["forward", "vote"])
def test_who_asks_for_the_count_in_the_middle_of_a_step(
    place: str, who: str, late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members change there. What was computed of the step does not count."""

    def fault(world: Threads, me: str, here: str, run: ElasticRun) -> None:
        if here == place and me in who and run.training.opened in (4, 5):
            assert run.committed <= run.training.opened

    world = faulty(monkeypatch, tmp_path, fault).abort(4, late=late)
    check(world.join(), alone(1, fused=True))
    assert set(map(tuple, world.committed.values())) == {tuple(range(STEPS))}
    assert world.views[1].step == 5 - len(late)


@pytest.mark.parametrize("late", ["", "c"], ids=["forward", "again"])
def test_a_step_has_the_options_of_the_optimizer_with_which_it_was_enqueued(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(step: int) -> float:
        return 0.01 / (1 + step)

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if place in ("forward", "behind"):
            run.optimizer.param_groups[0]["lr"] = rate(run.training.opened)

    world = faulty(monkeypatch, tmp_path, fault).abort(4, late=late).join()
    check(world, alone(1, fused=True, rate=rate))


def test_a_member_that_freezes_while_another_looks_waits_for_its_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Performer.check_group

    def check_group(self: Performer) -> bool:
        frozen = look(self)
        if self.pending and (self.member.me, self.member.step, self.view.epoch) == ("a", 5, 0):
            self.lost()  # by the watcher, when it has looked
        return frozen

    monkeypatch.setattr(Performer, "check_group", check_group)
    world = faulty(monkeypatch, tmp_path, lambda *_: None)
    for me in "abc":
        world.start(me, 3)
    check(world.join(), alone(1, fused=True))
    assert len(world.views) > 1


@pytest.mark.parametrize(("min_ranks", "error"), [(2, TooFewMembers), (1, UsageError)], ids=["too few", "closed"])
def test_what_ends_a_run_while_a_vote_is_pending(
    min_ranks: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few members are left: the state is saved. Or it is closed, and the step that is lost is named."""
    asks = threading.Event()

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if run.training.opened == 5 and me == "b" and place == "behind":
            assert asks.wait(60.0)
            raise Killed
        run.rescue = tmp_path / "rescued"
        if run.training.opened == 5 and place == "vote":
            assert run.performer.pending
            asks.set()
            _ = run.close() if min_ranks == 1 else run.committed

    world = faulty(monkeypatch, tmp_path, fault)
    world.options |= {"min_ranks": min_ranks, "patience": 3.0}
    found = world.abort(4, "ab", late="a").join().errors["a"]
    assert type(found) is error
    assert (tmp_path / "rescued").exists() is (error is TooFewMembers)
    assert "after step 4" in "".join([str(found), *getattr(found, "__notes__", ())])


def test_hooks_of_the_optimizer_need_a_vote_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do happens whether or not the gate is open. Members that differ in that could not vote at all."""
    monkeypatch.setattr(Training, "gate", GATE)
    monkeypatch.setattr(ThreadGroup, "orders_streams", lambda *_: True)
    model, optimizer = make_model(fused=True)
    training = Training(model, optimizer, hook=None, data=deal(), graph=Graph.ALL_USED, buckets=None)
    training.replica.parameters = [SimpleNamespace(device=torch.device("cuda"))]  # type: ignore[list-item]
    facts = training.facts(VIEW, digests=False)
    assert training.gate is not None
    optimizer.register_step_post_hook(lambda *_: None)
    assert training.gate is None
    assert training.facts(VIEW, digests=False) != facts


def test_what_others_may_have_is_a_vote() -> None:
    """The device has copied half of a row that was being cleared: with what the gate compares, others may have committed."""
    (group,) = ThreadGroup.world(1)
    vote = DeviceVote(group, CPU, [5, 6], [0, 1])
    vote.arm()
    vote._rows[0, 2:] = 0
    assert vote.cast().item() == 0
    assert vote.prepared
    group.close()


def test_a_row_that_is_cleared_before_the_device_comes_to_it_is_no_vote() -> None:
    (group,) = ThreadGroup.world(1)
    for cleared in (False, True):
        vote = DeviceVote(group, CPU, [5, 6], [0, 1])
        vote.arm()
        if cleared:
            vote.clear()
        assert vote.cast().item() == cleared
        vote.clear()
        vote.wait(lambda: False)
        assert vote.prepared is vote.passed is vote.complete is not cleared
        assert vote.wants  # its own, at least
    group.close()


def test_the_gate_is_open_if_all_agree() -> None:
    for facts, closed in (([1, 2], 0.0), ([1, 3], 1.0)):
        groups = ThreadGroup.world(2)
        ballots = [DeviceVote(group, CPU, one, [0]) for group, one in zip(groups, ([1, 2], facts), strict=True)]
        gates: list[float] = []
        for ballot in ballots:
            ballot.arm()
        threads = [threading.Thread(target=lambda b=b: gates.append(b.cast().item())) for b in ballots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert gates == [closed, closed]
        assert all(ballot.complete and ballot.prepared and ballot.passed is not bool(closed) for ballot in ballots)
        for group in groups:
            group.close()


def test_a_device_that_does_not_come_to_it_is_named() -> None:
    class Never:
        def query(self) -> bool:
            return False

    with pytest.raises(CollectiveTimeout, match=r"the vote: the device has not come to it in 0\.01 s"):
        wait_for(Never(), lambda: False, 0.01, "the vote")  # type: ignore[arg-type]


def test_the_machine_knows_the_result_late() -> None:
    member = Member("a", VIEW, MemberPhase.PREPARED, step=7, prepared=True, holds=True)
    passed, todo = member.resolved(passed=True, prepared=True)
    assert (passed.phase, passed.step, passed.prepared, todo) == (MemberPhase.OPEN, 8, False, (Commit(7),))
    for prepared in (True, False):
        lost, todo = member.resolved(passed=False, prepared=prepared)
        assert lost.phase is MemberPhase.FROZEN
        assert todo == (Abort(0), Publish(0, Standing(7, prepared)))
        assert lost == member.freeze()[0].resolved(passed=False, prepared=prepared)[0]
    frozen, todo = member.freeze()[0].resolved(passed=True, prepared=True)
    assert (frozen.phase, frozen.step, todo) == (MemberPhase.FROZEN, 8, (Commit(7),))
    assert frozen.freeze()[1] == (Abort(0), Publish(0, Standing(8, prepared=False)))
