"""Open MPI through mpi4py: whether it is installed, how ranks are started under it, and its collectives.

MPI finds its ranks through the program that started them. So if it takes part, all ranks of a benchmark are started by
`mpirun`, and all other contenders live in the same processes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.testing.mpi.launch import SETTINGS, find_mpirun

_ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_ASK_LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """Open MPI's mpirun."""

    mpirun: str
    version: str

    def command(self, ranks: int, *, cores: int) -> list[str]:
        """The prefix of a rank's command. Ranks are not bound to cores: gloo's threads would be bound with them."""
        crowd = ["--map-by", ":OVERSUBSCRIBE"] if ranks > cores else []
        return [self.mpirun, "-n", str(ranks), "--bind-to", "none", *crowd]

    def environment(self, ranks: int, *, cores: int) -> dict[str, str]:
        """mpirun's environment variables. If ranks outnumber cores, Open MPI yields its core while it waits."""
        found = dict(SETTINGS) if os.geteuid() == 0 else {}
        if ranks > cores:
            found["OMPI_MCA_mpi_yield_when_idle"] = "1"
        return found


def find() -> Launcher | str:
    """Open MPI's launcher, or the reason why there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install gradwire[mpi])"
    mpirun = find_mpirun()
    if mpirun is None:
        return "there is no mpirun"
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_LIMIT)
    except subprocess.TimeoutExpired:
        return f"mpi4py has not loaded its library within {_ASK_LIMIT:.0f} s"
    said = asked.stdout.strip().split(",")[0]
    if asked.returncode != 0:
        return "mpi4py finds no MPI library"
    if not said.startswith("Open MPI"):
        return f"mpi4py uses {said.splitlines()[0][:40]}, which is not Open MPI"
    return Launcher(mpirun, said)


def rank_under_mpirun(environment: Mapping[str, str]) -> int:
    """The rank that mpirun assigned to this process."""
    return int(environment["OMPI_COMM_WORLD_RANK"])


def calls(full: Tensor, part: Tensor, other: Tensor) -> dict[str, Callable[[], Any]]:
    """Every operation on these buffers: see `contenders.Buffers`. MPI is initialized for calls from the main thread only."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    a, b, c = full.numpy(), part.numpy(), other.numpy()
    return {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, a),
        "broadcast": lambda: world.Bcast(a, root=0),
        "all_gather": lambda: world.Allgather(b, a),
        "reduce_scatter": lambda: world.Reduce_scatter_block(a, b),
        "all_to_all": lambda: world.Alltoall(a, c),
    }
