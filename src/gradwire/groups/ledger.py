"""The state of one group on one rank: numbers operations, tracks those in flight, calls listeners and hooks, and records whether
the group has failed or was closed.

A wrapper without operations of its own shares its inner group's ledger, so an operation is counted once.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from gradwire.collectives import Collective, OpKind
from gradwire.errors import UNEVEN, CollectiveTimeout, GroupAborted, HookError, PeerLost
from gradwire.events import CollectiveFailed, CollectiveFinished, CollectiveStarted, CollectiveSubmitted
from gradwire.groups.completion import CompletionHooks, FutureThreads
from gradwire.groups.work import Work
from gradwire.recorder import writer
from gradwire.recorder.format import EPOCH_SHIFT, NO_PEER, ON_DEVICE, RecordKind, message_number
from gradwire.recorder.source import EventSource, derived_id
from gradwire.recorder.writer import FlightRecorder, summary

E = TypeVar("E", bound=BaseException)

# To look up a member of an Enum takes ten times as long.
_SUBMITTED = RecordKind.COLLECTIVE_SUBMITTED
_STARTED = RecordKind.COLLECTIVE_STARTED
_WAITED = RecordKind.COLLECTIVE_WAITED
_FINISHED = RecordKind.COLLECTIVE_FINISHED
_FAILED = RecordKind.COLLECTIVE_FAILED

profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler of torch's is on in this thread. Operations are then shown in it, as `gradwire:all_reduce`."""

CLOSED = f"it has closed its group and will not join. {UNEVEN}"
"""Why a rank is lost to an operation that waits for it."""

_unidentified: dict[tuple[str, str, int, int], int] = {}
"""How many groups without an identity were made, by kind, name, size and rank."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Which ranks have joined an operation and which have not, as far as this rank can know."""

    joined: tuple[int, ...]
    missing: tuple[int, ...]

    @classmethod
    def of(cls, joined: Collection[int], size: int) -> Arrivals:
        """Those that have joined, and the rest of `size` ranks."""
        return cls(tuple(sorted(joined)), tuple(rank for rank in range(size) if rank not in joined))


def chained(error: E, cause: BaseException) -> E:
    """`error` with its cause, but without the cause's traceback, whose frames would keep a group, and so its memory, alive."""
    error.__cause__ = cause.with_traceback(None)
    return error


