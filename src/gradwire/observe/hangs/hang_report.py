"""The text of a hang report, for people and for programs, and the progress of a rank in a line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gradwire.observe.hangs.analysis import Cause, Suspect, Waiting
from gradwire.observe.hangs.stacks import Frame
from gradwire.observe.hangs.stalls import Stall
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import Record
from gradwire.observe.units import rank_list
from gradwire.recorder.flight_recorder import RecordKind
from gradwire.runtime.host import ProcessState

_MOST_NAMES = 6
_ENDED = {
    RecordKind.COLLECTIVE_FINISHED: "finished",
    RecordKind.COLLECTIVE_FAILED: "failed",
}


def described(record: Record) -> str:
    """A collective, a send or a receive as a person reads it. Peers are ranks in the group."""
    name = f" {record.label!r}" if record.label else ""
    place = f" of step {record.step}, bucket {record.bucket}" if record.bucket >= 0 else ""
    if record.peer >= 0:
        place += f" {'to' if record.op == 'send' else 'from'} rank {record.peer}"
    return f"{record.op}{name} (operation #{record.seq} of {record.group}, {record.nbytes:,} bytes{place})"


def report_lines(waiting: Waiting | None, suspects: Sequence[Suspect], *, frames: int = 6) -> list[str]:
    """The report, for a terminal. Ranks that stand at the same place are named together."""
    lines = []
    if waiting is not None:
        who = f"rank{'s' if len(waiting.ranks) > 1 else ''} {rank_list(waiting.ranks)}"
        has = "have" if len(waiting.ranks) > 1 else "has"
        lines.append(f"{who} {has} waited for {waiting.seconds:.1f} s in {described(waiting.record)}")
        if waiting.record.peer >= 0:
            lines += _message_lines(waiting)
        elif waiting.unknown:
            are = "ranks of the group are" if waiting.unknown > 1 else "rank of the group is"
            lines.append(f"  {waiting.unknown} {are} not recorded here: if on another host, look there too")
        elif not suspects:
            lines.append(f"  all ranks have submitted it: {_why_slow(waiting.record)}")
    for group in _alike(suspects):
        lines += _suspect_lines(group, frames)
    return lines


def _message_lines(waiting: Waiting) -> list[str]:
    """Why a send or a receive does not finish."""
    record = waiting.record
    other = "receive" if record.op == "send" else "send"
    if waiting.unknown:
        return [f"  rank {record.peer} of the group is not recorded here: if on another host, look there too"]
    if waiting.missing:
        return [f"  rank {waiting.missing[0]} has not submitted the matching {other}"]
    return [f"  the matching {other} was submitted: {_why_slow(record)}"]


def _why_slow(record: Record) -> str:
    """Why an operation does not finish that nobody is missing in. A device runs what was enqueued before it first."""
    kernel = "a kernel that was enqueued before it still runs on a rank's GPU, or " if record.on_device else ""
    return f"{kernel}the engine or the link is slow or stuck"


def stall_lines(stall: Stall, suspects: Sequence[Suspect]) -> list[str]:
    """The report of ranks that wait where collectives are not recorded."""
    several = len(stall.ranks) > 1
    ranks = f"rank{'s' if several else ''} {rank_list(stall.ranks)} {'have' if several else 'has'}"
    at = f", in {_short(stall.where)}" if stall.where else ""
    head = f"{ranks} waited for {stall.seconds:.1f} s in step {stall.step}{at} (collectives are not recorded)"
    return [head, *(line for group in _alike(suspects) for line in _suspect_lines(group, 6))]


def _alike(suspects: Iterable[Suspect]) -> list[list[Suspect]]:
    """Suspects of the same cause and stack together."""
    groups: dict[object, list[Suspect]] = {}
    for suspect in suspects:
        what = suspect.other and (suspect.other.op, suspect.other.group, suspect.other.ordinal, suspect.other.nbytes)
        missing = suspect.bucket, suspect.parameters, suspect.certain
        groups.setdefault((suspect.cause, suspect.stack, what, missing), []).append(suspect)
    return list(groups.values())


def _suspect_lines(group: Sequence[Suspect], frames: int) -> list[str]:
    suspect = group[0]
    several = len(group) > 1
    ranks = f"rank{'s' if several else ''} {rank_list([one.rank for one in group])}"
    process = f"process{'es' if several else ''} {', '.join(str(one.pid) for one in group)}"
    states = dict.fromkeys(one.state.value for one in group if one.state is not ProcessState.GONE)
    other = described(suspect.other) if suspect.other is not None else ""
    at = f": {_short(suspect.where)}" if suspect.where else f": {other}" if other else ""
    lines = [f"  {ranks} ({', '.join([process, *states])}): {suspect.cause.value}{at}"]
    if other and suspect.where:
        lines.append(f"      {other}")
    if suspect.bucket >= 0:
        lines.append(f"      {_bucket_line(suspect)}")
    lines += [f"      {_short(frame)}" for frame in suspect.stack[:frames]]
    if len(suspect.stack) > frames:
        lines.append(f"      ... {len(suspect.stack) - frames} more")
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


def as_dict(waiting: Waiting | None, suspects: Sequence[Suspect]) -> dict[str, Any]:
    """The report, for programs."""
    return {
        "time": time.time(),
        "collective": None if waiting is None else _facts(waiting.record),
        "seconds": 0.0 if waiting is None else waiting.seconds,
        "waiting": [] if waiting is None else list(waiting.ranks),
        "missing": [] if waiting is None else list(waiting.missing),
        "unknown": 0 if waiting is None else waiting.unknown,
        "suspects": [
            {
                "rank": suspect.rank,
                "pid": suspect.pid,
                "cause": suspect.cause.name,
                "state": suspect.state.value,
                "other": None if suspect.other is None else _facts(suspect.other),
                "bucket": suspect.bucket,
                "parameters": list(suspect.parameters),
                "certain": suspect.certain,
                "where": None if suspect.where is None else str(suspect.where),
                "stack": [str(frame) for frame in suspect.stack],
            }
            for suspect in suspects
        ],
    }


def _facts(record: Record) -> dict[str, Any]:
    return {
        "op": record.op,
        "label": record.label,
        "group": record.group,
        "seq": record.seq,
        "ordinal": record.ordinal,
        "bytes": record.nbytes,
        "step": record.step,
        "bucket": record.bucket,
        "peer": record.peer,
        "on_device": record.on_device,
    }


def end_of(rank: RankProgress, bucket: int, parameters: Sequence[str]) -> Suspect:
    """A rank that has ended, where nothing is known of others that wait for it."""
    pid = int(rank.header["pid"])
    return Suspect(rank.rank, pid, Cause.DEAD, ProcessState.GONE, bucket=bucket, parameters=tuple(parameters))


def standing(rank: RankProgress, state: ProcessState, now: int | None) -> str:
    """Where a rank stands, in a line: its step, its phase, and its last collective. `now` is None on another clock."""
    parts = [f"rank {rank.rank}: {state.value}"]
    if rank.step >= 0:
        parts.append(f"step {rank.step}")
    if rank.phase is not None:
        parts.append(f"{rank.phase.value}{_ago(' for', now, rank.phase_since)}")
    waiting, last = rank.waiting_in(), rank.last_collective
    if waiting is not None:
        parts.append(f"waits{_ago(' for', now, waiting[1])} in {described(waiting[0])}")
    elif last is not None and (how := _ENDED.get(last.kind)) is not None:
        parts.append(f"last {last.op} (operation #{last.seq} of {last.group}) {how}{_ago('', now, last.time, ' ago')}")
    elif last is not None:
        parts.append(f"{described(last)} in the background{_ago(' for', now, last.time)}")
    return ", ".join(parts)


def _ago(before: str, now: int | None, then: int, after: str = "") -> str:
    return "" if now is None else f"{before} {max(0, now - then) / 1e9:.1f} s{after}"
