"""Warm worlds of MPI ranks: one `mpirun` per number of ranks, kept between calls. The pool's workers, started by mpirun."""

from gradwire.testing.mpi.launch import missing
from gradwire.testing.mpi.warm_worlds import MPIPool, MPIWorlds, default_worlds

__all__ = ["MPIPool", "MPIWorlds", "default_worlds", "missing"]
