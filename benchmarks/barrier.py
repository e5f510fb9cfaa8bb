"""`Barrier`: ranks of a benchmark wait for each other between turns, by a mechanism that none of the contenders uses.

A file that all ranks have mapped holds one counter per rank, each written only by its rank. Nothing else is read through it, so
no other memory has to be ordered with the counters.

Note [Wait lightly]
The barrier is on both sides of what is timed, so it must release all ranks at the same moment and must not take a core from a
rank that is still working. A waiter therefore polls continuously, yielding its core each time, for `_SPIN` seconds, which is longer
than ranks with separate cores are apart; then it sleeps between polls. Its cost is part of a turn, once: a few microseconds of the
milliseconds that a turn takes.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from gradwire.errors import CollectiveTimeout

_STRIDE = 64
"""Bytes between counters: a cache line each."""
_SPIN = 0.5e-3
_NAP = 50e-6


class Barrier:
    """One rank's view of the barrier of `size` ranks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Barrier.prepare(Path(folder) / "barrier", size=1)
    ...     alone = Barrier(Path(folder) / "barrier", rank=0, size=1, timeout=1.0)
    ...     alone.wait()
    ...     alone.close()
    """

    def __init__(self, path: Path, *, rank: int, size: int, timeout: float) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size * _STRIDE)
        self._words = memoryview(self._map).cast("Q")
        self._places = [other * _STRIDE // 8 for other in range(size)]
        self._rank = rank
        self._timeout = timeout
        self._count = 0

    @staticmethod
    def prepare(path: Path, *, size: int) -> None:
        """Create the file, once, before any rank opens it."""
        path.write_bytes(bytes(size * _STRIDE))

    def wait(self) -> None:
        """Return when every rank has called it as often as this one."""
        self._count += 1
        count, words = self._count, self._words
        words[self._places[self._rank]] = count
        begin = time.perf_counter()
        for place in self._places:
            while words[place] < count:
                waited = time.perf_counter() - begin
                if waited < _SPIN:
                    os.sched_yield()  # See Note [Wait lightly].
                elif waited < self._timeout:
                    time.sleep(_NAP)
                else:
                    self._give_up()

    def _give_up(self) -> None:
        joined = [rank for rank, place in enumerate(self._places) if self._words[place] >= self._count]
        missing = [rank for rank in range(len(self._places)) if rank not in joined]
        raise CollectiveTimeout(
            f"barrier {self._count} of the benchmark on rank {self._rank} of {len(self._places)}: ranks {missing} did not arrive "
            f"within {self._timeout:.3g} s. Allow more time with --timeout if the machine is just slow.",
            joined=joined,
            missing=missing,
        )

    def close(self) -> None:
        """Close the mapping."""
        self._words.release()
        self._map.close()
