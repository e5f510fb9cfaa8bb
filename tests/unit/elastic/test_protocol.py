"""The commit protocol: searched in every order of events, and single events in a table."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.elasticity.machine import (
    Abort,
    Commit,
    Drop,
    Enter,
    HubState,
    Member,
    MemberPhase,
    Propose,
    Publish,
    Reaction,
    Standing,
    Stop,
    View,
    Vote,
)
from helpers.protocol_search import Limits, Search, Violation


@pytest.mark.parametrize(
    "limits",
    [
        {"ranks": 3, "steps": 2, "crashes": 3},
        {"ranks": 2, "joiners": 1, "steps": 1, "crashes": 2},
        {"ranks": 3, "steps": 1, "crashes": 1, "leaves": 1},
        {"ranks": 2, "joiners": 1, "steps": 1, "crashes": 0, "leaves": 2},
        {"ranks": 2, "joiners": 1, "steps": 2, "crashes": 0, "leaves": 1, "min_ranks": 2},
        {"ranks": 1, "joiners": 1, "steps": 2, "crashes": 1, "leaves": 1},
        {"ranks": 1, "joiners": 2, "steps": 2, "crashes": 1},
        {"ranks": 2, "steps": 1, "crashes": 0, "cuts": 1},
        {"ranks": 3, "steps": 2, "crashes": 3, "gated": 1},
        {"ranks": 2, "joiners": 1, "steps": 2, "crashes": 1, "gated": 1},
        {"ranks": 3, "steps": 2, "crashes": 1, "leaves": 1, "gated": 1},
        {"ranks": 2, "steps": 1, "crashes": 0, "cuts": 1, "gated": 1},
    ],
    ids=str,
)
def test_the_protocol_holds_in_every_order_of_events(limits: dict[str, int]) -> None:
    assert Search(Limits(**limits)).run() > 250


class Thawed(Member):
    """Publishes its standing, and what ends late in the group of the old view still counts."""

    def averaged(self) -> Reaction:
        if self.phase is MemberPhase.FROZEN and not self.prepared:
            return self._replace(prepared=True), (Vote(self.epoch, self.step),)
        return super().averaged()


class Hasty(Member):
    """Goes on without members that have not published yet."""

    def look(self, hub: HubState) -> Reaction:
        frozen = self.phase is MemberPhase.FROZEN and self.view is not None
        late = frozenset(self.view.members) - hub.standings.keys() if frozen and self.view else frozenset()
        return super().look(hub._replace(gone=hub.gone | late))


class Staying(Member):
    """Waits with those that stay until they are enough, although it was told to leave."""

    def look(self, hub: HubState) -> Reaction:
        member, todo = super().look(hub)
        return (self, ()) if hub.next is None and member.phase is MemberPhase.OUT else (member, todo)


class Forgetful(Member):
    """Leaves without the step that the others commit."""

    def _settle(self, step: int) -> Reaction:
        return super()._settle(self.step if self.leaving else step)


class Receiving(Member):
    """Has the state, although its standing says that it has not."""

    def received(self) -> Reaction:
        return self._replace(holds=True), ()


@pytest.mark.parametrize(
    ("mutant", "limits", "found"),
    [
        ({"kind": Thawed}, {"cuts": 1}, "has committed"),
        ({"elects": True}, {}, "has committed"),
        ({"kind": Hasty}, {"ranks": 3, "crashes": 1}, "is alive, and the others go on without it"),
        ({"kind": Staying}, {"leaves": 1, "min_ranks": 2}, "is stuck frozen"),
        ({"kind": Forgetful}, {"leaves": 1}, "leaves without step 0"),
        ({"kind": Receiving}, {"joiners": 1, "crashes": 1}, "holds the state: True"),
        ({"clears": False}, {"crashes": 1, "gated": 1}, "commits 0 without averages"),
        ({"drains": False}, {"ranks": 3, "crashes": 1, "gated": 1}, "is to commit 0, and is at 0"),
    ],
    ids=[
        "publishes and goes on",
        "elects a hub",
        "does not wait",
        "cannot leave",
        "leaves too early",
        "receives late",
        "aborts before it clears its row",
        "publishes before the device is past the vote",
    ],
)
def test_the_search_finds_mutants(mutant: dict[str, Any], limits: dict[str, int], found: str) -> None:
    with pytest.raises(Violation, match=found):
        Search(Limits(**{"ranks": 2, "crashes": 0, **limits}), **mutant).run()


FIRST = View(3, ("a", "b"), 7)
A = Member("a", FIRST, MemberPhase.OPEN, step=7, holds=True)
PREPARED = A._replace(phase=MemberPhase.PREPARED, prepared=True)
FROZEN = A._replace(phase=MemberPhase.FROZEN)


def test_a_step_is_committed_after_the_vote() -> None:
    member, todo = A.averaged()
    assert (member, todo) == (PREPARED, (Vote(3, 7),))
    assert member.voted(3, change=False) == (A._replace(step=8), (Commit(7),))


def test_a_vote_that_ends_late_does_not_count() -> None:
    frozen, todo = PREPARED.lost(3)
    assert todo == (Abort(3), Publish(3, Standing(7, prepared=True)))
    assert frozen.voted(3, change=False) == (frozen, ())
    assert PREPARED.voted(2, change=False) == (PREPARED, ())
    assert frozen.lost(3) == (frozen, ())


def test_a_vote_for_a_change_freezes_after_the_commit() -> None:
    member, todo = PREPARED.voted(3, change=True)
    assert todo == (Commit(7), Abort(3), Publish(3, Standing(8, prepared=False)))
    assert member.phase is MemberPhase.FROZEN


@pytest.mark.parametrize(
    ("standings", "gone", "lobby", "proposed"),
    [
        pytest.param(
            {"a": Standing(7, True), "b": Standing(7, True)}, "", (), View(4, ("a", "b"), 8), id="all prepared: forward"
        ),
        pytest.param(
            {"a": Standing(7, True), "b": Standing(7, False)}, "", (), View(4, ("a", "b"), 7), id="else again"
        ),
        pytest.param(
            {"a": Standing(7, True), "b": Standing(8, False)}, "", (), View(4, ("a", "b"), 8), id="one has committed"
        ),
        pytest.param({"a": Standing(7, True)}, "b", (), View(4, ("a",), 8), id="the other is gone: forward"),
        pytest.param({"a": Standing(7, True)}, "", (), None, id="the other has not published yet"),
        pytest.param(
            {"a": Standing(7, False)}, "bd", ("c", "d"), View(4, ("a", "c"), 7, ("c",)), id="a joiner, and a dead one"
        ),
        pytest.param(
            {"a": Standing(7, False, leaving=True), "b": Standing(7, False, holds=False)},
            "",
            (),
            View(4, ("a", "b"), 7, ("b",)),
            id="a leaver with the only state stays",
        ),
        pytest.param(
            {"a": Standing(7, False), "b": Standing(7, False, leaving=True)}, "", (), View(4, ("a",), 7), id="a leave"
        ),
        pytest.param(
            {"a": Standing(7, True), "b": Standing(7, False, leaving=True)},
            "",
            (),
            View(4, ("a",), 7),
            id="a leaver is not prepared: again",
        ),
        pytest.param({"a": Standing(7, False, holds=False)}, "b", ("c",), None, id="nobody has the state"),
    ],
)
def test_the_next_view(
    standings: dict[str, Standing], gone: str, lobby: tuple[str, ...], proposed: View | None
) -> None:
    _, todo = FROZEN.look(HubState(standings, frozenset(gone), lobby))
    assert todo == (() if proposed is None else (Propose(proposed),))


def test_too_few_members_wait_for_joiners() -> None:
    member = FROZEN._replace(min_ranks=2)
    alone = HubState({"a": Standing(7, False)}, frozenset("b"))
    assert member.look(alone) == (member, ())
    assert member.look(alone._replace(lobby=("c",)))[1] == (Propose(View(4, ("a", "c"), 7, ("c",))),)


@pytest.mark.parametrize(
    ("standings", "gone", "min_ranks", "settled", "last"),
    [
        ({}, "b", 1, Drop(7), True),
        ({"b": Standing(8, False, leaving=True)}, "b", 1, Commit(7), True),
        ({"b": Standing(8, False)}, "", 2, Commit(7), False),
    ],
    ids=["the last member", "another has left with the step", "those who stay are too few"],
)
def test_a_leaver_does_not_wait(standings: Any, gone: str, min_ranks: int, settled: Any, last: bool) -> None:
    member = FROZEN._replace(prepared=True, leaving=True, min_ranks=min_ranks)
    mine = {"a": Standing(7, prepared=True, leaving=True)}
    member, todo = member.look(HubState(mine | standings, frozenset(gone)))
    assert member.phase is MemberPhase.OUT
    assert todo == (settled, Stop("it has left", last))
    told_later = FROZEN._replace(leaving=True, min_ranks=3)
    assert told_later.look(HubState({"a": Standing(7, False)} | standings, frozenset("b"))) == (told_later, ())


@pytest.mark.parametrize(
    ("standings", "gone", "todo"),
    [
        ({"a": Standing(7, True)}, "b", Commit(7)),
        ({"a": Standing(7, True), "b": Standing(7, False)}, "", Drop(7)),
        ({"a": Standing(7, True), "b": Standing(8, False)}, "b", Commit(7)),
        ({}, "", Drop(7)),
    ],
    ids=["all are prepared", "another is not", "another has committed", "the hub is away"],
)
def test_a_member_that_gives_up_is_where_the_next_view_would_be(standings: Any, gone: str, todo: Any) -> None:
    member, found = FROZEN._replace(prepared=True).give_up(HubState(standings, frozenset(gone)))
    assert found == (todo,)
    assert member.step == 7 + isinstance(todo, Commit)


@pytest.mark.parametrize(
    ("member", "step", "todo"),
    [
        (FROZEN._replace(prepared=True), 8, (Commit(7),)),
        (FROZEN._replace(prepared=True), 7, (Drop(7),)),
        (FROZEN._replace(step=8), 8, (Drop(8),)),
        (FROZEN._replace(holds=False, prepared=True), 8, (Drop(7),)),
    ],
    ids=["forward", "again", "it has committed", "it has no state yet"],
)
def test_a_view_is_applied(member: Member, step: int, todo: tuple[Any, ...]) -> None:
    view = View(4, ("a",), step, () if member.holds else ("a",))
    after, done = member.look(HubState({}, next=view))
    assert done == (*todo, Enter(view))
    assert (after.phase, after.step, after.prepared, after.view) == (MemberPhase.OPEN, step, False, view)


def test_a_member_that_was_taken_for_dead_stops() -> None:
    member, todo = PREPARED.look(HubState({}, next=View(4, ("b",), 7)))
    assert member.phase is MemberPhase.OUT
    assert todo[:2] == (Abort(3), Drop(7))
    assert isinstance(todo[2], Stop)
    assert "taken for dead" in todo[2].why


def test_a_joiner_waits_in_the_lobby_and_then_for_the_state() -> None:
    joiner = Member("c")
    assert joiner.look(HubState({}, next=FIRST)) == (joiner, ())
    view = View(4, ("a", "c"), 7, ("c",))
    member, todo = joiner.look(HubState({}, next=view))
    assert todo == (Enter(view),)
    assert not member.holds
    assert member.averaged()[1] == (Vote(4, 7),)  # it has contributed zeros
    first = member._replace(view=view._replace(begins=True))
    assert first.averaged() == (first, ())
    assert first.received()[0].averaged()[1] == (Vote(4, 7),)


def test_members_freeze_when_the_hub_knows_more() -> None:
    assert A.look(HubState({})) == (A, ())
    for board in (HubState({}, frozenset("b")), HubState({"b": Standing(7, False)})):
        assert A.look(board)[1] == (Abort(3), Publish(3, Standing(7, prepared=False)))
