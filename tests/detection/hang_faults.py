"""The faults of `detection.hangs`, and whether a report describes them. Pure, except for reading rings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.observe.hangs.analysis import Cause
from gradwire.observe.rings.run_follower import RunFollower

SLOW = "slow"
"""Not a fault: one rank takes 30 % longer for each step."""
_TIMES_USUAL = 10
_MISMATCH = re.compile(r"CollectiveMismatch|ranks differ in")


@dataclass(frozen=True, slots=True)
class Fault:
    """What one rank does in `hang_script.py`, and what a report must say about it."""

    words: str
    cause: Cause
    function: str = ""
    """The innermost function of the script that the rank is in; empty if a process has none."""
    bucket: int = -1
    """The bucket that ranks wait for."""
    before: int | None = None
    """Another that they may wait for: it was submitted, and its reduction needs the rank's interpreter."""
    parameters: tuple[str, ...] = ()
    """Those named in the report: without a gradient, or all of the bucket if the rank cannot be asked."""
    by_stopped: bool = False
    """Whether the function can be found only by py-spy."""
    mismatch: bool = False
    """Whether a group that compares collectives raises CollectiveMismatch at once, in place of a hang."""


_FIRST = ("last.bias", "last.weight")
_SECOND = ("hidden.bias", "hidden.weight")
_LAST_OF_SECOND = _SECOND[1:]
FAULTS: Mapping[str, Fault] = {
    "python": Fault("loop in Python", Cause.USER_CODE, "python_loop", 1, None, _LAST_OF_SECOND),
    "c": Fault("loop in C, with the lock", Cause.USER_CODE, "c_loop", 1, 0, _SECOND),
    "stopped": Fault("SIGSTOP", Cause.STOPPED, "stop_here", 0, None, _FIRST, by_stopped=True),
    "killed": Fault("SIGKILL", Cause.DEAD, "", 0, None, _FIRST),
    "loader": Fault("blocked data loader", Cause.DATA_LOADER, "block", 0, None, _FIRST),
    "missing": Fault("missing collective", Cause.DIFFERENT, mismatch=True),
    "shape": Fault("different shape", Cause.DIFFERENT, mismatch=True),
    "hook": Fault("hook that never ends", Cause.HOOK, "block", 1),
}


@dataclass
class Trial:
    """One run."""

    kind: str
    fault: str
    victim: int
    output: str = ""
    report: dict[str, Any] | None = None
    """What was saved as hang-1.json."""
    reported: int | None = None
    """When the report was printed, in nanoseconds on the monotonic clock."""
    late: float = 0.0
    """Seconds after the soft deadline."""
    problems: list[str] = field(default_factory=list)


def judge(trial: Trial, *, py_spy: bool, compares: bool) -> list[str]:
    """What is wrong with the report of a run; nothing, if it is right. `compares`: the group compares collectives."""
    fault = FAULTS[trial.fault]
    if fault.mismatch and compares:
        return _judge_error(trial)
    if trial.report is None:
        return ["no report"]
    problems = []
    if trial.late > 1.0:
        problems.append(f"reported {trial.late:.2f} s after the soft deadline")
    suspects = trial.report["suspects"]
    if [suspect["rank"] for suspect in suspects] != [trial.victim]:
        return [*problems, f"named ranks {[suspect['rank'] for suspect in suspects]}, not {trial.victim}"]
    [suspect] = suspects
    if suspect["cause"] != fault.cause.name:
        problems.append(f"cause {suspect['cause']}, not {fault.cause.name}")
    collective = trial.report["collective"]
    bucket = suspect["bucket"] if suspect["bucket"] >= 0 or collective is None else collective["bucket"]
    if bucket not in (fault.bucket, fault.before):
        problems.append(f"bucket {bucket}, not {fault.bucket}")
    if fault.parameters and bucket == fault.bucket and tuple(suspect["parameters"]) != fault.parameters:
        problems.append(f"parameters {suspect['parameters']}, not {list(fault.parameters)}")
    if fault.function and (py_spy or not fault.by_stopped) and not _is_in(suspect["where"], fault.function):
        problems.append(f"in {suspect['where']}, not in {fault.function}()")
    return problems


def _judge_error(trial: Trial) -> list[str]:
    if not _MISMATCH.search(trial.output):
        return ["no CollectiveMismatch"]
    named = re.search(rf"rank {trial.victim} has|ranks \[{trial.victim}\] have", trial.output)
    return [] if named else [f"the error does not name rank {trial.victim}"]


def _is_in(where: str | None, function: str) -> bool:
    return where is not None and where.startswith(f"{function}() at ")


def seconds_late(trial: Trial, directory: Path, deadline: float) -> float:
    """How long after the soft deadline a hang was reported, by the rings: `deadline`, or ten times the usual, after a wait began.

    For a rank that has ended, after its last record.
    """
    assert trial.report is not None
    assert trial.reported is not None
    collective = trial.report["collective"]
    run = RunFollower(directory)
    run.look()
    run.close()
    ranks = list(run.ranks.values())
    begun = [
        since + int(1e9 * max(deadline, _TIMES_USUAL * rank.usual_duration(rank.pending[key])))
        for rank in ranks
        for key, since in rank.waited.items()
        if key in rank.pending
        and collective is not None
        and (rank.pending[key].group, rank.pending[key].ordinal) == (collective["group"], collective["ordinal"])
    ]
    if FAULTS[trial.fault].cause is Cause.DEAD or not begun:
        ends = [rank.last[-1].time for rank in ranks if rank.rank == trial.victim and rank.last]
        begun = [end + int(1e9 * deadline) for end in ends]
    return max(0.0, (trial.reported - min(begun)) / 1e9) if begun else 0.0
