"""The text of a hang report, for people and for programs; the progress of a rank in a line; and reports that were saved."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.observe.hangs.analysis import Cause, LongWait, Suspect
from gradwire.observe.hangs.stacks import Frame
from gradwire.observe.hangs.stalls import Stall
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import Record
from gradwire.observe.units import ranks as ranks_text
from gradwire.recorder.format import RecordKind
from gradwire.runtime.host import ProcessState

_MOST_NAMES = 6
_FRAMES = 6


def described(record: Record) -> str:
    """A collective, a send or a receive as a person reads it. Peers are ranks in the group."""
    name = f" {record.label!r}" if record.label else ""
    place = f" of step {record.step}, bucket {record.bucket}" if record.bucket >= 0 else ""
    if record.peer >= 0:
        place += f" {'to' if record.op == 'send' else 'from'} rank {record.peer}"
    return f"{record.op}{name} (operation #{record.seq} of {record.group}, {record.nbytes:,} bytes{place})"


def report_lines(wait: LongWait | Stall | None, suspects: Sequence[Suspect], *, frames: int = _FRAMES) -> list[str]:
    """The report, for a terminal. Ranks that are at the same place are named together."""
    lines = []
    if wait is not None:
        has = "have" if len(wait.ranks) > 1 else "has"
        lines.append(f"{ranks_text(wait.ranks)} {has} waited for {wait.seconds:.1f} s in {_what(wait)}")
    if isinstance(wait, LongWait):
        lines += [f"  {line}" for line in _explanation(wait, suspects)]
    for group in _alike(suspects):
        lines += [f"  {line}" for line in _suspect_lines(group, frames)]
    return lines


def _what(wait: LongWait | Stall) -> str:
    if isinstance(wait, LongWait):
        return described(wait.record)
    return f"step {wait.step}{f', in {_short(wait.where)}' if wait.where else ''} (collectives are not recorded)"


def _explanation(wait: LongWait, suspects: Sequence[Suspect]) -> list[str]:
    """Why an operation does not finish, apart from its suspects."""
    record = wait.record
    if record.peer >= 0:
        other = "receive" if record.op == "send" else "send"
        if wait.unknown:
            return [f"rank {record.peer} of the group is not recorded here: if on another host, look there too"]
        if wait.missing:
            return [f"rank {wait.missing[0]} has not submitted the matching {other}"]
        return [f"the matching {other} was submitted: {_why_slow(on_device=record.on_device)}"]
    if wait.unknown:
        are = "ranks of the group are" if wait.unknown > 1 else "rank of the group is"
        return [f"{wait.unknown} {are} not recorded here: if on another host, look there too"]
    return [] if suspects else [f"all ranks have submitted it: {_why_slow(on_device=record.on_device)}"]


def _why_slow(*, on_device: bool) -> str:
    """Why an operation with all ranks present does not finish. A device first runs what was enqueued before it."""
    kernel = "a kernel that was enqueued before it still runs on a rank's GPU, or " if on_device else ""
    return f"{kernel}the engine or the link is slow or stuck"


def _alike(suspects: Iterable[Suspect]) -> list[list[Suspect]]:
    """Suspects of the same cause and stack together."""
    groups: dict[object, list[Suspect]] = {}
    for suspect in suspects:
        what = suspect.other and (suspect.other.op, suspect.other.group_id, suspect.other.ordinal, suspect.other.nbytes)
        missing = suspect.bucket, suspect.parameters, suspect.certain
        groups.setdefault((suspect.cause, suspect.stack, suspect.others, what, missing), []).append(suspect)
    return list(groups.values())


def _suspect_lines(group: Sequence[Suspect], frames: int) -> list[str]:
    suspect = group[0]
    process = f"process{'es' if len(group) > 1 else ''} {', '.join(str(one.pid) for one in group)}"
    states = dict.fromkeys(one.state.value for one in group if one.state is not ProcessState.GONE)
    other = described(suspect.other) if suspect.other is not None else ""
    at = f": {_short(suspect.where)}" if suspect.where else f": {other}" if other else ""
    who = f"{ranks_text([one.rank for one in group])} ({', '.join([process, *states])})"
    lines = [f"{who}: {suspect.cause.value}{at}"]
    if other and suspect.where:
        lines.append(f"    {other}")
    if suspect.bucket >= 0:
        lines.append(f"    {_bucket_line(suspect)}")
    lines += [f"    another thread: {_short(frame)}" for frame in suspect.others]
    lines += [f"    {_short(frame)}" for frame in suspect.stack[:frames]]
    if len(suspect.stack) > frames:
        lines.append(f"    ... {len(suspect.stack) - frames} more")
    return lines


def _bucket_line(suspect: Suspect) -> str:
    """Which gradients of the bucket are missing."""
    if suspect.certain and not suspect.parameters:
        return f"bucket {suspect.bucket} has all its gradients there: it is sent when backward goes on"
    names = ", ".join(suspect.parameters[:_MOST_NAMES])
    more = len(suspect.parameters) - _MOST_NAMES
    names += f" and {more} more" if more > 0 else ""
    one = "" if suspect.certain or len(suspect.parameters) == 1 else "one of "
    of = f": it has no gradient yet of {one}{names}" if names else ""
    return f"bucket {suspect.bucket} is not full there{of}"


def _short(frame: Frame) -> str:
    return frame.relative_to(os.getcwd())


def end_of(rank: RankProgress, bucket: int, parameters: Sequence[str]) -> Suspect:
    """A rank that has ended, where no other rank is known to wait for it."""
    pid = int(rank.header["pid"])
    return Suspect(rank.rank, pid, Cause.DEAD, ProcessState.GONE, bucket=bucket, parameters=tuple(parameters))


def standing(rank: RankProgress, state: ProcessState, now: int | None) -> str:
    """Where a rank is, in a line: its step, its phase, and its last collective. `now` is None on another clock."""
    parts = [f"rank {rank.rank}: {state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if rank.phase is not None:
        parts.append(f"{rank.phase.value}{_ago(' for', now, rank.phase_since)}")
    waiting, last = rank.waiting_in(), rank.last_collective
    if waiting is not None:
        parts.append(f"waits{_ago(' for', now, waiting[1])} in {described(waiting[0])}")
    elif last is not None and _is_one_of(last, rank.pending.values()):
        parts.append(f"{described(last)} in the background{_ago(' for', now, last.time)}")
    elif last is not None:  # it may have been waited for since
        failed = last.kind is RecordKind.COLLECTIVE_FAILED or _is_one_of(last, rank.failed)
        how = f"{'failed' if failed else 'finished'}{_ago('', now, last.time, ' ago')}"
        parts.append(f"last {last.op} (operation #{last.seq} of {last.group}) {how}")
    return ", ".join(parts)


def _is_one_of(record: Record, others: Iterable[Record]) -> bool:
    return (record.group, record.rank, record.seq) in {(one.group, one.rank, one.seq) for one in others}


def _ago(before: str, now: int | None, then: int, after: str = "") -> str:
    return "" if now is None else f"{before} {max(0, now - then) / 1e9:.1f} s{after}"


# -- reports that are saved ----------------------------------------------------------------------------------------------------


def as_dict(wait: LongWait | Stall | None, suspects: Sequence[Suspect]) -> dict[str, Any]:
    """The report, for programs."""
    return {
        "time": time.time(),
        "what": "" if wait is None else _what(wait),
        "collective": _facts(wait.record) if isinstance(wait, LongWait) else None,
        "seconds": 0.0 if wait is None else wait.seconds,
        "waiting": [] if wait is None else list(wait.ranks),
        "missing": list(wait.missing) if isinstance(wait, LongWait) else [],
        "unknown": wait.unknown if isinstance(wait, LongWait) else 0,
        "why": _explanation(wait, suspects) if isinstance(wait, LongWait) else [],
        "suspects": [
            {
                "rank": suspect.rank,
                "pid": suspect.pid,
                "cause": suspect.cause.name,
                "state": suspect.state.value,
                "text": "; ".join(line.strip() for line in _suspect_lines([suspect], 0) if "... " not in line),
                "other": None if suspect.other is None else _facts(suspect.other),
                "bucket": suspect.bucket,
                "parameters": list(suspect.parameters),
                "certain": suspect.certain,
                "where": None if suspect.where is None else str(suspect.where),
                "others": [str(frame) for frame in suspect.others],
                "stack": [str(frame) for frame in suspect.stack],
            }
            for suspect in suspects
        ],
    }


def _facts(record: Record) -> dict[str, Any]:
    names = ("op", "label", "group", "group_id", "seq", "ordinal", "nbytes", "step", "bucket", "peer", "on_device")
    return {("bytes" if name == "nbytes" else name): getattr(record, name) for name in names}


@dataclass(frozen=True, slots=True)
class SavedHang:
    """A report as it was saved, and what became of the wait."""

    file: str
    what: str
    """In what ranks waited; empty if no rank is known to have waited."""
    seconds: float
    """How long they had waited when it was reported."""
    waiting: tuple[int, ...]
    why: str
    suspects: tuple[tuple[int, Cause, str], ...]
    """Rank, cause and description of each."""
    collective: dict[str, Any] | None
    ended: bool = False
    """Whether ranks have continued."""
    count: int = 1
    """How many such waits there were, with those that were not reported again because they took no longer."""
    total: float = 0.0
    """How long all of them took together, in seconds."""

    def is_about(self, record: Record | None) -> bool:
        """Whether ranks waited in this operation; None: in what is not recorded."""
        if record is None or self.collective is None:
            return record is None and self.collective is None
        number = "ordinal" if record.ordinal else "seq"  # messages have no ordinal
        return (self.collective.get("group_id"), self.collective.get(number)) == (
            record.group_id,
            getattr(record, number),
        )


def saved_hangs(directory: Path) -> list[SavedHang]:
    """The reports in the directory of a run, the first one first. What is not one of ours is left out."""
    paths = sorted(directory.glob("hang-*.json"), key=lambda path: (len(path.name), path.name))
    return [hang for path in paths if (hang := _load(path)) is not None]


def _load(path: Path) -> SavedHang | None:
    try:
        facts = json.loads(path.read_text())
        return SavedHang(
            path.name,
            str(facts["what"]),
            float(facts["seconds"]),
            tuple(map(int, facts["waiting"])),
            "; ".join(map(str, facts["why"])),
            tuple((int(one["rank"]), Cause[one["cause"]], str(one["text"])) for one in facts["suspects"]),
            None if facts["collective"] is None else dict(facts["collective"]),
            bool(facts.get("ended", False)),
            int(facts.get("count", 1)),
            float(facts.get("total", 0.0)),
        )
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError):  # half written, or not ours
        return None
