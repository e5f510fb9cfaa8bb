"""Hangs: which rank the others wait for, and what it does instead. Pure.

A collective that takes far longer than usual hangs. Ranks that have not submitted it keep the others waiting; if all have, they
disagree on what it is, or one of them was stopped in the middle of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradwire.host import ProcessState
from gradwire.observe.progress import RankProgress
from gradwire.observe.ring import Record
from gradwire.observe.stacks import Frame, Stack, user_frames

SOFT_DEADLINE = 5.0
_TIMES_USUAL = 10


class Cause(Enum):
    """What keeps a rank from a collective. The value is the name people read."""

    DEAD = "its process has ended"
    STOPPED = "its process is stopped"
    DATA_LOADER = "it waits for its data loader"
    HOOK = "it is in a communication hook"
    USER_CODE = "it is in user code"
    OTHER_COLLECTIVE = "it waits in another collective"
    DIFFERENT = "it has submitted a different collective"
    UNKNOWN = "it is not known what it does"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that hangs."""

    record: Record
    """Its submission, on the rank that has waited for longest."""
    seconds: float
    ranks: tuple[int, ...]
    """Ranks of the world that wait in it."""
    missing: tuple[int, ...]
    """Ranks of the world that have not submitted it."""
    members: tuple[int, ...]
    """Ranks of the world that take part in the group, in its order, as far as they are recorded here."""
    unknown: int = 0
    """How many ranks of the group are not recorded here."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the others wait for."""

    rank: int
    pid: int
    cause: Cause
    state: ProcessState
    where: Frame | None
    """The innermost line of user code that it is in."""
    stack: tuple[Frame, ...]
    doing: str
    """More on the cause: the collective that it waits in, or the one that it has submitted."""


def find_waiting(ranks: Sequence[RankProgress], now: int, *, deadline: float = SOFT_DEADLINE) -> Waiting | None:
    """The collective that ranks have waited in for longest, if that is longer than `deadline` seconds and ten times the usual."""
    late = []
    for rank in ranks:
        for record in rank.pending.values():
            seconds = (now - record.time) / 1e9
            if record.ordinal and seconds > max(deadline, _TIMES_USUAL * rank.usual_duration(record)):
                late.append((record.time, rank.rank, record))
    for _, _, record in sorted(late):
        members = _members(ranks, record.group)
        if members is None:
            continue
        waiting = tuple(r.rank for r in members if any(_is_same(p, record) for p in r.pending.values()))
        missing = tuple(r.rank for r in members if not _has_reached(r, record))
        size = max(r.groups[record.group][1] for r in members)
        return Waiting(
            record,
            (now - record.time) / 1e9,
            waiting,
            missing,
            tuple(r.rank for r in members),
            max(0, size - len(members)),
        )
    return None


def _members(ranks: Sequence[RankProgress], group: str) -> list[RankProgress] | None:
    """Who takes part in a group, by its order. None if several groups have this name: then nothing can be said."""
    found = {rank.groups[group][0]: rank for rank in ranks if group in rank.groups}
    if len(found) < sum(group in rank.groups for rank in ranks):
        return None
    return [found[number] for number in sorted(found)]


def _is_same(a: Record, b: Record) -> bool:
    return a.group == b.group and a.ordinal == b.ordinal


def _has_reached(rank: RankProgress, record: Record) -> bool:
    reached = rank.reached.get(record.group)
    return reached is not None and reached.ordinal >= record.ordinal


def find_suspects(
    waiting: Waiting,
    ranks: Mapping[int, RankProgress],
    *,
    state: Callable[[RankProgress], ProcessState],
    stacks: Callable[[RankProgress], Sequence[Stack]],
) -> list[Suspect]:
    """The ranks that keep the others waiting. `state` and `stacks` look at a rank's process."""
    if waiting.missing:
        return [_suspect(ranks[rank], waiting, state, stacks) for rank in waiting.missing]
    here = {
        rank: record
        for rank in waiting.members
        for record in ranks[rank].pending.values()
        if _is_same(record, waiting.record)
    }
    kinds = Counter((record.op, record.nbytes) for record in here.values())
    if len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        odd = [rank for rank, record in here.items() if (record.op, record.nbytes) != usual]
        return [_suspect(ranks[rank], waiting, state, stacks, different=here[rank]) for rank in odd]
    suspects = [_suspect(ranks[rank], waiting, state, stacks) for rank in waiting.members]
    return [suspect for suspect in suspects if suspect.state in (ProcessState.STOPPED, ProcessState.GONE)]