class Ledger:
    """The operations of one group on one rank."""

    def __init__(self, *, name: str, rank: int, size: int, kind: str = "") -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.kind = kind
        """What sort of group it is, for people."""
        self.engines: Mapping[str, str] = {}
        """By type of device: which of torch's backends serves it, as far as that is known. Set it before `identify`."""
        self.pid = os.getpid()
        """The process that made the group: see forked.py."""
        self.events = EventSource(name, rank, 0)
        self.hooks = CompletionHooks(f"{name}, rank {rank}")
        self.hook_errors = self.hooks.errors
        self.futures = FutureThreads(f"{name}-{rank}")
        self.pending: dict[int, Work] = {}
        self.arrivals: Callable[[Work], Arrivals | None] = lambda work: None
        self.next_seq = itertools.count().__next__
        """The number of the next operation; they count from 0."""
        self._collectives = itertools.count(1)
        self._messages: dict[tuple[OpKind, int | None, int], int] = {}
        self._epoch = 0
        self._recorder: FlightRecorder | None = None
        self.failure: BaseException | None = None
        self.closed = False
        self.reported: BaseException | None = None
        """The group's failure that was already raised to the caller on this rank."""
        self.recoveries = 0
        """How often replicated models have recovered on this group after a failed step: equal on all ranks."""
        self.models = 0
        """How many models were wrapped over this group: on all ranks in the same order."""

    def identify(self, group_id: int | None) -> None:
        """Set the identity by which records name the group: the same on all its ranks, and no other group's. None: that of the n-th
        group of this kind, name and size on this rank, which is wrong only if ranks make such groups in different orders."""
        if group_id is None:
            facts = self.kind, self.name, self.size, self.rank
            _unidentified[facts] = number = _unidentified.get(facts, 0) + 1
            group_id = derived_id(*facts[:3], number)
        self.events.identify(group_id)
        if writer.active is not None:
            self._record_group(writer.active)

    def next_ordinal(self, op: Collective) -> int:
        """The number of the next collective, the same on all ranks, with the number of recoveries in its upper part: the ranks of a
        failed group have submitted different numbers of operations. Of a message, which one of its peer it is: `message_number`."""
        if not op.kind.is_p2p:
            return self._epoch << EPOCH_SHIFT | next(self._collectives)
        key = op.kind, op.peer, op.tag
        self._messages[key] = count = self._messages.get(key, -1) + 1
        return message_number(op.tag, count)

    def recovered(self) -> None:
        """The group can be used again, on all ranks: their collectives are counted from here."""
        self._epoch += 1
        self._collectives = itertools.count(1)
        self._messages.clear()

    def submitted(self, work: Work) -> None:
        work.ordinal = self.next_ordinal(work.op)
        self.pending[work.seq] = work
        if profiler_enabled():
            work.profiled = torch.ops.profiler._record_function_enter_new(f"gradwire:{work.op.kind.value}", None)
        self._report(_SUBMITTED, work, work.started)

    def started(self, work: Work, time: float) -> None:
        self._report(_STARTED, work, time)

    def waited(self, work: Work) -> None:
        """A caller waits for an operation in flight. Recorded once: one that runs in the background is not a hang."""
        if writer.active is not None and not work.waited_for:
            work.waited_for = True
            self.record(_WAITED, work, time.perf_counter())

    def settled(self, work: Work) -> None:
        self.pending.pop(work.seq, None)
        if (profiled := work.profiled) is not None:
            work.profiled = None
            torch.ops.profiler._record_function_exit._RecordFunction(profiled)
        if self.hooks:
            self.hooks.put(work.info)
        self._report(_FINISHED if work.exception() is None else _FAILED, work, work.finished or 0.0)

    def _report(self, kind: RecordKind, work: Work, at: float) -> None:
        """Something happened to an operation: listeners get an event, the flight recorder a record."""
        if self.events:
            facts = self.name, self.rank, work.seq, work.op.kind.value, work.op.label, work.op.nbytes
            if kind is _SUBMITTED:
                self.events.emit(CollectiveSubmitted(at, *facts))
            elif kind is _STARTED:
                self.events.emit(CollectiveStarted(at, *facts))
            elif (error := work.exception()) is None:
                self.events.emit(CollectiveFinished(at, *facts, work.duration or 0.0))
            else:
                self.events.emit(CollectiveFailed(at, *facts, work.duration or 0.0, error))
        if writer.active is not None:
            self.record(kind, work, at)

    def record(self, kind: RecordKind, work: Work, at: float) -> None:
        """Write what happened to an operation, at `at`, to the flight recorder, if there is one."""
        recorder, op, error = writer.active, work.op, work.exception()
        if recorder is not None:
            if recorder is not self._recorder:  # which may have been started after the group
                self._record_group(recorder)
            number = op.kind.number
            if kind is _SUBMITTED and not op.is_on_host:
                number |= ON_DEVICE
            peer, label = NO_PEER if op.peer is None else op.peer, op.label if error is None else summary(error)
            numbers = number, work.seq, work.ordinal, peer, work.duration or 0.0, at
            recorder.put(kind, self.events.member(recorder), numbers, label=label, nbytes=op.nbytes)

    def _record_group(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        recorder.put(RecordKind.GROUP, self.events.member(recorder), nbytes=self.size)
        facts = {"name": self.name, "kind": self.kind, "rank": self.rank, "size": self.size, "id": self.events.group_id}
        recorder.describe("group", {**facts, "engines": dict(self.engines)} if self.engines else facts)

    def fail_all(self, error: BaseException) -> None:
        for work in list(self.pending.values()):
            work.fail(error)

    def expire(self, work: Work) -> None:
        """The operation's deadline has passed: fail it, unless it has finished in the meantime."""
        if not work.is_completed():
            work.fail(self.timed_out(work, work.timeout))

    def timed_out(self, work: Work, limit: float) -> CollectiveTimeout:
        """The error for an operation that has not finished after `limit` seconds."""
        known = self.arrivals(work)
        if known is None:
            who = "This group cannot determine which ranks are missing."
        elif known.missing:
            who = f"Joined: ranks {list(known.joined)}; missing: ranks {list(known.missing)}."
        else:
            kernel = "" if work.op.is_on_host else "a kernel that was enqueued before it still runs, or "
            who = f"All ranks {list(known.joined)} have joined: {kernel}the engine or the link is slow or stuck."
        text = (
            f"{self.where(work)}: not finished after {limit:.3g} s. {who} Look at the missing ranks for an exception, a different "
            "order of operations or slow work between them; raise the timeout if they are just slow."
        )
        joined, missing = (None, None) if known is None else (known.joined, known.missing)
        return CollectiveTimeout(text, op=work.op.signature, joined=joined, missing=missing)

    def lost(self, rank: int, why: str, work: Work | None = None) -> PeerLost:
        """The error for a rank that is lost, and has been missed in `work` if there is one."""
        text = f"{self.where(work)}: rank {rank} is lost: {why}. Look at its output for the cause; make a new group to continue."
        return PeerLost(text, rank=rank, op=None if work is None else work.op.signature)

    def aborted(self, why: str, work: Work | None = None) -> GroupAborted:
        """The error for a group that another rank has aborted."""
        return GroupAborted(f"{self.where(work)}: the group was aborted: {why}", reason=why)

    def not_recovered(self, known: Arrivals, timeout: float) -> CollectiveTimeout:
        """The error for a recovery in which not all ranks have met."""
        who = f"ranks {list(known.missing)} have not called recover() within {timeout:.3g} s"
        text = f"recovery of {self.where(None)}: {who}. Every rank must call it after a failure."
        return CollectiveTimeout(text, joined=known.joined, missing=known.missing)

    def where(self, work: Work | None) -> str:
        """The beginning of an error message: the operation, or the group if there is none, and this rank."""
        what = self.name if work is None else f"{work.op} (operation #{work.seq} of {self.name})"
        return f"{what} on rank {self.rank} of {self.size}"

    def collect_hook_errors_of(self, part: Ledger) -> None:
        """Let this group's waits raise the errors of a part's completion hooks too: nothing waits on the part itself."""
        part.hook_errors = part.hooks.errors = self.hook_errors

    def raise_hook_error(self) -> None:
        """Raise the first kept error of a completion hook, once."""
        try:
            error: HookError = self.hook_errors.popleft()
        except IndexError:
            return
        raise error
