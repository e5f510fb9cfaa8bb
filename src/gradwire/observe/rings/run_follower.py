"""Follows the rings of a run from outside: how far each rank is, and what its process does. Without torch."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import UsageError
from gradwire.observe.hangs.gradient_questions import SUBJECT, SUFFIX, Awaited, ask, read_answers
from gradwire.observe.hangs.stacks import Stack, read_stacks
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.ring import Record, RingFile, state_of_writer
from gradwire.observe.rings.run_outcome import RunOutcome, load
from gradwire.observe.rings.views import RunView, read_views
from gradwire.observe.stragglers.steps import StepTimes
from gradwire.recorder.format import NO_PEER, RecordKind, record_dtype
from gradwire.runtime.host import ProcessState, clock_identity

if TYPE_CHECKING:
    import numpy as np

_TAIL = 256
"""So many of the last records are read one by one, whatever is before them."""
_KEPT_MESSAGES = 1000
_ABOUT_TO = 1_000_000_000
"""After so many nanoseconds a record that is missing between others is not written any more."""


class RunFollower:
    """The ranks of one run, as far as they have been recorded in `directory`. `since`: rings that were begun before, in
    nanoseconds on the monotonic clock, are of an earlier run, and not looked at. `tail`: begin with about the last so many
    records of a rank; reading all of a full ring takes a while."""

    def __init__(self, directory: Path, *, since: int | None = None, tail: int | None = None) -> None:
        self.directory = directory
        self.ranks: dict[int, RankProgress] = {}
        """What is known of each rank; in an elastic run of those that are ranks now."""
        self.views: list[RunView] = []
        """The view before the present one, and the present one; empty if the run is not elastic."""
        self._since, self._tail = since, tail
        self._clock = clock_identity()
        self._open: dict[Path, tuple[RingFollower, RankProgress]] = {}
        self._over: set[Path] = set()
        """The rings of processes that are gone, and in no view any more."""
        self.damage: dict[str, str] = {}
        """By the name of a file: why it is left out."""

    def look(self) -> None:
        """Read what ranks have written since the last look."""
        for path in set(self.directory.glob("rank-*.ring")) - self._over:
            if path in self._open and self._open[path][0].is_replaced():  # a rank was started again
                self._open.pop(path)[0].close()
            if path not in self._open:
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
                self._open[path] = follower, RankProgress(int(header["rank"]), header, follower.descriptions)
            follower, rank = self._open[path]
            follower.read_names()
            before, records = follower.poll_split(rank.pending)
            rank.update(records, before)
        self.ranks = {rank.rank: rank for _, rank in self._open.values()}
        self._read_views()

    def _read_views(self) -> None:
        """Of an elastic run: number the ranks as in the present view, and leave out processes that are gone."""
        elastic = {path: both for path, both in self._open.items() if both[1].member}
        described = [rank.descriptions.get("view", [])[-2:] for _, rank in elastic.values()]
        views = {view.epoch: view for view in [*self.views, *read_views(itertools.chain(*described))]}
        self.views = [views[epoch] for epoch in sorted(views)[-2:]]
        if not self.views:
            return
        members = self.views[-1].members
        for path, (follower, rank) in elastic.items():
            if rank.member in members:
                rank.rank = members.index(rank.member)
            elif self.state(rank) is ProcessState.GONE:
                self._over.add(path)
                follower.close()
                del self._open[path]
        ranks = {rank.rank: rank for _, rank in self._open.values() if rank.member in members}
        self.ranks = {n: rank for n, rank in ranks.items() if self.state(rank) is not ProcessState.GONE} or ranks

    @property
    def local_ranks(self) -> list[RankProgress]:
        """The ranks of this host: times of others are on another clock."""
        return [rank for rank in self.ranks.values() if rank.header["clock"] == self._clock]

    @property
    def steps(self) -> dict[int, Sequence[StepTimes]]:
        """By rank of this host: its last steps."""
        return {rank.rank: rank.folder.steps for rank in self.local_ranks}

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

    def _file(self, rank: RankProgress, suffix: str) -> Path:
        return self.directory / f"rank-{rank.member or rank.rank}{suffix}"

    def stacks(self, ranks: Iterable[RankProgress], *, within: float = 1.0) -> dict[int, Sequence[Stack]]:
        """The stacks of these ranks, read at the same time, the main thread's first; none of those whose process is gone."""
        gone = (ProcessState.GONE, ProcessState.UNKNOWN)
        asked = {self._file(rank, ".stacks"): rank for rank in ranks if self.state(rank) not in gone}
        how = {path: rank.descriptions[SUBJECT][-1] for path, rank in asked.items() if rank.descriptions.get(SUBJECT)}
        found = read_stacks({path: rank.header for path, rank in asked.items()}, how, within=within)
        return {asked[path].rank: stacks for path, stacks in found.items()}

    def ask(self, ranks: Iterable[RankProgress], *, within: float = 0.3) -> Callable[[], dict[int, list[Awaited]]]:
        """Ask these ranks which gradients they wait for; what is returned returns the answers that have come in time."""
        silent = (ProcessState.GONE, ProcessState.UNKNOWN, ProcessState.STOPPED)
        since = time.monotonic_ns()
        paths = {
            rank.rank: self._file(rank, SUFFIX)
            for rank in ranks
            if (how := rank.descriptions.get(SUBJECT)) and self.state(rank) not in silent and ask(rank.header, how[-1])
        }
        return functools.partial(read_answers, paths, since=since, within=within)

    def close(self) -> None:
        """Close the files."""
        for follower, _ in self._open.values():
            follower.close()