def _suspect(
    rank: RankProgress,
    waiting: Waiting,
    state: Callable[[RankProgress], ProcessState],
    stacks: Callable[[RankProgress], Sequence[Stack]],
    *,
    different: Record | None = None,
) -> Suspect:
    now = state(rank)
    found = list(stacks(rank))
    pending = rank.oldest_pending()
    cause, stack, doing = Cause.UNKNOWN, found[0].frames if found else (), ""
    in_hook = next((s.frames for s in found if _is_in_hook(s.frames)), None)
    if now is ProcessState.GONE:
        cause = Cause.DEAD
    elif now is ProcessState.STOPPED:
        cause = Cause.STOPPED
    elif different is not None:
        cause, doing = Cause.DIFFERENT, described(different)
    elif pending is not None and not _is_same(pending, waiting.record):
        cause, doing = Cause.OTHER_COLLECTIVE, described(pending)
    elif in_hook is not None:
        cause, stack = Cause.HOOK, in_hook
    elif any("/torch/utils/data/" in frame.file for frame in stack):
        cause = Cause.DATA_LOADER
    elif stack:
        cause = Cause.USER_CODE
    own = user_frames(stack, rank.header)
    return Suspect(rank.rank, int(rank.header["pid"]), cause, now, own[0] if own else None, tuple(stack), doing)


def _is_in_hook(frames: Sequence[Frame]) -> bool:
    """Whether a thread is in what a hook computes: what drives hooks has called something, and that is not a wait."""
    for i, frame in enumerate(frames):
        if frame.file.endswith(("/gradwire/hooks/pump.py", "/gradwire/reducer/torch_hooks.py")):
            return not any("/gradwire/groups/" in inner.file for inner in frames[:i])
    return False


def described(record: Record) -> str:
    """A collective as a person reads it."""
    name = f" {record.label!r}" if record.label else ""
    place = f" of step {record.step}, bucket {record.bucket}" if record.bucket >= 0 else ""
    return f"{record.op}{name} (operation #{record.seq} of {record.group}, {record.nbytes:,} bytes{place})"


def report_lines(waiting: Waiting, suspects: Sequence[Suspect], *, frames: int = 6) -> list[str]:
    """The report, for a terminal."""
    who = f"rank{'s' if len(waiting.ranks) > 1 else ''} {_list(waiting.ranks)}"
    has = "have" if len(waiting.ranks) > 1 else "has"
    lines = [f"{who} {has} waited for {waiting.seconds:.1f} s in {described(waiting.record)}"]
    if waiting.unknown:
        are = "ranks of the group are" if waiting.unknown > 1 else "rank of the group is"
        lines.append(f"  {waiting.unknown} {are} not recorded here: if on another host, look there too")
    elif not suspects:
        lines.append("  all ranks have submitted it: the engine or the link is slow or stuck")
    for suspect in suspects:
        at = f": {suspect.where}" if suspect.where else f": {suspect.doing}" if suspect.doing else ""
        lines.append(f"  rank {suspect.rank} (process {suspect.pid}, {suspect.state.value}): {suspect.cause.value}{at}")
        if suspect.doing and suspect.where:
            lines.append(f"      {suspect.doing}")
        lines += [f"      {frame}" for frame in suspect.stack[:frames]]
        if len(suspect.stack) > frames:
            lines.append(f"      ... {len(suspect.stack) - frames} more")
    return lines


def as_dict(waiting: Waiting, suspects: Sequence[Suspect]) -> dict[str, Any]:
    """The report, for programs."""
    record = waiting.record
    facts = {
        "op": record.op,
        "label": record.label,
        "group": record.group,
        "seq": record.seq,
        "ordinal": record.ordinal,
    }
    return {
        "collective": {**facts, "bytes": record.nbytes, "step": record.step, "bucket": record.bucket},
        "seconds": waiting.seconds,
        "waiting": list(waiting.ranks),
        "missing": list(waiting.missing),
        "unknown": waiting.unknown,
        "suspects": [
            {
                "rank": suspect.rank,
                "pid": suspect.pid,
                "cause": suspect.cause.name,
                "state": suspect.state.value,
                "doing": suspect.doing,
                "where": None if suspect.where is None else str(suspect.where),
                "stack": [str(frame) for frame in suspect.stack],
            }
            for suspect in suspects
        ],
    }


def _list(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them.

    >>> _list([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)
