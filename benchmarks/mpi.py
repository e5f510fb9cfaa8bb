"""Open MPI through mpi4py: whether it is installed, and its collectives.

MPI finds its ranks through the program that started them. So if it takes part, all ranks of a benchmark are started by
`mpirun`, and all other contenders live in the same processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.testing.mpi import missing

_ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_ASK_LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class OpenMPI:
    """An Open MPI that ranks can be started under."""

    version: str


def find() -> OpenMPI | str:
    """Open MPI, or the reason why there is none."""
    if (reason := missing()) is not None:
        return reason
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_LIMIT)
    except subprocess.TimeoutExpired:
        return f"mpi4py has not loaded its library within {_ASK_LIMIT:.0f} s"
    said = asked.stdout.strip().split(",")[0]
    if asked.returncode != 0:
        return "mpi4py finds no MPI library"
    if not said.startswith("Open MPI"):
        return f"mpi4py uses {said.splitlines()[0][:40]}, which is not Open MPI"
    return OpenMPI(said)


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
