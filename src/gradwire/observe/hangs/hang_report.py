"""The text of a hang report, for people and for programs; the progress of a rank in a line; and reports that were saved."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.observe.hangs.analysis import Cause, LongWait, Stall, Suspect
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import Record
from gradwire.observe.units import elapsed, plural, ranks as ranks_text
from gradwire.runtime.host import ProcessState

_MOST_NAMES = 6


def described(record: Record) -> str:
    """A collective, a send or a receive as a person reads it. Peers are ranks in the group."""
    name = f" {record.label!r}" if record.label else ""
    place = f" of step {record.step}, bucket {record.bucket}" if record.bucket >= 0 else ""
    if record.peer >= 0:
        place += f" {'to' if record.op == 'send' else 'from'} rank {record.peer}"
    return f"{record.op}{name} (operation #{record.seq} of {record.group}, {record.nbytes:,} bytes{place})"


def report_lines(wait: LongWait | Stall | None, suspects: Sequence[Suspect], *, frames: int = 6) -> list[str]:
    """The report, for a terminal. Ranks that are at the same place are named together."""
    lines = []
    if wait is not None:
        has = "have" if len(wait.ranks) > 1 else "has"
        lines.append(f"{ranks_text(wait.ranks)} {has} waited for {elapsed(wait.seconds)} in {_what(wait)}")
    if isinstance(wait, LongWait):
        lines += [f"  {line}" for line in _explanation(wait, suspects)]
    for group in _alike(suspects):
        lines += [f"  {line}" for line in _suspect_lines(group, frames)]
    return lines


def _what(wait: LongWait | Stall) -> str:
    if isinstance(wait, LongWait):
        return described(wait.record)
    where = f", in {wait.where.short}" if wait.where else ""
    return f"step {wait.step}{where} ({wait.why})"


def _explanation(wait: LongWait, suspects: Sequence[Suspect]) -> list[str]:
    """Why an operation does not finish, apart from its suspects."""
    record, is_message = wait.record, wait.record.peer >= 0
    other = "receive" if record.op == "send" else "send"
    if wait.unknown:
        who = f"rank {record.peer}" if is_message else plural(wait.unknown, "rank")
        are = "are" if wait.unknown > 1 else "is"
        return [f"{who} of the group {are} not recorded here: if on another host, look there too"]
    if is_message and wait.missing:
        return [f"rank {wait.missing[0]} has not submitted the matching {other}"]
    if suspects and not is_message:
        return []
    what = f"the matching {other} was submitted" if is_message else "all ranks have submitted it"
    kernel = "a kernel that was enqueued before it still runs on a rank's GPU, or " if record.on_device else ""
    return [f"{what}: {kernel}the engine or the link is slow or stuck"]


def _alike(suspects: Iterable[Suspect]) -> list[list[Suspect]]:
    groups: dict[object, list[Suspect]] = {}
    for suspect in suspects:
        what = suspect.other and (suspect.other.op, suspect.other.group_id, suspect.other.ordinal, suspect.other.nbytes)
        missing = suspect.bucket, suspect.parameters, suspect.certain
        groups.setdefault((suspect.cause, suspect.stack, suspect.others, what, missing), []).append(suspect)
    return list(groups.values())


def _suspect_lines(group: Sequence[Suspect], frames: int) -> list[str]:
    suspect = group[0]
    names = [f"{one.member} {one.pid}".strip() for one in group]
    process = f"process{'es' if len(group) > 1 else ''} {', '.join(names)}"
    states = dict.fromkeys(one.state.value for one in group if one.state is not ProcessState.GONE)
    other = described(suspect.other) if suspect.other is not None else ""
    at = f": {suspect.where.short}" if suspect.where else f": {other}" if other else ""
    who = f"{ranks_text([one.rank for one in group])} ({', '.join([process, *states])})"
    lines = [f"{who}: {suspect.cause.value}{at}"]
    if other and suspect.where:
        lines.append(f"    {other}")
    if suspect.bucket >= 0:
        lines.append(f"    {_bucket_line(suspect)}")
    lines += [f"    another thread: {frame.short}" for frame in suspect.others]
    lines += [f"    {frame.short}" for frame in suspect.stack[:frames]]
    if len(suspect.stack) > frames:
        lines.append(f"    ... {len(suspect.stack) - frames} more")
    return lines


def _bucket_line(suspect: Suspect) -> str:
    if suspect.certain and not suspect.parameters:
        return f"bucket {suspect.bucket} has all its gradients there: it is sent when backward goes on"
    names = ", ".join(suspect.parameters[:_MOST_NAMES])
    more = len(suspect.parameters) - _MOST_NAMES
    names += f" and {more} more" if more > 0 else ""
    one = "" if suspect.certain or len(suspect.parameters) == 1 else "one of "
    of = f": it has no gradient yet of {one}{names}" if names else ""
    return f"bucket {suspect.bucket} is not full there{of}"


def standing(rank: RankProgress, state: ProcessState, now: int | None) -> str:
    """Where a rank is, in a line: its step, its phase, and its last collective. `now` is None on another clock."""
    parts = [f"rank {rank.rank}: {state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if rank.phase is not None:
        parts.append(f"{rank.phase.value}{_ago(' for', now, rank.folder.tracker.start)}")
    waiting, last = rank.waiting_in(), rank.last_collective
    if waiting is not None:
        parts.append(f"waits{_ago(' for', now, waiting[1])} in {described(waiting[0])}")
    elif last is not None and last.operation in rank.pending:
        parts.append(f"{described(last)} in the background{_ago(' for', now, last.time)}")
    elif last is not None:  # it may have been waited for since
        failed = last.operation in {one.operation for one in rank.failed}
        how = f"{'failed' if failed else 'finished'}{_ago('', now, last.time, ' ago')}"
        parts.append(f"last {last.op} (operation #{last.seq} of {last.group}) {how}")
    return ", ".join(parts)


def _ago(before: str, now: int | None, then: int, after: str = "") -> str:
    return "" if now is None else f"{before} {elapsed(max(0, now - then) / 1e9)}{after}"


def as_dict(wait: LongWait | Stall | None, suspects: Sequence[Suspect]) -> dict[str, Any]:
    """The report, for programs."""
    known = wait if isinstance(wait, LongWait) else None
    return {
        "time": time.time(),
        "what": "" if wait is None else _what(wait),
        "collective": _facts(known.record if known else None),
        "seconds": 0.0 if wait is None else wait.seconds,
        "waiting": [] if wait is None else list(wait.ranks),
        "missing": list(known.missing) if known else [],
        "unknown": known.unknown if known else 0,
        "why": _explanation(known, suspects) if known else [],
        "suspects": [
            {
                "rank": suspect.rank,
                "pid": suspect.pid,
                "cause": suspect.cause.name,
                "state": suspect.state.value,
                "text": "; ".join(line.strip() for line in _suspect_lines([suspect], 0) if "... " not in line),
                "other": _facts(suspect.other),
                **{name: getattr(suspect, name) for name in ("bucket", "parameters", "certain")},
                "where": None if suspect.where is None else str(suspect.where),
                "others": [str(frame) for frame in suspect.others],
                "stack": [str(frame) for frame in suspect.stack],
            }
            for suspect in suspects
        ],
    }


def _facts(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    names = ("op", "label", "group", "group_id", "seq", "ordinal", "step", "bucket", "peer", "on_device")
    return {"bytes": record.nbytes} | {name: getattr(record, name) for name in names}


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
        return all(self.collective.get(name) == getattr(record, name) for name in ("group_id", number))


def saved_hangs(directory: Path) -> list[SavedHang]:
    """The reports in the directory of a run, the first one first. What is not one of ours is left out."""
    found = []
    for path in sorted(directory.glob("hang-*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            facts = json.loads(path.read_text())
            waiting, why = tuple(map(int, facts["waiting"])), "; ".join(facts["why"])
            suspects = tuple((int(one["rank"]), Cause[one["cause"]], str(one["text"])) for one in facts["suspects"])
            rest = {name: facts[name] for name in ("ended", "count", "total") if name in facts}
            kept = facts["what"], facts["seconds"], waiting, why, suspects, facts["collective"]
            found.append(SavedHang(path.name, *kept, **rest))
        except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError):  # half written, or not ours
            continue
    return found
