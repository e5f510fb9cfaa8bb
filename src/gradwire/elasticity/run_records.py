"""`RunRecords`: what members and launchers of one run write into the hub, and what they read from it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.elasticity.hub import HubClient, Records
from gradwire.elasticity.machine import HubState, Member, Standing, View


class HubFacts(NamedTuple):
    """What the hub knows that concerns one process."""

    version: int = 0
    view: View | None = None
    """The first one with this process."""
    last: View | None = None
    """The last one of the run."""
    lost: View | None = None
    """The last one, if all its members have ended, but for those that had not received the state: nobody has it."""
    here: tuple[str, ...] = ()
    """Those that wait in the lobby."""
    complete: bool = False
    """Whether the run can begin: all are here with which it should, less those that have ended."""
    away: bool = False
    """Whether no member of the last one can be reached, for now at least."""
    left: bool = False
    """Whether this process has recorded that it leaves."""
    ended: bool = False
    """Whether training has ended."""


class RunRecords:
    """What members and launchers write into the hub and read from it: views, standings, the gone and the lobby. For one thread."""

    def __init__(self, hub: HubClient | Records) -> None:
        self.hub = hub
        self._forget()

    def _forget(self) -> None:
        self._version = 0
        """That of what follows: only what is later is read again."""
        self._values: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Those that are not empty, by kind and name, but for the following. The lobby is without those that are in a view."""
        self._views: dict[int, View] = {}
        self._standings: dict[int, dict[str, Standing]] = {}
        self._taken: set[str] = set()
        """All that are or were in a view."""

    def publish(self, epoch: int, me: str, standing: Standing) -> None:
        self.hub.compare_set(f"standing/{epoch}/{me}", "", json.dumps(standing))

    def first_view(self, member: Member, here: Sequence[str], step: int) -> View | None:
        """The one with which a run begins, if this member is to begin it: it is the first of those that are here."""
        here = sorted(here, key=lambda one: (len(one), one))[: member.max_ranks]
        if len(here) < member.min_ranks or here[0] != member.me:
            return None
        view = self.propose(View(0, tuple(here), step, tuple(here[1:]), begins=True))
        return view if member.me in view.members else None

    def propose(self, view: View) -> View:
        """Record the view, unless there is one of its epoch: returns that which is recorded."""
        return _view(self.hub.compare_set(f"view/{view.epoch}", "", json.dumps(view)))

    def enter_lobby(self, me: str, starters: int = 0) -> None:
        """It is ready to join. `starters`, if not 0, is the number of members with which the run begins."""
        if starters:
            self.hub.compare_set("starters", "", str(starters))
        self.hub.compare_set(f"lobby/{me}", "", "ready")

    def announce(self, epoch: int, where: str) -> None:
        """The members of this view meet there."""
        self.hub.compare_set(f"meeting/{epoch}", "", where)

    def meeting(self, epoch: int, wait: float) -> str | None:
        """Where the members of this view meet; waits at most so long for anything new."""
        if str(epoch) not in self._values["meeting"]:
            self._read(self._version, wait)
        return self._values["meeting"].get(str(epoch))

    def end(self, step: int) -> None:
        """Training has ended with this step: nobody joins any more."""
        self.hub.compare_set("ended", "", str(step))

    def begin(self, what: str) -> str:
        """Record what run this is, unless one has begun here: returns what is recorded; with "", nothing if none has."""
        return self.hub.compare_set("run", "", what)

    def hold(self, member: str, *, spare: bool) -> None:
        """A spare is not in the lobby of others, until a launcher lets it take the place of a rank."""
        self.hub.compare_set(f"spare/{member}", "" if spare else "spare", "spare" if spare else "")

    def leave(self, me: str) -> None:
        """This process ends since it was told to, and not since training has finished."""
        self.hub.compare_set(f"left/{me}", "", "left")

    def mark(self, member: str, *, gone: bool) -> None:
        """Its process has ended or is stopped; or, not `gone`, it continues."""
        self.hub.compare_set(f"gone/{member}", "" if gone else "gone", "gone" if gone else "")

    def look(self, epoch: int, after: int = -1, wait: float = 0.0) -> tuple[int, HubState]:
        """What concerns the members of the view of this epoch; waits at most so long for anything later than version `after`."""
        self._read(after, wait)
        standings, following = dict(self._standings.get(epoch, {})), self._views.get(epoch + 1)
        return self._version, HubState(standings, self._out_of_reach, tuple(self._lobby), following)

    def arrive(self, me: str, number: int) -> None:
        """This member is at the end of the round of this number."""
        before = self._values["arrived"].get(me, "")
        if before != str(number):
            self.hub.compare_set(f"arrived/{me}", before, str(number))

    def arrived(self, number: int) -> set[str]:
        """The members that are at the end of the round of this number, as of the last `look`."""
        return {member for member, last in self._values["arrived"].items() if last == str(number)}

    def last_view(self) -> View | None:
        """The view of the latest epoch."""
        return self.facts("").last

    def facts(self, process: str, after: int = -1, wait: float = 0.0) -> HubFacts:
        """What concerns this process; waits as `look` does."""
        self._read(after, wait)
        views, gone = self._views, self._out_of_reach
        here = tuple(one for one in self._lobby if one not in gone)
        mine = next((view for view in views.values() if process in view.members), None)
        last = views[max(views)] if views else None
        starters = self._values["starters"].get("")
        complete = last is None and starters is not None and len(gone) + len(here) >= int(starters)
        lost = None
        if last is not None:  # a silent host may be back
            standings = {} if last.begins else self._standings.get(last.epoch, {})
            without = {one for one, standing in standings.items() if not standing.holds}
            lost = last if without.union(self._values["gone"]).issuperset(last.members) else None
        away = last is not None and gone.issuperset(last.members)
        left, ended = process in self._values["left"], bool(self._values["ended"])
        return HubFacts(self._version, mine, last, lost, here, complete, away, left, ended)

    @property
    def _lobby(self) -> list[str]:
        """Those that are ready to join, but spares."""
        return [one for one in self._values["lobby"] if one not in self._values["spare"]]

    @property
    def _out_of_reach(self) -> frozenset[str]:
        """The gone, and all whose launcher is silent."""
        gone, silent = self._values["gone"], self._values["silent"]
        known = self._taken.union(self._values["lobby"]) if silent else ()
        return frozenset([*gone, *(member for member in known if launcher_of(member) in silent)])

    def hurry(self, seconds: float) -> None:
        """From now on a call tries for at most so long to reach the hub."""
        if isinstance(self.hub, HubClient):
            self.hub.timeout = min(self.hub.timeout, seconds)

    def close(self) -> None:
        if isinstance(self.hub, HubClient):
            self.hub.close()

    def _read(self, after: int, wait: float) -> None:
        version, changes = self.hub.read("", self._version, wait if after >= self._version else 0.0)
        if version < self._version:
            self._forget()
        self._version = version
        for key, value in changes.items():
            kind, _, name = key.partition("/")
            if kind == "view":
                self._views[int(name)] = view = _view(value)
                self._taken.update(view.members)
            elif kind == "standing":
                epoch, _, name = name.partition("/")
                self._standings.setdefault(int(epoch), {})[name] = Standing(*json.loads(value))
            elif value:
                self._values[kind][name] = value
            else:
                self._values[kind].pop(name, None)
        lobby = self._values["lobby"]
        for member in self._taken.intersection(lobby):
            del lobby[member]


def launcher_of(member: str) -> str:
    """The launcher that has started this process: with its name the ids of its processes begin. Itself, if none has."""
    return member.rpartition("-")[0] or member


def _view(text: str) -> View:
    epoch, members, step, fresh, begins = json.loads(text)
    return View(epoch, tuple(members), step, tuple(fresh), begins)
