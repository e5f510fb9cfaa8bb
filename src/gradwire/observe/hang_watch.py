"""Watches the rings of a run from outside, and reports a hang once. Without torch: `gradwire run` does this."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.flight_recorder import RecordKind
from gradwire.host import ProcessState, process_state
from gradwire.observe.hangs import SOFT_DEADLINE, Suspect, Waiting, as_dict, find_suspects, find_waiting, report_lines
from gradwire.observe.progress import RankProgress
from gradwire.observe.ring import RingFollower
from gradwire.observe.stacks import Stack, read_stacks

PERIOD = 0.5
"""Seconds between two looks."""


class HangWatch:
    """The ranks of one run, as far as they are on this host and have been recorded in `directory`."""

    def __init__(self, directory: Path, *, deadline: float = SOFT_DEADLINE) -> None:
        self._directory = directory
        self._deadline = deadline
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
            if path not in self._followers:
                try:
                    self._followers[path] = RingFollower(path)
                except (OSError, UsageError):  # it is gone again, or not ours
                    continue
                rank = int(self._followers[path].header["rank"])
                self.ranks[rank] = RankProgress(rank, self._followers[path].header)
            follower = self._followers[path]
            self.ranks[int(follower.header["rank"])].update(follower.poll())

    def check_if_due(self) -> list[str]:
        """`check`, if it is time for it."""
        if time.monotonic() < self.next_look:
            return []
        self.next_look = time.monotonic() + PERIOD
        return self.check()

    def check(self) -> list[str]:
        """Look, and return what is to be said: a report when a hang is found, a line when it is over."""
        self.look()
        waiting = find_waiting(list(self.ranks.values()), time.monotonic_ns(), deadline=self._deadline)
        known, self._reported = self._reported, waiting
        if waiting is not None and (known is None or not _is_same(known, waiting)):
            suspects = self.suspects(waiting)
            self._save(waiting, suspects)
            return report_lines(waiting, suspects)
        if known is not None and waiting is None and not self._has_failed(known):
            return [f"{known.record.op} (operation #{known.record.seq} of {known.record.group}) is over: ranks go on"]
        return []

    def suspects(self, waiting: Waiting) -> list[Suspect]:
        """The ranks that keep the others waiting, by a look at their processes."""
        return find_suspects(waiting, self.ranks, state=self.state, stacks=self.stacks)

    def state(self, rank: RankProgress) -> ProcessState:
        """What the process of a rank does."""
        return process_state(int(rank.header["pid"]), str(rank.header["process_start"]))

    def stacks(self, rank: RankProgress) -> Sequence[Stack]:
        """The stacks of a rank, the main thread's first; none if its process is gone or stopped."""
        if self.state(rank) in (ProcessState.GONE, ProcessState.STOPPED):
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
