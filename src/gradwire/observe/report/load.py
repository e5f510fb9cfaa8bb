"""Reads what a report is made of from the directory of a run: rings, and the reports of hangs that were saved there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.observe.hangs.hang_report import saved_hangs
from gradwire.observe.report.report_model import RunReport, build
from gradwire.observe.rings.intervals import ranks_apart
from gradwire.observe.rings.ring import Ring, RingFile, nothing_recorded, read_ring
from gradwire.observe.rings.run_outcome import load as load_outcome
from gradwire.runtime.rank_error import RankError

_KEPT = 8


def load_report(directory: Path) -> RunReport:
    """The report of the run that was recorded in `directory`, in whatever state its ranks are."""
    good: list[tuple[int, Path]] = []
    damaged: dict[str, str] = {}
    started = 0.0
    for path in directory.glob("rank-*.ring"):
        try:
            with RingFile(path) as ring:
                good.append((int(ring.header["rank"]), path))
                started = max(started, int(ring.header["started_wall"]) / 1e9)
        except (OSError, UsageError) as error:
            damaged[path.name] = f"left out: {error}"
    if not good:
        raise nothing_recorded(directory, *damaged.values())
    rings: Iterable[Ring] = StoredRings(path for _, path in sorted(good))
    if len(good) == 1:
        rings = ranks_apart(list(rings))
    return build(
        rings,
        directory=directory,
        hangs=saved_hangs(directory),
        damaged=damaged,
        outcome=load_outcome(directory, started=started),
        errors={rank: raised for rank, _ in good if (raised := RankError.load(directory, rank)) is not None},
    )


class StoredRings(Iterable[Ring]):
    """Rings that are read each time that they are gone through: 64 ranks have 4 million records. A few of them are kept."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._read = lru_cache(_KEPT)(read_ring)

    def __iter__(self) -> Iterator[Ring]:
        return map(self._read, self._paths)
