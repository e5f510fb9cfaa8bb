"""Looks for hangs in a run, and reports each once. Without torch: `gradwire run` does this.

Note [Waits that end]
A wait that is long enough to be reported may still end: one rank evaluates, or saves a checkpoint, and the others wait for it in
their next collective. Its report is saved once and marked as ended. Later waits for the same ranks in the same
operation are counted there, and reported again only if one takes more than twice as long as any before.

Note [Stalls]
Of torch's own DDP over torch's own groups collectives are not recorded. If no rank has written anything for far longer than a step
takes, and the main threads of some are inside torch's communication or backward while others are elsewhere, then the former
wait for the latter. So it is with members of an elastic run that wait for the next view, which is no collective either.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.observe.hangs import SOFT_DEADLINE, analysis
from gradwire.observe.hangs.hang_report import as_dict, report_lines, standing
from gradwire.observe.hangs.stacks import Stack, user_line
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import Record
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.runtime.host import ProcessState
from gradwire.runtime.private_file import write_private

PERIOD = 0.5
"""Seconds between two looks."""
_TORCH_WAITS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/gradwire/elasticity/performer.py")
_MARGIN = 0.01
_TIMES_LONGEST = 2
_MOST_FILES = 50
_TAIL_FOR_ERROR, _FRAMES_FOR_ERROR = 1000, 4
_WITHIN_FOR_ERROR = 0.4
"""Seconds for stacks, twice if py-spy has to help: an error must not be delayed much by its explanation."""


@dataclass
class _Report:
    """A report, and the waits that it is about: for the same ranks, in the same operation. See Note [Waits that end]."""

    file: Path | None
    """None: there are too many."""
    facts: dict[str, Any] = field(default_factory=dict)
    longest: float = 0.0
    wait: analysis.LongWait | analysis.Stall | None = None
    """The one that has not ended."""
    suspects: Sequence[analysis.Suspect] = ()
    began: float = 0.0
    """On the monotonic clock."""
    is_printed: bool = False

    @property
    def record(self) -> Record | None:
        """Of the collective, if it is recorded."""
        return self.wait.record if isinstance(self.wait, analysis.LongWait) else None


class HangWatch:
    """Reports hangs of the ranks of `run` that are on this host: collectives that have taken longer than `deadline` seconds."""

    def __init__(self, run: RunFollower, *, deadline: float = SOFT_DEADLINE) -> None:
        self.run = run
        self.deadline = deadline
        """Seconds after which a wait is reported."""
        self._works = True
        self._looked_at_stall = False
        self._reports: dict[object, _Report] = {}
        self.next_look = time.monotonic() if deadline < math.inf else math.inf
        """When `check_if_due` looks again."""

    @property
    def waiting(self) -> analysis.LongWait | None:
        """The collective in which ranks of this host have waited for longest, if longer than the deadline. Of a run that is
        over: in which they waited at its end."""
        ranks, now, over = self.run.local_ranks, self.run.now, self.run.is_over
        return analysis.find_waiting(ranks, now, deadline=self.deadline, failed=over)

    def check_if_due(self) -> list[str]:
        """`check`, if it is time for it. An error ends the watch and not the run."""
        now = time.monotonic()
        if now < self.next_look:
            return []
        self.next_look = now + PERIOD
        lines = self._safely(self.check)
        since = [found[1] for rank in self.run.local_ranks if (found := rank.waiting_in()) is not None]
        due = min(since, default=math.inf) / 1e9 + self.deadline  # so that a hang is reported when it is one
        if self._works and now < due < self.next_look:
            self.next_look = due + _MARGIN
        return lines

    def rank_ended(self, rank: int) -> list[str]:
        """The lines to print when a signal has ended a rank: where it was, and which ranks waited for it."""
        return self._safely(lambda: self._rank_ended(rank))

    def standing(self) -> list[str]:
        """Where every rank is, in a line for each."""
        return self._safely(self._standing) or ["its ranks cannot be followed any more"]

    def _standing(self) -> list[str]:
        self.run.look()
        here = self.run.local_ranks
        ranks = [rank for _, rank in sorted(self.run.ranks.items())]
        lines = [standing(rank, self.run.state(rank), self.run.now if rank in here else None) for rank in ranks]
        return lines or ["no rank is recorded yet: that begins with gw.init() or gradwire.observe.start()"]

    def _safely(self, look: Callable[[], list[str]]) -> list[str]:
        try:
            return look() if self._works else []
        except Exception as error:
            self._works, self.next_look = False, math.inf
            return [f"hangs are not reported any more: {type(error).__name__}: {error}"]

    def check(self) -> list[str]:
        """Look, and return the lines to print: a report when a wait is long, a line when it has ended."""
        self.run.look()
        if self.run.views and self.run.is_over:  # all members have died, and nobody waits any more
            return []
        lines: list[str] = []
        waiting = self.waiting
        idle = idle_seconds(self.run.local_ranks, time.monotonic_ns(), deadline=self.deadline)
        stalled = waiting is None and idle is not None
        for report in self._reports.values():
            if isinstance(wait := report.wait, analysis.LongWait):
                goes_on = any(member.waits_in(wait.record) for member in wait.members)
            else:
                goes_on = wait is None or stalled
            if not goes_on:
                lines += self._ended(report)
        known = [report.record for report in self._reports.values() if report.record is not None]
        if waiting is not None and not any(analysis.is_same(record, waiting.record) for record in known):
            self._report_of(waiting, self.suspects(waiting))
        elif stalled and not self._looked_at_stall and (found := self.stall()) is not None:
            self._report_of(*found)
        self._looked_at_stall = stalled
        now = time.monotonic()
        for report in self._reports.values():
            if report.wait and not report.is_printed and now - report.began > _TIMES_LONGEST * report.longest:
                lines += self._print(report)
        return lines

    def _report_of(
        self, wait: analysis.LongWait | analysis.Stall | None, suspects: Sequence[analysis.Suspect]
    ) -> _Report:
        """The report of waits like this one, which has not ended."""
        record = wait.record if isinstance(wait, analysis.LongWait) else None
        what = None if record is None else (record.group_id, record.op, record.label)
        place = what, tuple((one.rank, one.cause) for one in suspects)
        number = len(self._reports) + 1
        file = self.run.directory / f"hang-{number}.json" if number <= _MOST_FILES else None
        report = self._reports.setdefault(place, _Report(file))
        report.wait, report.suspects, report.is_printed = wait, suspects, False
        report.began = time.monotonic() - (0.0 if wait is None else wait.seconds)
        return report

    def _ended(self, report: _Report) -> list[str]:
        wait, record, report.wait = report.wait, report.record, None
        if isinstance(wait, analysis.LongWait) and any(member.has_failed(wait.record) for member in wait.members):
            return []
        seconds = time.monotonic() - report.began
        report.longest = max(report.longest, seconds)
        facts = report.facts
        facts |= {"ended": True, "count": facts.get("count", 0) + 1, "total": facts.get("total", 0.0) + seconds}
        self._save(report)
        if not report.is_printed:
            return []
        what = "the wait has ended"
        if record is not None:
            what = f"{record.op} (operation #{record.seq} of {record.group}) has finished"
        again = f"further waits like it are reported after {_TIMES_LONGEST * report.longest:.0f} s"
        return [f"{what} after {seconds:.1f} s: ranks continue; {again}"]

    def stall(self) -> tuple[analysis.Stall, list[analysis.Suspect]] | None:
        """Ranks of this host whose collectives are not recorded and that wait, and those that they wait for."""
        ranks = self.run.local_ranks
        seconds = idle_seconds(ranks, self.run.now, deadline=max(1.0, self.deadline))
        if seconds is None:
            return None
        return find_stall(ranks, seconds, state=self.run.state, stacks=self.run.stacks(ranks))

    def suspects(self, waiting: analysis.LongWait, *, within: float = 1.0) -> list[analysis.Suspect]:
        """The ranks that keep the others waiting, by a look at their processes, which have so many seconds to answer."""
        stacks = functools.partial(self.run.stacks, within=within)
        return analysis.find_suspects(waiting, state=self.run.state, stacks=stacks, ask=self.run.ask)

    def _rank_ended(self, rank: int) -> list[str]:
        self.run.look()
        ended = self.run.ranks.get(rank)
        if ended is None:
            return []
        waiting = analysis.find_waiting(self.run.local_ranks, time.monotonic_ns(), failed=True)
        suspects = [] if waiting is None else self.suspects(waiting)
        # Others may just not have reached the operation when it ended.
        suspects = [one for one in suspects if one.state is ProcessState.GONE or one.cause is analysis.Cause.DIFFERENT]
        if not suspects:
            record = next((r for r in reversed(ended.last) if r.model), None)
            bucket = -1 if record is None else ended.missing_bucket(record.group_id, record.model)
            names = () if record is None else analysis.parameters_of(record, bucket, list(self.run.ranks.values()))
            pid = int(ended.header["pid"])
            gone = analysis.Cause.DEAD, ProcessState.GONE
            suspects = [analysis.Suspect(rank, pid, *gone, bucket=bucket, parameters=names)]
        line = standing(ended, self.run.state(ended), time.monotonic_ns())
        report = self._report_of(waiting, suspects)
        lines = self._print(report)
        report.wait = None  # which ends with the run
        return [line, *lines]

    def _print(self, report: _Report) -> list[str]:
        report.is_printed = True
        report.facts = {**report.facts, **as_dict(report.wait, report.suspects), "ended": False}
        where = self._save(report)
        command = f"gradwire inspect {shlex.quote(str(self.run.directory))}"
        return [*report_lines(report.wait, report.suspects), f"  {where}. To look again: {command}"]

    def _save(self, report: _Report) -> str:
        """Save a report; returns where, or why that was not possible."""
        if report.file is None:
            return f"not saved: there are {_MOST_FILES} reports already"
        try:
            write_private(report.file, json.dumps(report.facts, indent=1).encode() + b"\n")
        except OSError as error:  # a full disk: it is on the terminal all the same
            return f"not saved: {error.strerror}"
        return f"saved as {report.file}"


def report_for_error(directory: Path) -> list[str]:
    """The hang report of the ranks in `directory` that are on this host, for the error of a rank whose collective has failed.
    Under any launcher. Nothing if no collective has failed or is pending."""
    with contextlib.closing(RunFollower(directory, tail=_TAIL_FOR_ERROR)) as run:
        run.look()
        waiting = analysis.find_waiting(run.local_ranks, run.now, failed=True)
        if waiting is None:
            return []
        suspects = HangWatch(run).suspects(waiting, within=_WITHIN_FOR_ERROR)
        return report_lines(waiting, suspects, frames=_FRAMES_FOR_ERROR)


def idle_seconds(ranks: Sequence[RankProgress], now: int, *, deadline: float = SOFT_DEADLINE) -> float | None:
    """For how long no rank has made progress, if that is longer than `deadline` and ten times as long as a step. None where
    groups of gradwire are recorded, whose collectives show more, and before the first step."""
    if len(ranks) < 2 or any((rank.groups or not rank.forwards) and not rank.member for rank in ranks):
        return None
    seconds = min(((now - rank.last[-1].time) / 1e9 for rank in ranks if rank.last), default=0.0)
    usual = analysis.TIMES_USUAL * max(rank.usual_step for rank in ranks)
    return seconds if seconds > max(deadline, usual) else None


def find_stall(
    ranks: Sequence[RankProgress],
    seconds: float,
    *,
    state: Callable[[RankProgress], ProcessState],
    stacks: Mapping[int, Sequence[Stack]],
) -> tuple[analysis.Stall, list[analysis.Suspect]] | None:
    """The ranks that wait, and those that they wait for. None if all wait or none does, which shows no cause."""
    waiting, suspects = [], []
    for rank in ranks:
        frames = next(iter(stacks.get(rank.rank, ())), ())
        where = user_line(frames, rank.header)
        inner = frames if where is None else frames[: frames.index(where)]
        if any(part in frame.file for frame in inner for part in _TORCH_WAITS):
            waiting.append((rank, where))
        else:
            cause = analysis.process_cause(state(rank), frames)
            pid = int(rank.header["pid"])
            suspects.append(analysis.Suspect(rank.rank, pid, cause, state(rank), frames, where, member=rank.member))
    if not waiting or not suspects:
        return None
    numbers = tuple(sorted(rank.rank for rank, _ in waiting))
    why = {"why": "in a change of members"} if waiting[0][0].member else {}
    return analysis.Stall(seconds, numbers, max(rank.step for rank, _ in waiting), waiting[0][1], **why), suspects
