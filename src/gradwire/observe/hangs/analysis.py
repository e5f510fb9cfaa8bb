"""Hangs: which rank the others wait for, and what it does instead. Pure.

A collective that takes far longer than usual, and that a caller waits for, hangs. Ranks that have not submitted it keep the others
waiting; if all have, they disagree on what it is, or one of them was stopped in the middle of it, or does something else that
keeps its engine from it. A send or a receive hangs in the same way, with one other rank that may not have submitted its half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from operator import itemgetter
from typing import Any

from gradwire.observe.hangs import SOFT_DEADLINE
from gradwire.observe.hangs.gradient_questions import Awaited
from gradwire.observe.hangs.stacks import Frame, Stack, of_script, user_frames, user_line
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import Record, message_key
from gradwire.observe.stragglers.steps import Phase
from gradwire.recorder.format import EPOCH_SHIFT
from gradwire.runtime.host import ProcessState

TIMES_USUAL = 10
_OF_ANY_SIZE = frozenset({"gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"})
"""Collectives whose tensors may have other sizes on other ranks."""
_THREAD_WAITS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py", "/torch/autograd/graph.py")
"""Where a thread waits for others: the last is backward, which runs on a thread of its own for each GPU."""
_IDLE = (*_THREAD_WAITS, "/selectors.py", "/socket.py", "/concurrent/futures/thread.py")
_HOOK_DRIVERS = ("/gradwire/hooks/pump.py", "/gradwire/reducer/hook/torch_hooks.py")
_MOST_OTHERS = 3
_BEFORE_BACKWARD = (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)


class Cause(Enum):
    """What keeps a rank from a collective. The value is the name people read."""

    DEAD = "its process has ended"
    ENDED_SINCE = "the launcher has ended it since: what it did is not known any more"
    STOPPED = "its process is stopped"
    DATA_LOADER = "it waits for its data loader"
    HOOK = "it is in a communication hook"
    USER_CODE = "it is in user code"
    OTHER_COLLECTIVE = "it waits in another collective"
    DIFFERENT = "it has submitted a different collective"
    UNKNOWN = "it is not known what it does"


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A rank of a group."""

    rank: int
    """In the world; of threads that share a process and its ring, in the group."""
    number: int
    """In the group."""
    progress: RankProgress = field(repr=False)

    def _own(self, record: Record, among: Iterable[Record]) -> list[Record]:
        return [one for one in among if one.rank == self.number and is_same(one, record)]

    def waits_in(self, record: Record) -> bool:
        """Whether it has submitted this collective, which has not finished."""
        return bool(self._own(record, self.progress.pending.values()))

    def is_elsewhere(self, record: Record) -> bool:
        """Whether it has submitted this collective, which has not finished, and does not wait for it."""
        own = self._own(record, self.progress.pending.values())
        return bool(own) and not any(one.operation in self.progress.waited for one in own)

    def has_failed(self, record: Record) -> bool:
        """Whether it has submitted this collective, which has failed."""
        return bool(self._own(record, self.progress.failed))

    def submission(self, record: Record) -> Record | None:
        """What it has submitted as the collective of this ordinal, if that is among its last ones."""
        own = self.progress.submitted.get((record.group_id, self.number), ())
        return next((one for one in reversed(own) if one.ordinal == record.ordinal), None)

    def has_reached(self, record: Record) -> bool:
        """Whether it has submitted this collective or a later one; or this message."""
        if not record.ordinal:
            return bool(self._own(record, self.progress.messages))
        return self.progress.reached(record.group_id, self.number) >= record.ordinal

    @property
    def shares_process(self) -> bool:
        """Whether other ranks are threads of the same process."""
        return any(len(numbers) > 1 for numbers in self.progress.groups.values())

    @property
    def is_before_backward(self) -> bool:
        """Whether its records show that no gradient of the step is there. Threads share a ring, and have no phases."""
        return not self.shares_process and self.progress.phase in _BEFORE_BACKWARD


