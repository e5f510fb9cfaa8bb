"""The worker's side: one rank process, which runs one job after another.

Note [Who outlives whom]
A worker ends when its control socket is closed, so it cannot outlive a parent that died. A worker that is in C++ with the
interpreter lock held would not see that; Linux kills it with its parent too (PR_SET_PDEATHSIG). That signal is sent when the
*thread* that started the worker ends, so it is requested only if that was the parent's main thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch._C._distributed_c10d import PrefixStore

from gradwire.groups.store.private_store import PrivateStore
from gradwire.testing import leftovers
from gradwire.testing.pool import protocol


class RankWorker:
    """One rank process: its main thread runs jobs, a second thread listens to the parent."""

    def __init__(self, control: int, store: str, *, notice: float, warm: bool) -> None:
        self._control = socket.socket(fileno=control)
        self._store = PrivateStore.open(store)
        self._store.set_timeout(timedelta(seconds=protocol.START_LIMIT))
        self._modules = leftovers.TorchModules() if warm else None
        self._notice = notice
        """Seconds that the main thread has to exit when the parent is gone, before the process is ended by force."""
        self._jobs: queue.SimpleQueue[protocol.RankJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._owned: Any = None
        self._failure = ""
        self._released = threading.Event()

    def serve(self) -> None:
        """Run jobs until the parent is gone."""
        threading.Thread(target=self._listen, name="gradwire-pool-control", daemon=True).start()
        protocol.send(self._control, tuple(os.path.realpath(path) for path in sys.path if path))
        # Without a deadline: waiting for the parent is what an idle worker does.
        while (job := self._jobs.get()) is not None:
            if self._modules is None:
                protocol.send(self._control, protocol.Ended(self._perform(job), ()))
            else:
                before, error = leftovers.Leftovers.snapshot(), self._perform(job)
                left = (*before.compare(grace=protocol.LEFTOVER_GRACE), *self._modules.replaced())
                protocol.send(self._control, protocol.Ended(error, left))

    def _listen(self) -> None:
        try:
            while True:
                message = protocol.receive(self._control)
                if isinstance(message, protocol.RankJob):
                    self._failure = ""
                    self._released.clear()
                    self._jobs.put(message)
                elif isinstance(message, protocol.Finish):
                    if message.failure:
                        self._abort(message.failure)
                    self._released.set()
        except (EOFError, OSError):
            _flush()
            if self._notice:
                self._jobs.put(None)
                time.sleep(self._notice)
            os._exit(0)

    def _perform(self, job: protocol.RankJob) -> protocol.Answer | None:
        """Run a job, and send its answer. Returns the error of closing what it owned."""
        failure = ""
        try:
            answer = protocol.pack(protocol.RankResult(job.rank, protocol.Fate.RETURNED, self._call(job)))
        except BaseException as error:
            answer = protocol.pack(protocol.RankResult(job.rank, protocol.Fate.RAISED, error=error))
            failure = f"rank {job.rank} raised {type(error).__name__}: {error}"
        protocol.send(self._control, answer)
        if failure:
            self._abort(failure)
        else:
            self._released.wait(job.timeout + protocol.CLOSE_LIMIT)
        with self._lock:
            owned, self._owned = self._owned, None
        try:
            if owned is not None:
                owned.close()
        except BaseException as error:
            return protocol.pack(protocol.RankResult(job.rank, protocol.Fate.RAISED, error=error))
        finally:
            _flush()
        return None

    def _call(self, job: protocol.RankJob) -> object:
        store = PrefixStore(job.name, self._store)
        report = lambda progress: protocol.send(self._control, protocol.ProgressReport(progress))  # noqa: E731
        context = protocol.JobContext(job.rank, job.size, job.name, job.timeout, store, self._own, report)
        sys.path.insert(0, job.path)
        try:
            return cloudpickle.loads(job.blob)(context)
        finally:
            with suppress(ValueError):
                sys.path.remove(job.path)

    def _own(self, resource: Any) -> None:
        with self._lock:
            self._owned, failure = resource, self._failure
        if failure:
            self._abort(failure)

    def _abort(self, failure: str) -> None:
        """Abort what the rank owns, now or as soon as it owns something."""
        with self._lock:
            self._failure, owned = failure, self._owned
        try:
            if owned is not None:
                owned.abort(failure)
        except Exception:  # must not end the thread that detects the parent's end, nor hide the rank's own error
            traceback.print_exc()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def work(fds: tuple[int, int, int], store: str, parent: int, *, notice: float = 0.0, warm: bool = False) -> None:
    """The main function of a worker process. Its descriptors are for messages, for stacks, and for a byte when these are complete.

    `store` is the name of the parent's store, `parent` its process id if the worker is to be killed with it, else 0. A worker that
    must exit normally when its parent is gone has `notice` seconds for it. One that is `warm` is kept for many jobs.
    """
    control, stack, dumped = fds
    if parent:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit()
    # Ctrl-C goes to the whole process group; the parent decides how to handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    faulthandler.enable()
    # On SIGUSR1 every thread's stack goes to `stack`, without the interpreter lock; chained after it, Python's own handler
    # then writes a byte to `dumped`, still in the signal handler, which signals the parent that the stacks are complete.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    os.set_blocking(dumped, False)
    signal.set_wakeup_fd(dumped, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=True)
    torch.set_num_threads(1)
    if warm:
        leftovers.prime()
        gc.collect()
        gc.enable()  # QUICK_START had it off
        gc.freeze()  # existing objects stay: a collection before each check for leftovers then costs almost nothing
    RankWorker(control, store, notice=notice, warm=warm).serve()


work_warm = functools.partial(work, warm=True)
