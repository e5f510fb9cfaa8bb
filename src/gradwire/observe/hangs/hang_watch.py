"""Looks for hangs in a run, and reports each once. Without torch: `gradwire run` does this."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire.observe.hangs.analysis import (
    SOFT_DEADLINE,
    Cause,
    Suspect,
    Waiting,
    find_suspects,
    find_waiting,
    is_same,
    parameters_of,
)
from gradwire.observe.hangs.hang_report import as_dict, end_of, report_lines, stall_lines, standing
from gradwire.observe.hangs.stalls import Stall, find_stall, idle_seconds
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.runtime.host import ProcessState

PERIOD = 0.5
"""Seconds between two looks."""
_MARGIN = 0.01


class HangWatch:
    """Reports hangs of the ranks of `run` that are on this host: collectives that have taken longer than `deadline` seconds."""

    def __init__(self, run: RunFollower, *, deadline: float = SOFT_DEADLINE) -> None:
        self.run = run
        self.deadline = deadline
        """Seconds after which a wait is a hang."""
        self._works = True
        self._reported: Waiting | None = None
        self._looked_at_stall = False
        self._reports = 0
        self.next_look = time.monotonic() if deadline < math.inf else math.inf
        """When `check_if_due` looks again."""

    @property
    def waiting(self) -> Waiting | None:
        """The collective in which ranks of this host have waited for longest, if longer than the deadline.

        Of a run that is over: in which they waited at its end.
        """
        if self.run.is_over:
            return find_waiting(self.run.local_ranks, self.run.now, deadline=-math.inf, failed=True)
        return find_waiting(self.run.local_ranks, time.monotonic_ns(), deadline=self.deadline)

    def check_if_due(self) -> list[str]:
        """`check`, if it is time for it. An error ends the watch and not the run."""
        if time.monotonic() < self.next_look or not self._works:
            return []
        now = time.monotonic()
        self.next_look = now + PERIOD
        lines = self._safely(self.check)
        since = [found[1] for rank in self.run.local_ranks if (found := rank.waiting_in()) is not None]
        due = min(since, default=math.inf) / 1e9 + self.deadline  # so that a hang is reported when it is one
        if now < due < self.next_look:
            self.next_look = due + _MARGIN
        return lines

    def rank_ended(self, rank: int) -> list[str]:
        """The lines to print when a signal has ended a rank: where it was, and which ranks waited for it."""
        return self._safely(lambda: self._end(rank)) if self._works else []

    def standing(self) -> list[str]:
        """Where every rank stands, in a line for each."""
        return self._safely(self._stand) if self._works else ["its ranks cannot be followed any more"]

    def _stand(self) -> list[str]:
        self.run.look()
        here = self.run.local_ranks
        ranks = [rank for _, rank in sorted(self.run.ranks.items())]
        lines = [standing(rank, self.run.state(rank), self.run.now if rank in here else None) for rank in ranks]
        return lines or ["no rank is recorded yet: that begins with gw.init() or gradwire.observe.start()"]

    def _safely(self, look: Callable[[], list[str]]) -> list[str]:
        try:
            return look()
        except Exception as error:
            self._works, self.next_look = False, math.inf
            return [f"hangs are not reported any more: {type(error).__name__}: {error}"]

    def check(self) -> list[str]:
        """Look, and return the lines to print: a report when a hang is found, a line when it has ended."""
        self.run.look()
        waiting = self.waiting
        known, self._reported = self._reported, waiting
        if waiting is not None and (known is None or not is_same(known.record, waiting.record)):
            return self._report(waiting, self.suspects(waiting))
        if waiting is None and (lines := self._check_for_stall()):
            return lines
        if known is not None and waiting is None and not _has_failed(known):
            return [
                f"{known.record.op} (operation #{known.record.seq} of {known.record.group}) has finished: ranks continue"
            ]
        return []

    def _check_for_stall(self) -> list[str]:
        """Their stacks are looked at once, when ranks have stopped."""
        seconds = idle_seconds(self.run.local_ranks, time.monotonic_ns(), deadline=self.deadline)
        looked, self._looked_at_stall = self._looked_at_stall, seconds is not None
        found = None if looked else self.stall()
        if found is None:
            return []
        stall, suspects = found
        facts = {**as_dict(None, suspects), "seconds": stall.seconds, "waiting": list(stall.ranks)}
        return [*stall_lines(stall, suspects), self._save(facts)]

    def stall(self) -> tuple[Stall, list[Suspect]] | None:
        """Ranks of this host whose collectives are not recorded and that wait, and those that they wait for."""
        ranks = self.run.local_ranks
        seconds = idle_seconds(ranks, self.run.now, deadline=self.deadline)
        if seconds is None:
            return None
        return find_stall(ranks, seconds, state=self.run.state, stacks=self.run.stacks(ranks))

    def suspects(self, waiting: Waiting) -> list[Suspect]:
        """The ranks that keep the others waiting, by a look at their processes."""
        self.run.read_descriptions()
        return find_suspects(waiting, state=self.run.state, stacks=self.run.stacks, ask=self.run.ask)

    def _end(self, rank: int) -> list[str]:
        self.run.look()
        ended = self.run.ranks.get(rank)
        if ended is None:
            return []
        waiting = find_waiting(self.run.local_ranks, time.monotonic_ns(), deadline=-math.inf, failed=True)
        suspects = [] if waiting is None else self.suspects(waiting)
        # Others may just not have come so far when it ended.
        suspects = [one for one in suspects if one.state is ProcessState.GONE or one.cause is Cause.DIFFERENT]
        if not suspects:
            self.run.read_descriptions()
            record = next((r for r in reversed(ended.last) if r.group), None)
            bucket = -1 if record is None else ended.missing_bucket(record.group)
            names = () if record is None else parameters_of(bucket, record, list(self.run.ranks.values()))
            suspects.append(end_of(ended, bucket, names))
        return [standing(ended, self.run.state(ended), time.monotonic_ns()), *self._report(waiting, suspects)]

    def _report(self, waiting: Waiting | None, suspects: Sequence[Suspect]) -> list[str]:
        return [*report_lines(waiting, suspects), self._save(as_dict(waiting, suspects))]

    def _save(self, facts: Mapping[str, Any]) -> str:
        """Save a report; returns a line with where it is and how to look again."""
        self._reports += 1
        command = f"gradwire inspect {shlex.quote(str(self.run.directory))}"
        path = self.run.directory / f"hang-{self._reports}.json"
        try:
            path.write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:  # a full disk: it is on the terminal all the same
            return f"  not saved: {error.strerror}. To look again: {command}"
        return f"  saved as {path}. To look again: {command}"

    def close(self) -> None:
        """Close the files."""
        self.run.close()


def _has_failed(known: Waiting) -> bool:
    return any(is_same(failed, known.record) for member in known.members for failed in member.progress.failed)
