"""The program of one rank process of a benchmark: `python -m gradwire.cli.experiment.rank_main FOLDER [RANK]`.

It connects to the process that started it, receives a task, runs it and sends the result. Without RANK it was started by mpirun,
which passes the rank in the environment.

Note [No orphans]
A separate thread listens to the starter, asleep in the kernel. When the connection closes, however the starter ended, or a stop
message arrives, the process ends at once, whatever its main thread waits for. This also ends ranks under mpirun: they are in
separate process groups and not children of the starter.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch._C._distributed_c10d import Store, TCPStore

from gradwire.cli.experiment.barrier import Barrier
from gradwire.cli.experiment.mpi import rank_under_mpirun
from gradwire.cli.experiment.rank_context import RankContext
from gradwire.cli.experiment.world import HOSTED_PORT, Done, Failed, Hello, Report, Start, Stop
from gradwire.errors import CollectiveTimeout
from gradwire.groups.private_store import PrivateStore
from gradwire.testing.private_socket import connect

_CONNECT = 60.0
"""Seconds to connect to the starter, which listens before it starts any rank."""


def main(folder: Path, rank: int) -> None:
    """Be rank `rank` of the world that listens in `folder`."""
    with connect(folder, timeout=_CONNECT) as connection:
        connection.settimeout(None)
        starter = Connection(connection.detach())
    starter.send(Hello(rank, os.getpid()))
    start = starter.recv()
    threading.Thread(target=_listen, args=(starter,), name="gradwire-bench-starter", daemon=True).start()
    try:
        answer: Done | Failed = Done(_perform(folder, rank, start, starter))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        answer = Failed(text, traceback.format_exc(), isinstance(error, CollectiveTimeout))
    starter.send(answer)


def _perform(folder: Path, rank: int, start: Start, starter: Connection) -> object:
    torch.set_num_threads(1)
    limit = timedelta(seconds=start.timeout)
    store: Store
    if start.private:
        store = PrivateStore.open(start.private)
        store.set_timeout(limit)
    else:
        store = TCPStore(start.address, HOSTED_PORT, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    barrier = Barrier(folder / "barrier", rank=rank, size=start.size, timeout=start.timeout)
    context = RankContext(
        rank, start.size, store, barrier, start.timeout, lambda progress: starter.send(Report(progress))
    )
    try:
        return cloudpickle.loads(start.task)(context)
    finally:
        barrier.close()


def _listen(starter: Connection) -> None:
    """See Note [No orphans]."""
    try:
        if isinstance(starter.recv(), Stop):
            faulthandler.dump_traceback(all_threads=True)
    except (EOFError, OSError):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else rank_under_mpirun(os.environ))
