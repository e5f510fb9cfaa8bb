"""`ElasticSupervisor`: as `Supervisor`, but a rank that dies is replaced and the run goes on.

The hub is told of every process that has ended or is stopped; ranks agree there who trains on. `replacement.py` decides who is
replaced, once the hub has answered: while it is away nobody could join anyway.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gradwire.elasticity.hub import Address
from gradwire.elasticity.machine import View
from gradwire.elasticity.run_records import HubFacts, RunRecords
from gradwire.errors import TooFewMembers, UsageError, UsageRuntimeError, UsageTypeError
from gradwire.launch.chaos_schedule import FAULTS, ChaosSchedule
from gradwire.launch.environment import ELASTIC, HUB, HUB_KEY, MEMBER, STARTERS
from gradwire.launch.hub_host import HubCalls, HubHost, host_and_port
from gradwire.launch.process import RankProcess
from gradwire.launch.replacement import Replacement, Verdict
from gradwire.launch.screen import RankStream
from gradwire.launch.shutdown import Ending, described
from gradwire.launch.supervise import COMPANIONS, LaunchSpec, Supervisor
from gradwire.observe.rings.views import ENDS
from gradwire.observe.units import plural
from gradwire.runtime.fault_record import FILE, record_fault
from gradwire.runtime.rank_error import MAIN, RankError

_PERIOD = 0.1
"""Seconds between two looks at the state of all processes."""
_HUB_PAUSE = 1.0
"""Seconds from one start of a hub that ends by itself to the next; one that was killed is started again at once."""
MOST_RECORDED = 50
_REFUSALS = {error.__name__ for error in (UsageError, UsageTypeError, UsageRuntimeError)}
_AWAY = 3.0
"""Seconds without an answer of the hub after which that is said."""
_STOP = 2.0
"""Seconds for which a rank is stopped by `--chaos`."""


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """How the members of a run may change, and the hub where they are recorded."""

    min_ranks: int
    """0 if the run was begun by another launcher."""
    limits: str
    """The least and the largest number of ranks of the whole run, as `2:8`."""
    address: Address
    key: bytes
    hub: HubHost | None = None
    """The hub, if it is this launcher's own."""
    spares: int = 0
    """How many of the environments, the last ones, are of spares."""
    chaos: ChaosSchedule | None = None
    """Faults to inject."""
    begins: bool = True
    """Whether its ranks may be the first of the run."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What all ranks of the run have in their environment."""
        return {HUB: host_and_port(self.address), HUB_KEY: self.key.hex(), ELASTIC: self.limits}