@dataclass(frozen=True, slots=True)
class LongWait:
    """A collective, a send or a receive in which ranks have waited for long."""

    record: Record
    """Its submission, on the rank that has waited for longest."""
    seconds: float
    """How long that rank has waited."""
    ranks: tuple[int, ...]
    """Ranks that wait in it."""
    missing: tuple[int, ...]
    """Ranks that have not submitted it."""
    members: tuple[GroupMember, ...]
    """The ranks that take part, in the order of the group, as far as they are recorded here."""
    unknown: int = 0
    """How many of those that take part are not recorded here."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that wait for other ranks, and not in a collective of gradwire."""

    seconds: float
    """Since when no rank has made progress."""
    ranks: tuple[int, ...]
    step: int
    where: Frame | None
    """The line of user code in which the first of them waits."""
    why: str = "collectives are not recorded"
    """Why nothing more is known."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the others wait for."""

    rank: int
    pid: int
    cause: Cause
    state: ProcessState
    stack: tuple[Frame, ...] = ()
    where: Frame | None = None
    """The innermost line of user code that it is in."""
    others: tuple[Frame, ...] = ()
    """If its main thread waits for other threads: the lines of user code that those run."""
    other: Record | None = None
    """The collective that it waits in, or has submitted, instead."""
    bucket: int = -1
    """The bucket that is not full there; -1 where that is not the reason."""
    parameters: tuple[str, ...] = ()
    """Those of the bucket without a gradient, if that is `certain`; else all of the bucket, one of which has none."""
    certain: bool = False
    member: str = ""
    """The id of its process in an elastic run."""


def find_waiting(
    ranks: Sequence[RankProgress], now: int, *, deadline: float = SOFT_DEADLINE, failed: bool = False
) -> LongWait | None:
    """The collective that ranks have waited in for longest, if that is longer than `deadline` seconds and ten times the usual.
    With `failed`, for a rank that has ended: whatever its length, also one that has failed since or that no caller waits for."""
    late = []
    for rank in ranks:
        for since, record in _waits(rank, failed=failed):
            limit = 0.0 if failed else max(deadline, TIMES_USUAL * rank.usual_duration(record))
            if (record.ordinal or record.peer >= 0) and (now - since) / 1e9 > limit:
                late.append((not record.ordinal, since, rank.rank, record, limit))
    # Collectives first: more ranks wait in them, and all suspects are named.
    for _, since, _, record, limit in sorted(late, key=itemgetter(0, 1, 2)):
        members = _members(ranks, record.group_id)
        if not members:
            continue
        size = max(m.progress.groups[record.group_id][m.number] for m in members)
        if record.ordinal:
            record = _usual(members, record)
            if not failed and size == len(members) and (now - _complete_since(members, record, now)) / 1e9 <= limit:
                continue  # they waited for the last rank, which has just submitted it
        else:
            members = [member for member in members if member.number in (record.rank, record.peer)]
            size = len({record.rank, record.peer})
        waits = [m for m in members if m.waits_in(record) or (failed and m.has_failed(record))]
        alike = tuple(m.rank for m in waits if not record.ordinal or _kind(m.submission(record)) == _kind(record))
        missing = tuple(m.rank for m in members if not m.has_reached(record))
        unknown = max(0, size - len(members))
        return LongWait(record, (now - since) / 1e9, alike, missing, tuple(members), unknown)
    return None


def _complete_since(members: Sequence[GroupMember], record: Record, now: int) -> int:
    """When the last rank has submitted it; 0 if one has not, or has submitted something else."""
    found = [member.submission(record) for member in members]
    same = [one.time for one in found if one is not None and _kind(one) == _kind(record)]
    return min(now, max(same)) if len(same) == len(members) else 0


def _waits(rank: RankProgress, *, failed: bool) -> Iterator[tuple[int, Record]]:
    if not failed:
        yield from ((since, rank.pending[key]) for key, since in rank.waited.items() if key in rank.pending)
        return
    for record in (*rank.pending.values(), *rank.failed):
        if record.ordinal:  # of a group that has not recovered since
            counts = rank.reached(record.group_id, record.rank) >> EPOCH_SHIFT == record.ordinal >> EPOCH_SHIFT
        else:
            counts = record not in rank.failed or record is rank.failed[-1]
        if counts:
            yield record.time, record


