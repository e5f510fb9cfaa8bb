"""Watches the rings of a run from outside, and reports a hang once. Without torch: `gradwire run` does this."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import UsageError
from gradwire.flight_recorder import RecordKind
from gradwire.host import ProcessState, clock_identity
from gradwire.observe.hangs import SOFT_DEADLINE, Suspect, Waiting, as_dict, find_suspects, find_waiting, report_lines
from gradwire.observe.progress import RankProgress
from gradwire.observe.ring import RingFollower, state_of_writer
from gradwire.observe.stacks import Stack, read_stacks

PERIOD = 0.5
"""Seconds between two looks."""


class HangWatch:
    """The ranks of one run, as far as they are on this host and have been recorded in `directory`.

    `since`: rings that were begun before, in nanoseconds on the monotonic clock, are of an earlier run, and not looked at.
    """

    def __init__(self, directory: Path, *, deadline: float = SOFT_DEADLINE, since: int | None = None) -> None:
        self._directory = directory
        self._deadline = deadline
        self._since = since
        self._clock = clock_identity()
        self._works = True
        self._followers: dict[Path, RingFollower] = {}
        self._reported: Waiting | None = None
        self._reports = 0
        self.next_look = time.monotonic()
        """When `check_if_due` looks again."""
        self.ranks: dict[int, RankProgress] = {}
        """What is known of each rank."""

    def look(self) -> None:
        """Read what ranks have written since the last look."""
        for path in self._directory.glob("rank-*.ring"):
            if path in self._followers and self._followers[path].is_replaced():  # a rank was started again
                self._followers.pop(path).close()
            if path not in self._followers:
                try:
                    follower = RingFollower(path)
                except (OSError, UsageError):  # it is gone again, or not ours
                    continue
                if self._is_of_earlier_run(follower.header):
                    follower.close()
                    continue
                self._followers[path] = follower
                rank = int(follower.header["rank"])
                self.ranks[rank] = RankProgress(rank, follower.header)
            follower = self._followers[path]
            self.ranks[int(follower.header["rank"])].update(follower.poll())

    def _is_of_earlier_run(self, header: Mapping[str, Any]) -> bool:
        return self._since is not None and (header["clock"] != self._clock or header["started"] < self._since)

    @property
    def local_ranks(self) -> list[RankProgress]:
        """The ranks of this host: times of others are on another clock."""
        return [rank for rank in self.ranks.values() if rank.header["clock"] == self._clock]

    def waiting(self, deadline: float) -> Waiting | None:
        """The collective in which ranks of this host have waited for longest, if longer than `deadline`."""
        return find_waiting(self.local_ranks, time.monotonic_ns(), deadline=deadline)

    def check_if_due(self) -> list[str]:
        """`check`, if it is time for it. An error ends the watch and not the run."""
        if time.monotonic() < self.next_look or not self._works:
            return []
        self.next_look = time.monotonic() + PERIOD
        try:
            return self.check()
        except Exception as error:
            self._works, self.next_look = False, math.inf
            return [f"hangs are not reported any more: {type(error).__name__}: {error}"]

    def check(self) -> list[str]:
        """Look, and return what is to be said: a report when a hang is found, a line when it has ended."""
        self.look()
        waiting = self.waiting(self._deadline)
        known, self._reported = self._reported, waiting
        if waiting is not None and (known is None or not _is_same(known, waiting)):
            suspects = self.suspects(waiting)
            self._save(waiting, suspects)
            return report_lines(waiting, suspects)
        if known is not None and waiting is None and not self._has_failed(known):
            return [
                f"{known.record.op} (operation #{known.record.seq} of {known.record.group}) has finished: ranks continue"
            ]
        return []

    def suspects(self, waiting: Waiting) -> list[Suspect]:
        """The ranks that keep the others waiting, by a look at their processes."""
        return find_suspects(waiting, self.ranks, state=self.state, stacks=self.stacks)

    def state(self, rank: RankProgress) -> ProcessState:
        """What the process of a rank does."""
        return state_of_writer(rank.header)

    def stacks(self, rank: RankProgress) -> Sequence[Stack]:
        """The stacks of a rank, the main thread's first; none if its process is gone or stopped."""
        if self.state(rank) in (ProcessState.GONE, ProcessState.STOPPED, ProcessState.UNKNOWN):
            return []
        return read_stacks(self._directory / f"rank-{rank.rank}.ring", rank.header)

    def _has_failed(self, known: Waiting) -> bool:
        return any(
            record.kind is RecordKind.COLLECTIVE_FAILED and record.group == known.record.group
            for rank in known.ranks
            for record in self.ranks[rank].last
        )

    def _save(self, waiting: Waiting, suspects: Sequence[Suspect]) -> None:
        self._reports += 1
        try:
            path = self._directory / f"hang-{self._reports}.json"
            path.write_text(json.dumps(as_dict(waiting, suspects), indent=1) + "\n")
        except OSError:  # a full disk: it is on the terminal all the same
            pass

    def close(self) -> None:
        """Close the files."""
        for follower in self._followers.values():
            follower.close()


def _is_same(a: Waiting, b: Waiting) -> bool:
    return a.record.group == b.record.group and a.record.ordinal == b.record.ordinal
