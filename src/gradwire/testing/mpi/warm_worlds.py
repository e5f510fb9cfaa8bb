"""`MPIWorlds`: warm worlds of MPI ranks, one per size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from gradwire.errors import UsageError
from gradwire.testing.mpi.launch import Launch, find_mpirun, missing
from gradwire.testing.pool import JobContext, Outcome, RankPool
from gradwire.testing.pool.process import QUICK_START, Hold, Spawn

_WARM = f"{QUICK_START}from gradwire.testing.mpi.warm_rank import work"


class MPIPool(RankPool):
    """The ranks of one mpirun, warm ones by default. When one is spoilt, all are."""

    def __init__(self, spawn: Spawn = Spawn(_WARM)) -> None:  # noqa: B008  # it is frozen
        super().__init__()
        self._how = spawn
        self._launch: Launch | None = None

    def _start(self, count: int, store: str) -> Iterator[Hold]:
        if count > 0:
            reason, mpirun = missing(), find_mpirun()
            if reason is not None or mpirun is None:
                raise UsageError(f"{count} ranks of kind 'mpi': {reason}.")
            self._launch = Launch(mpirun, count, store, self._how)
            yield from self._launch.meet()

    def _discharge(self, workers: Sequence[Hold]) -> None:
        if workers:
            super()._discharge(list(self._workers))

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` is mpirun; the ranks are its children."""
        return self._launch is not None and pid == self._launch.pid

    def keeps_descriptor(self, fd: int) -> bool:
        """As for any pool; and what leads to mpirun."""
        return super().keeps_descriptor(fd) or (self._launch is not None and fd in self._launch.descriptors)


class MPIWorlds:
    """Warm worlds, each started when first needed. They end with `close()` or with the interpreter."""

    def __init__(self) -> None:
        self._worlds: dict[int, MPIPool] = {}

    def run(self, job: Callable[[JobContext], object], n: int, **options: Any) -> list[Outcome]:
        """Run `job(context)` on the world of `n` ranks: see `RankPool.run`."""
        if n not in self._worlds:
            self._worlds[n] = MPIPool()
        return self._worlds[n].run(job, n, **options)

    def close(self) -> None:
        """End all worlds and wait for them. Raises GroupError if a rank did not end well."""
        with ExitStack() as stack:
            while self._worlds:
                stack.callback(self._worlds.popitem()[1].close)

    def keeps_process(self, pid: int) -> bool:
        """Whether `pid` belongs to a world."""
        return any(world.keeps_process(pid) for world in list(self._worlds.values()))

    def keeps_descriptor(self, fd: int) -> bool:
        """Whether `fd` belongs to a world."""
        return any(world.keeps_descriptor(fd) for world in list(self._worlds.values()))


@functools.cache
def default_worlds() -> MPIWorlds:
    """The worlds that `run_ranks` uses. They cost nothing until something is run on them."""
    return MPIWorlds()