def _members(ranks: Sequence[RankProgress], group_id: int) -> list[GroupMember]:
    found: dict[int, GroupMember] = {}
    for rank in ranks:
        numbers = rank.groups.get(group_id, {})
        for number in numbers:
            found[number] = GroupMember(rank.rank if len(numbers) == 1 else number, number, rank)
    return [found[number] for number in sorted(found)]


def _usual(members: Sequence[GroupMember], record: Record) -> Record:
    """What most ranks have submitted as this collective."""
    submitted = [own for member in members if (own := member.submission(record)) is not None]
    [(kind, _)] = Counter(_kind(own) for own in submitted).most_common(1) or [(_kind(record), 1)]
    return next((own for own in submitted if _kind(own) == kind), record)


def _kind(record: Record | None) -> tuple[str, int] | None:
    return None if record is None else (record.op, 0 if record.op in _OF_ANY_SIZE else record.nbytes)


def is_same(a: Record, b: Record) -> bool:
    """Whether two records are of the same collective, or of the two halves of one message."""
    if a.ordinal or b.ordinal:
        return (a.group_id, a.ordinal) == (b.group_id, b.ordinal)
    return message_key(a) == message_key(b)


def find_suspects(
    waiting: LongWait,
    *,
    state: Callable[[RankProgress], ProcessState],
    stacks: Callable[[Sequence[RankProgress]], Mapping[int, Sequence[Stack]]],
    ask: Callable[[Sequence[RankProgress]], Callable[[], Mapping[int, Sequence[Awaited]]]] | None = None,
) -> list[Suspect]:
    """The ranks that keep the others waiting. `state` and `stacks` look at processes of ranks, `ask` asks them which gradients
    they wait for, and returns what returns the answers."""
    found = _to_blame(waiting, state)
    in_backward = [m.progress for m in found if _missing_bucket(m, waiting) >= 0 and not m.is_before_backward]
    asked = ask(in_backward) if ask is not None and in_backward else dict
    of_rank = stacks([member.progress for member in found])
    answers = asked()
    return [
        _suspect(m, waiting, state(m.progress), of_rank.get(m.progress.rank, ()), answers.get(m.progress.rank, ()))
        for m in found
    ]


def _to_blame(waiting: LongWait, state: Callable[[RankProgress], ProcessState]) -> list[GroupMember]:
    members, ended = waiting.members, (ProcessState.STOPPED, ProcessState.GONE)
    return (
        [member for member in members if member.rank in waiting.missing]
        or [member for member in members if _different(member, waiting) is not None]
        or [member for member in members if state(member.progress) in ended]
        # It runs in the background there. Its engine may need the interpreter, which C code may block.
        or [member for member in members if member.is_elsewhere(waiting.record)]
    )


def _different(member: GroupMember, waiting: LongWait) -> Record | None:
    """The submission of a rank that differs from those of most ranks."""
    own = member.submission(waiting.record)
    return None if _kind(own) in (None, _kind(waiting.record)) else own


def _suspect(
    member: GroupMember, waiting: LongWait, state: ProcessState, stacks: Sequence[Stack], awaited: Sequence[Awaited]
) -> Suspect:
    header = member.progress.header
    stack = _shown_stack(stacks, header, shared=member.shares_process)
    cause, other = _cause(member, waiting, state, stack, stacks)
    frames = of_script(stack)
    others = tuple(_other_places(stacks, header)) if stack and stack is stacks[0] else ()
    bucket = _missing_bucket(member, waiting)
    names, certain = _missing_parameters(member, waiting, awaited) if bucket >= 0 else ((), False)
    where = user_line(frames, header)
    pid = int(header["pid"])
    name = member.progress.member
    return Suspect(member.rank, pid, cause, state, tuple(frames), where, others, other, bucket, names, certain, name)


def _missing_parameters(
    member: GroupMember, waiting: LongWait, awaited: Sequence[Awaited]
) -> tuple[tuple[str, ...], bool]:
    """The parameters of the bucket without a gradient; where that is not known all of them, and False."""
    record = waiting.record
    bucket = record.group_id, record.model, member.number, record.step, record.bucket
    if (answer := next((one for one in awaited if one[:5] == bucket), None)) is not None:
        return answer.missing, True
    return parameters_of(record, record.bucket, [m.progress for m in waiting.members]), member.is_before_backward


