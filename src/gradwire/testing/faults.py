"""`Chaos`: faults at chosen places in the members of an elastic run, drawn from a seed.

Note [What a draw depends on]
Each time that a member passes a place is a *visit*. Whether a fault fires there depends on the seed, the member, the place, the
step, and the number of the visit to this place in this step. A member is its host and its number, without the random part of its
id, so that a run with the same seed and the same members has the same faults at the same places, except those that would leave too
few members, which the record shows. A process that replaces a member has another number, and faults of its own. Where the place is
a call, the draw also decides whether the fault fires before the call or after it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gradwire.elasticity.deal import fixed_hash
from gradwire.elasticity.machine import View
from gradwire.elasticity.performer import Performer
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.training import Training
from gradwire.errors import UsageError
from gradwire.runtime.fault_record import FILE, LASTING, record_fault

PLACES = ("forward", "bucket in flight", "vote", "optimizer", "view change", "join", "hub write")
"""A batch is handed out; a reduction was launched in backward; a member is prepared; the optimizer steps; a member follows and
enters a view; the same for one that receives its state; a standing, a view or a meeting is recorded at the hub."""
KINDS = ("kill", "stop", "term", "raise", "slow", "gil", "shm")
"""SIGKILL; SIGSTOP, and SIGCONT some seconds later; SIGTERM; an `InjectedFault`; a sleep; a sleep that holds the GIL; no room in
shared memory for this process, for some seconds."""


class InjectedFault(RuntimeError):
    """What `Chaos` raises."""


class Chaos:
    """Injects faults into a member of an elastic run. Use it in every member, with the same arguments.

    `rate` is the probability of a fault at each visit to a place, one number or one for each of `PLACES`; a place that is not named
    has none. One of `kinds`, see `KINDS`, is drawn for each fault. Those that take time take so many `seconds`. Those that end a
    member fire only where at least so many others (`least`) are in its view with the state, and none of them is ended by a fault in
    the same `record`: a run whose last member dies is lost.
    Each fault is appended to the file `record` before it happens (default: `faults.jsonl` in the run's directory, if it has one).

    >>> chaos = Chaos(seed=7, kinds=["kill", "slow"], rate={"vote": 0.01, "join": 0.1})
    >>> chaos.watch()  # doctest: +SKIP
    >>> run = gw.elastic(model, optimizer, data=data)  # doctest: +SKIP
    """

    def __init__(
        self,
        seed: int,
        kinds: Sequence[str],
        rate: float | Mapping[str, float],
        *,
        record: str | Path | None = None,
        seconds: float = 2.0,
        least: int = 1,
    ) -> None:
        self.seed = int(seed)
        self.kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        self.rates = dict(rate) if isinstance(rate, Mapping) else dict.fromkeys(PLACES, rate)
        self.seconds = seconds
        self.least = least
        directory = os.environ.get("GRADWIRE_RUN_DIR")
        self.record = record or (Path(directory) / FILE if directory else None)
        self._visits: dict[tuple[str, str], tuple[int, int]] = {}
        for what, names, known in (("kinds", self.kinds, KINDS), ("rate", self.rates, PLACES)):
            if not names or not set(names).issubset(known):
                wrong = ", ".join(repr(name) for name in names if name not in known) or "nothing"
                raise UsageError(f"Chaos({what}=...): {wrong} is not known there. Choose from {', '.join(known)}.")
        for place, value in self.rates.items():
            if not 0 <= value <= 1:
                raise UsageError(
                    f"Chaos(rate={value!r}) at {place}: it is the probability of a fault at each visit. Choose one from 0 to 1."
                )

    def watch(self, run: ElasticRun | None = None) -> None:
        """Inject faults into this run. Without one, into every run that this process starts from here on: then also while it joins,
        which `gw.elastic` does before it returns."""
        if run is not None:
            return self._watch(run.performer)
        join = Performer.join

        def watched(performer: Performer, step: int) -> None:
            self._watch(performer)
            join(performer, step)

        Performer.join = cast(Any, watched)  # type: ignore[method-assign]
        return None

    def _watch(self, performer: Performer) -> None:
        training = performer.training

        def wrap(owner: Any, name: str, place: str | Callable[..., str], when: str = "") -> None:
            """Let every call of this method visit the place."""
            call = getattr(owner, name)

            def visiting(*args: Any, **options: Any) -> Any:
                fault = self._draw(performer, place if isinstance(place, str) else place(*args), when)
                if fault["when"] == "before":
                    self._fire(performer.member.view, training, fault)
                result = call(*args, **options)
                if fault["when"] == "after":
                    self._fire(performer.member.view, training, fault)
                return result

            setattr(owner, name, visiting)

        data = training.data
        wrap(training.model if data is None else data, "forward" if data is None else "batch", "forward", "before")
        wrap(training.replica.reducer.reductions, "_launch", "bucket in flight", "after")
        wrap(performer, "_vote", "vote", "before")
        wrap(training, "update", "optimizer")
        for name in ("follow", "enter"):
            wrap(training, name, lambda view, *_: "join" if performer.member.me in view.fresh else "view change")
        for name in ("publish", "propose", "announce"):  # of the thread that trains
            wrap(performer._records, name, "hub write")

    def _draw(self, performer: Performer, place: str, when: str) -> dict[str, Any]:
        """The fault that fires at this visit, or one that never does. See Note [What a draw depends on]."""
        member = performer.member
        step = member.step if place in ("join", "hub write") else performer.training.committed
        at, visit = self._visits.get((member.me, place), (-1, 0))
        visit = visit + 1 if at == step else 0
        self._visits[member.me, place] = step, visit
        name = member.me.rsplit("-", 2)  # host, random part, number
        facts = self.seed, name[0], name[-1], place, step, visit
        draw = fixed_hash("kind", *facts)
        kind = self.kinds[draw % len(self.kinds)]
        if fixed_hash(*facts) >= self.rates.get(place, 0.0) * 2**63:
            return {"when": "never"}
        when = when or ("after" if draw >> 32 & 1 else "before")
        return dict(member=member.me, kind=kind, place=place, when=when, step=step, epoch=member.epoch)  # noqa: C408

    def _fire(self, view: View | None, training: Training, fault: dict[str, Any]) -> None:
        view = view or View(-1, (), 0)
        without = {fault["member"], *(view.fresh if training.joins.streams or training.committed <= view.step else ())}

        def too_few(ended: set[str]) -> bool:
            return fault["kind"] not in LASTING and len({*view.members} - without - ended) < self.least

        if too_few(set()) or (self.record is not None and not record_fault(self.record, unless=too_few, **fault)):
            return
        where = "{place} of step {step} on {member}".format(**fault)
        training.group.ledger.events.warn(f"injected fault: {fault['kind']} at {where}", step=fault["step"])
        inject(fault["kind"], self.seconds, where)


def inject(kind: str, seconds: float, where: str) -> None:
    """Do this to the present process now; see `KINDS`."""
    match kind:
        case "raise":
            raise InjectedFault(f"{where}: a fault injected by gradwire.testing.faults. Nothing else is wrong here.")
        case "slow":
            time.sleep(seconds)
        case "gil":
            ctypes.PyDLL(None).usleep(round(seconds * 1e6))  # PyDLL, and not CDLL, keeps the GIL
        case "shm":
            _fill_shared_memory(time.monotonic() + seconds)
        case "stop":
            command = f"sleep {seconds}; kill -s CONT {os.getpid()}"
            null = subprocess.DEVNULL
            with subprocess.Popen(["/bin/sh", "-c", command], stdin=null, stdout=null, stderr=null):
                os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)


def _fill_shared_memory(until: float) -> None:
    reserve = os.posix_fallocate

    def full(*where: int) -> None:
        if time.monotonic() < until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*where)

    os.posix_fallocate = full
