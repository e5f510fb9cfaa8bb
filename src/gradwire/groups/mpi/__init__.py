"""MPI as a Group, through mpi4py: `pip install gradwire[mpi]`. Nothing here imports mpi4py before the first group is made."""

from gradwire.groups.mpi.group import MPIGroup as MPIGroup