class ElasticSupervisor(Supervisor):
    """The loop around processes that come and go, each in a place with the number of a rank."""

    def __init__(self, run: LaunchSpec, plan: ElasticPlan) -> None:
        super().__init__(run)
        self._plan = plan
        self._launcher = name = f"{socket.gethostname().partition('.')[0][:16]}-{secrets.token_hex(2)}"
        ranks = len(run.environments) - plan.spares
        self._members = Replacement(name, ranks=ranks, spares=plan.spares, min_ranks=plan.min_ranks)
        self._undecided: dict[int, Ending] = {}
        """Ranks that have ended, while the hub has not answered."""
        self._timers: dict[int, tuple[float, Callable[[int], None]]] = {}
        """What will be done about a place, and when."""
        self._dismissed: set[int] = set()
        """Places of processes that were told to end, since there is nothing left for them to do."""
        self._replaced: list[tuple[float, RankProcess, tuple[RankStream, RankStream]]] = []
        """Processes whose companions still run, and until when: see Note [When everything has been read]."""
        self._stopped, self._suspended = frozenset[str](), set[str]()
        """Members that were stopped at the last look, and those that are marked as gone for it."""
        self._away = False
        """Whether the hub has not answered for a while."""
        self._ended: list[str] = []
        """Processes that have died or left and are recorded. A ring takes 5 MiB, so the last ones are kept."""
        self._trains_since = math.inf
        """When the first view was seen; only for `--chaos`."""
        self._next_period = self._hub_started = 0.0
        self._calls = HubCalls(plan.address, plan.key, name)

    def start(self, stack: ExitStack) -> None:
        stack.callback(self._calls.close)
        if (hub := self._plan.hub) is not None:
            self._display.say([f"the hub of this run is {host_and_port(hub.address)} (process {hub.start()})"])
            self._calls.add(lambda run: run.begin(self._plan.limits))
        super().start(stack)
        self._selector.register(self._calls.answered, selectors.EVENT_READ, self._calls.take)
        if (store := self._run.store) is not None and store.ended >= 0:
            self._selector.unregister(store.ended)  # an elastic run does not end with it

    def _start_all(self) -> None:
        starters = self._members.ranks if self._plan.begins else 0
        for number, place in enumerate(self._members.places):
            self._begin(number) if place.spare else self._start_member(number, starters)

    def _begin(self, number: int) -> None:
        """Start a process that comes later; that of a spare once it is recorded as one."""
        member, spare = self._members.places[number].member, self._members.places[number].spare
        record = functools.partial(RunRecords.hold, member=member, spare=True) if spare else (lambda run: None)
        self._calls.add(record, lambda _: self._start_member(number))

    def _start_member(self, number: int, starters: int = 0) -> None:
        self._take_signals()  # one of them may have ended the run
        if self._shutdown.has_begun or number not in self._shutdown.running:
            return
        place = self._members.places[number]
        mine = {MEMBER: place.member, **({STARTERS: str(starters)} if starters else {})}
        try:
            self._start_rank(number, {**self._run.environments[number], **mine})
            place.started = self._now
        except OSError as error:
            self._shutdown.lose(f"starting a process in place of rank {number}: {error.strerror}", self._now)

    def _error(self, rank: int, suffix: str = MAIN, member: str = "") -> RankError | None:
        return super()._error(rank, suffix, self._members.places[rank].member)

    def _end_of(self, ending: Ending) -> None:
        number = ending.rank
        member = self._members.places[number].member
        self._suspended.discard(member)
        if number in self._dismissed:
            self._mark(member, gone=True)
            return self._give_up_place(number)
        self._undecided[number] = ending
        return self._calls.add(functools.partial(_record_end, member), functools.partial(self._decide, number))

    def _decide(self, number: int, facts: HubFacts) -> None:
        if (ending := self._undecided.pop(number, None)) is None:
            return
        places = self._members.places
        if facts.lost is not None and not self._suspended.isdisjoint(facts.lost.members):
            facts = facts._replace(lost=None)
        member, lived = places[number].member, ending.after - (places[number].started or 0.0)
        error = ending.error
        gave_up = error is not None and error.name == TooFewMembers.__name__
        refused = error is not None and error.starting and error.name in _REFUSALS
        verdict, delay, promoted = self._members.ended(
            number, ending.status, facts, ending.after, gave_up=gave_up, refused=refused
        )
        if verdict in (Verdict.FINISHED, Verdict.FAILED):
            self._shutdown.ended(ending)
        else:
            what = "has left" if verdict is Verdict.LEFT else f"died: {_how(ending, lived)}"
            if promoted is not None:
                what += f"; replaced by the spare {places[promoted].member} (rank {promoted})"
                self._calls.add(functools.partial(RunRecords.hold, member=places[promoted].member, spare=False))
            elif delay is not None:
                what += f"; replaced by {places[number].member}{f' in {delay:.0f} s' if delay else ''}"
            self._note(member, verdict.value, f"rank {number} ({member}) {what}")
            self._part_with(number)
            if delay is None:
                self._shutdown.running.discard(number)
            else:
                self._timers[number] = self._now + delay, self._begin
        for other in self._members.dispensable(facts):
            if other not in self._ranks:
                self._give_up_place(other)
            elif other not in self._dismissed and other not in self._undecided:
                self._dismissed.add(other)
                self._send(other, signal.SIGTERM)
                self._timers[other] = self._now + self._run.grace, functools.partial(self._send, number=signal.SIGKILL)

    def _give_up_place(self, number: int) -> None:
        self._timers.pop(number, None)
        self._members.places[number].member = ""
        self._shutdown.running.discard(number)
        if number in self._ranks:
            self._part_with(number)

    def _part_with(self, number: int) -> None:
        """Release what is left of a process that has ended, for another one in its place."""
        self._replaced.append((self._now + COMPANIONS, self._ranks.pop(number), self._streams[number]))
        self._release()

    def _release(self, *, all_of_them: bool = False) -> None:
        waiting, self._replaced = self._replaced, []
        for until, process, streams in waiting:
            if not all_of_them and self._now < until and process.companions():
                self._replaced.append((until, process, streams))
                continue
            self._end_streams(process, streams)
            for pipe in (process.stdout, process.stderr):
                if pipe.fileno() in self._selector.get_map():
                    self._selector.unregister(pipe.fileno())
            process.release()

    def _end_companions(self) -> None:
        super()._end_companions()
        self._release(all_of_them=True)

    @property
    def _next_time(self) -> float:
        return min([self._next_period, super()._next_time, *(at for at, _ in self._timers.values())])

    def _look(self) -> None:
        super()._look()
        now = self._now
        late = {number for number, ending in self._undecided.items() if now > ending.after + self._run.grace}
        if self._shutdown.has_begun or (
            late and self._shutdown.running <= late
        ):  # the hub does not answer, and all have ended
            for number in self._shutdown.running - self._ranks.keys():
                self._give_up_place(number)
            for number in list(self._undecided):
                self._shutdown.ended(self._undecided.pop(number))
        for number in [number for number, (at, _) in self._timers.items() if now >= at]:
            self._timers.pop(number)[1](number)
        if now >= self._next_period:
            self._next_period = now + _PERIOD
            self._check_hub()
            self._check_stopped()
            self._release()
            if (chaos := self._plan.chaos) is not None and not (self._shutdown.has_begun or self._members.finished):
                self._inject_faults(chaos)

    def _check_stopped(self) -> None:
        """A process that is stopped at two looks is gone; when it continues, it is not, unless the others have gone on by then."""
        places = self._members.places
        numbers = {places[number].member: number for number, process in self._ranks.items() if process.stopped}
        for member in (self._stopped & numbers.keys()) - self._suspended:
            self._note(
                member, "stopped", f"rank {numbers[member]} ({member}) is stopped: it does not count until it continues"
            )
            self._mark(member, gone=True)
        for member in self._suspended - numbers.keys():
            self._mark(member, gone=False)
        self._suspended = (self._suspended | self._stopped) & numbers.keys()
        self._stopped = frozenset(numbers)

    def _note(self, member: str, kind: str, text: str, **facts: Any) -> None:
        """Show what has happened to a process, and record it for reports."""
        self._display.say([text])
        if (directory := self._run.directory) is None:
            return
        with contextlib.suppress(OSError):
            record_fault(directory / FILE, member=member, kind=kind, text=text, **facts)
        self._ended += [member] * (kind in ENDS)
        for path in directory.glob(f"rank-{self._ended.pop(0)}.*") if len(self._ended) > MOST_RECORDED else ():
            path.unlink(missing_ok=True)

    def _mark(self, member: str, *, gone: bool) -> None:
        self._calls.add(lambda run: run.mark(member, gone=gone))

    def _check_hub(self) -> None:
        waits = any(self._now > ending.after + _AWAY for ending in self._undecided.values())
        if waits and not self._away:
            ended, where = plural(len(self._undecided), "rank"), host_and_port(self._plan.address)
            self._display.say(
                [f"{ended} ended, and the hub at {where} does not answer: members cannot change until it does"]
            )
        self._away = waits
        hub, lived = self._plan.hub, self._now - self._hub_started
        status = None if hub is None or hub.process is None else hub.process.poll()
        if hub is None or status is None or (status >= 0 and lived < _HUB_PAUSE):
            return
        how = described(status, lived)
        self._note("hub", "ended", f"the hub has ended ({how}): started again with its records (process {hub.start()})")
        self._hub_started = self._now

    def _inject_faults(self, chaos: ChaosSchedule) -> None:
        if self._trains_since == math.inf:  # deaths before the first view would show that the script cannot start
            self._calls.add(RunRecords.last_view, self._training_began)
        for kind, which in chaos.due(self._now - self._trains_since):
            ranks = sorted(self._ranks.keys() - self._undecided.keys() - self._dismissed)
            if kind != "hub" and not ranks:
                continue
            rank = None if kind == "hub" else ranks[int(which * len(ranks))]
            member = kind if rank is None else self._members.places[rank].member
            what = f"{FAULTS[kind].name} to {'the hub' if rank is None else f'rank {rank} ({member})'}"
            self._note(member, kind, f"chaos: {what}", place="launcher")
            if rank is not None:
                self._send(rank, FAULTS[kind])
                if kind == "stop":
                    self._timers[rank] = self._now + _STOP, functools.partial(self._send, number=signal.SIGCONT)
            elif self._plan.hub is not None and self._plan.hub.process is not None:
                self._plan.hub.process.kill()

    def _training_began(self, view: View | None) -> None:
        self._trains_since = self._trains_since if view is None else min(self._trains_since, self._now)

    def _send(self, rank: int, number: signal.Signals) -> None:
        if rank in self._ranks:
            self._signal(self._ranks[rank], number)

    def _signal(self, process: RankProcess, number: int) -> None:
        """To leave is for the rank to do: what it has started, as workers that load data, is needed until then."""
        if number != signal.SIGTERM:
            return super()._signal(process, number)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.ended, number)
        return None

    def run(self) -> int:
        code, members = super().run(), self._members
        if members.died or members.left:
            died = plural(members.died, "rank")
            self._display.say([f"{died} died, {members.replaced} replaced, {members.left} left"])
        return code


def _how(ending: Ending, lived: float) -> str:
    if not ending.status:
        return "the others have gone on without it"
    how, error = described(ending.own_status, lived), ending.error
    return how if error is None else f"{error.name}: {''.join(error.text.splitlines()[:1])} ({how})"


def _record_end(member: str, run: RunRecords) -> HubFacts:
    """Record that a process has ended, and return what the hub knows of it."""
    run.mark(member, gone=True)
    return run.facts(member)