class RingFollower(RingFile):
    """Reads what a rank has written since the last time."""

    _FIRST, _MOST = 64, 16384
    """Records that are read at once: few, because most of the time there are few new ones, and then more."""

    def __init__(self, path: Path, *, tail: int | None = None) -> None:
        """Begins with the oldest record, or with about the last `tail`."""
        super().__init__(path)
        self._next = 0 if tail is None else max(0, self.newest() - tail)
        self._gap = -1
        """The record that was to come next at the end of the last call."""

    def poll(self, *, most: int | None = None) -> list[Record]:
        """The records since the last call, as far as they have not been overwritten; of more than `most`, the last half of that."""
        rows = self.poll_rows()
        return self.records(rows if most is None or len(rows) <= most else rows[-(most // 2) :])

    def poll_rows(self) -> np.ndarray:
        """As `poll`, as rows of `record_dtype`."""
        import numpy as np

        capacity = self.capacity
        parts: list[np.ndarray] = []
        count, left = min(self._FIRST, capacity), 2 * (capacity + self._MOST)
        while left > 0:  # a rank that writes faster than we read must not keep us
            left -= count
            begin, slot = self._next, self._next % capacity
            new = self.read(slot, min(count, capacity - slot), least=begin)
            if slot + count > capacity:
                new = np.concatenate([new, self.read(0, slot + count - capacity, least=begin)])
            if not len(new):
                break
            numbers = new["number"].astype(np.int64)
            if numbers[0] >= begin + capacity:  # overwritten before we came: continue behind the writer
                self._next = int(numbers[-1]) - capacity // 2
                continue
            new = new[: self._in_order(new, numbers)]
            if len(new):
                parts.append(new)
                self._next = int(new["number"][-1]) + 1
            if self._next < begin + count // 2:  # so many records in a row are not left out: this is the end
                break
            count = min(4 * count, self._MOST, capacity)
        self._gap = self._next
        return np.concatenate(parts) if parts else np.empty(0, record_dtype())

    def _in_order(self, new: np.ndarray, numbers: np.ndarray) -> int:
        """How many of these rows follow what was read, without one before them that is about to be written."""
        import numpy as np

        before = np.concatenate([[self._next - 1], numbers[:-1]])
        for gap in np.flatnonzero(numbers != before + 1).tolist():
            # One that was missing before, or before others that are old, is a gap: see Note [No errors] in recorder/writer.py.
            is_old = time.monotonic_ns() - int(new["time"][gap]) > _ABOUT_TO
            if numbers[gap] <= before[gap] or not (is_old or before[gap] + 1 == self._gap):
                return int(gap)
        return len(new)

    def poll_split(self, pending: Iterable[tuple[int, int, int]]) -> tuple[list[Record], list[Record]]:
        """As `poll`, for a reader that follows what is under way: the last records, and what it must know of those before. Of
        many new records all but the last are reduced to those that still matter: see `unfinished_rows`. `pending` are the
        operations (group, rank in it, sequence number) that had not finished."""
        rows = self.poll_rows()
        if len(rows) <= 2 * _TAIL:
            return [], self.records(rows)
        tail = rows[-_TAIL:]
        tail = tail[(tail["kind"] != RecordKind.COLLECTIVE_STARTED) | (tail["number"] + 20 > tail["number"][-1])]
        return self.records(unfinished_rows(rows[:-_TAIL], rows, pending)), self.records(tail)


def unfinished_rows(old: np.ndarray, rows: np.ndarray, pending: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Of `old`, the beginning of `rows`, what a reader needs that knows nothing of it but what was `pending` before. That is all
    of operations that have not finished by the end of `rows`, the end of those that were pending, failures, the last messages,
    the highest collective of each group, the last filling of each bucket, groups and warnings."""
    import numpy as np

    kinds, keys = old["kind"], _keys(old["group_id"], old["rank"], old["seq"])
    over = rows[rows["kind"] == RecordKind.COLLECTIVE_FINISHED]
    finished = _keys(over["group_id"], over["rank"], over["seq"])
    begun = np.isin(kinds, [RecordKind.COLLECTIVE_SUBMITTED, RecordKind.COLLECTIVE_WAITED])
    keep = begun & ~np.isin(keys, finished)
    ended = kinds == RecordKind.COLLECTIVE_FINISHED
    known = np.array(list(pending), dtype=np.uint64).reshape(-1, 3)
    keep |= ended & np.isin(keys, _keys(known[:, 0], known[:, 1], known[:, 2]))
    keep |= np.isin(kinds, [RecordKind.COLLECTIVE_FAILED, RecordKind.GROUP, RecordKind.WARNING])
    is_message = old["peer"] != NO_PEER
    keep[np.flatnonzero(is_message & (begun | ended))[-_KEPT_MESSAGES:]] = True
    for chosen, order, of in (
        (ended & ~is_message, "ordinal", _keys(old["group_id"], old["rank"], np.zeros(len(old)))),
        (kinds == RecordKind.BUCKET_FULL, "number", _keys(old["group_id"], old["model"], old["bucket"])),
    ):
        places = np.flatnonzero(chosen)
        last_first = places[np.argsort(old[order][places])[::-1]]
        keep[last_first[np.unique(of[last_first], return_index=True)[1]]] = True
    return old[keep]


def _keys(group_id: np.ndarray, rank: np.ndarray, seq: np.ndarray) -> np.ndarray:
    """Operations, or other numbers within a group, as one number each. Two have the same as rarely as two groups have."""
    import numpy as np

    local = rank.astype(np.uint64) << np.uint64(32) | seq.astype(np.uint64)
    mixed: np.ndarray = group_id ^ (local * np.uint64(0x9E3779B97F4A7C15))
    return mixed
