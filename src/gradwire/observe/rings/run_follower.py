"""Follows the rings of a run from outside: how far each rank is, and what its process does. Without torch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.observe.hangs.gradient_questions import SUBJECT, SUFFIX, Awaited, ask, read_answers
from gradwire.observe.hangs.stacks import Stack, read_stacks
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import state_of_writer
from gradwire.observe.rings.ring_tail import RingFollower
from gradwire.observe.rings.run_outcome import RunOutcome, load
from gradwire.runtime.host import ProcessState, clock_identity


class RunFollower:
    """The ranks of one run, as far as they have been recorded in `directory`. `since`: rings that were begun before, in
    nanoseconds on the monotonic clock, are of an earlier run, and not looked at. `tail`: begin with about the last so many
    records of a rank; reading all of a full ring takes a while."""

    def __init__(self, directory: Path, *, since: int | None = None, tail: int | None = None) -> None:
        self.directory = directory
        self.ranks: dict[int, RankProgress] = {}
        """What is known of each rank."""
        self._since, self._tail = since, tail
        self._clock = clock_identity()
        self._followers: dict[Path, RingFollower] = {}
        self.damage: dict[str, str] = {}
        """By the name of a file: why it is left out."""

    def look(self) -> None:
        """Read what ranks have written since the last look."""
        for path in self.directory.glob("rank-*.ring"):
            if path in self._followers and self._followers[path].is_replaced():  # a rank was started again
                self._followers.pop(path).close()
            if path not in self._followers:
                try:
                    follower = RingFollower(path, tail=self._tail)
                except OSError:  # it is gone again
                    continue
                except UsageError as error:
                    self.damage[path.name] = f"left out: {error}"
                    continue
                header = follower.header
                if self._since is not None and (header["clock"] != self._clock or header["started"] < self._since):
                    follower.close()
                    continue
                self._followers[path] = follower
                number = int(follower.header["rank"])
                self.ranks[number] = RankProgress(number, follower.header)
            follower = self._followers[path]
            rank = self.ranks[int(follower.header["rank"])]
            before, records = follower.poll_split(rank.pending)
            rank.update(records, before)

    def read_descriptions(self) -> None:
        """Read what ranks have described: which parameters their buckets hold."""
        for follower in self._followers.values():
            self.ranks[int(follower.header["rank"])].descriptions = follower.read_descriptions()

    @property
    def local_ranks(self) -> list[RankProgress]:
        """The ranks of this host: times of others are on another clock."""
        return [rank for rank in self.ranks.values() if rank.header["clock"] == self._clock]

    @property
    def is_over(self) -> bool:
        """Whether no rank of this host is left."""
        return all(self.state(rank) is ProcessState.GONE for rank in self.local_ranks)

    @property
    def outcome(self) -> RunOutcome | None:
        """How the run has ended, if it has and its launcher has saved it."""
        if not self.ranks or not self.is_over:
            return None
        started = max(int(rank.header["started_wall"]) for rank in self.ranks.values()) / 1e9
        return load(self.directory, started=started)

    @property
    def now(self) -> int:
        """The time until which ranks wait, on the host's clock: of a run that is over, that of its last record."""
        last = [rank.last[-1].time for rank in self.local_ranks if rank.last]
        return max(last, default=0) if self.is_over else time.monotonic_ns()

    def state(self, rank: RankProgress) -> ProcessState:
        """What the process of a rank does."""
        return state_of_writer(rank.header)

    def stacks(self, ranks: Iterable[RankProgress], *, within: float = 1.0) -> dict[int, Sequence[Stack]]:
        """The stacks of these ranks, read at the same time, the main thread's first; none of those whose process is gone."""
        gone = (ProcessState.GONE, ProcessState.UNKNOWN)
        asked = {rank.rank: rank.header for rank in ranks if self.state(rank) not in gone}
        paths = {number: self.directory / f"rank-{number}.stacks" for number in asked}
        found = read_stacks({paths[number]: header for number, header in asked.items()}, within=within)
        return {number: found[path] for number, path in paths.items()}

    def ask(self, ranks: Iterable[RankProgress], *, within: float = 0.3) -> Callable[[], dict[int, list[Awaited]]]:
        """Ask these ranks which gradients they wait for; what is returned returns the answers that have come in time."""
        silent = (ProcessState.GONE, ProcessState.UNKNOWN, ProcessState.STOPPED)
        since = time.monotonic_ns()
        asked = [
            rank.rank
            for rank in ranks
            if (how := rank.descriptions.get(SUBJECT)) and self.state(rank) not in silent and ask(rank.header, how[-1])
        ]
        paths = {rank: self.directory / f"rank-{rank}{SUFFIX}" for rank in asked}
        return functools.partial(read_answers, paths, since=since, within=within)

    def close(self) -> None:
        """Close the files."""
        for follower in self._followers.values():
            follower.close()
