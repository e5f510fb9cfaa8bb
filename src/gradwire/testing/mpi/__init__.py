"""Warm worlds of MPI ranks: one `mpirun` per number of ranks, kept between calls. The pool's workers, started by mpirun."""

from gradwire.testing.mpi.mpirun import MPIPool, MPIWorlds, default_worlds, missing

__all__ = ["MPIPool", "MPIWorlds", "default_worlds", "missing"]