def _cause(
    member: GroupMember, waiting: LongWait, state: ProcessState, stack: Stack, stacks: Sequence[Stack]
) -> tuple[Cause, Record | None]:
    """What a rank does, and the collective that it does instead, if any."""
    if (different := _different(member, waiting)) is not None:
        return Cause.DIFFERENT, different
    elsewhere = member.progress.waiting_in(member.number)
    if state not in (ProcessState.GONE, ProcessState.STOPPED):
        if elsewhere is not None and not is_same(elsewhere[0], waiting.record):
            return Cause.OTHER_COLLECTIVE, elsewhere[0]
        if any(map(_is_in_hook, stacks)):
            return Cause.HOOK, None
    return process_cause(state, stack), None


def process_cause(state: ProcessState, stack: Stack) -> Cause:
    """What a process does, as far as its state and the stack of a thread show it."""
    if state is ProcessState.GONE:
        return Cause.DEAD
    if state is ProcessState.STOPPED:
        return Cause.STOPPED
    if not stack:
        return Cause.UNKNOWN
    in_loader = any("/torch/utils/data/" in frame.file for frame in stack)
    return Cause.DATA_LOADER if in_loader else Cause.USER_CODE


def _shown_stack(stacks: Sequence[Stack], header: Mapping[str, Any], *, shared: bool) -> Stack:
    """The stack of the thread that is in a hook, or else of the main thread: other threads do not keep the rank waiting. Of ranks
    in one process, where the main thread runs no user code: of the first thread that does and is not idle."""
    found = [stack for stack in stacks if _is_in_hook(stack)]
    if stacks and not found and (shared or not user_frames(stacks[0], header)):
        found = [stack for stack in stacks if _is_busy(stack, header)]
    return next(iter([*found, *stacks]), ())


def _other_places(stacks: Sequence[Stack], header: Mapping[str, Any]) -> Iterator[Frame]:
    """Where other threads run user code, if the main thread waits for threads: in a join, in gradwire, or in autograd."""
    inner = list(takewhile(lambda frame: not user_frames([frame], header), stacks[0]))
    if any(frame.file.endswith(_THREAD_WAITS) or "/gradwire/" in frame.file for frame in inner):
        busy = [stack for stack in stacks[1:] if _is_busy(stack, header)]
        yield from (user_frames(stack, header)[0] for stack in busy[:_MOST_OTHERS])


def _is_busy(frames: Sequence[Frame], header: Mapping[str, Any]) -> bool:
    """Whether a thread runs user code, and waits neither for a collective nor for other threads or connections."""
    idle = not frames or frames[0].file.endswith(_IDLE) or "/gradwire/groups/" in frames[0].file
    return not idle and user_line(frames, header) is not None


def _is_in_hook(frames: Sequence[Frame]) -> bool:
    """Whether a thread is in what a hook computes: what drives hooks has called something, and that is not a wait."""
    inner = list(takewhile(lambda frame: not frame.file.endswith(_HOOK_DRIVERS), frames))
    return len(inner) < len(frames) and not any("/gradwire/groups/" in frame.file for frame in inner)


def _missing_bucket(member: GroupMember, waiting: LongWait) -> int:
    """The bucket that the others reduce and that is not full on this rank; -1 if there is none."""
    record = waiting.record
    full = member.progress.full.get((record.group_id, record.model, record.bucket))
    missing = member.rank in waiting.missing and record.bucket >= 0 and bool(record.ordinal)
    return record.bucket if missing and (full is None or full.step < record.step) else -1


def parameters_of(record: Record, bucket: int, ranks: Sequence[RankProgress]) -> tuple[str, ...]:
    """The names of the parameters in a bucket of the model of `record`, as far as a rank has described them."""
    for rank in ranks:
        for model in reversed(rank.descriptions.get("buckets", ())):
            is_of_model = (model["group_id"], model["model"]) == (record.group_id, record.model)
            if is_of_model and 0 <= bucket < len(model["buckets"]):
                return tuple(model["buckets"][bucket]["names"])
    return ()
