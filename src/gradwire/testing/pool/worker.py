"""The worker's side: one rank process, which runs one job after another.

Note [Who outlives whom]
A worker ends when its control socket is closed, so it cannot outlive a parent that died. A worker that is in C++ with the
interpreter lock held would not see that; Linux kills it with its parent too (PR_SET_PDEATHSIG). That signal is sent when the
*thread* that started the worker ends, so it is requested only if that was the parent's main thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
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

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch._C._distributed_c10d import PrefixStore

from gradwire.groups.store.private_store import PrivateStore
from gradwire.testing import leftovers
from gradwire.testing.pool.protocol import (
    CLOSE_LIMIT,
    LEFTOVER_GRACE,
    START_LIMIT,
    Abort,
    Ended,
    JobContext,
    Progress,
    Raised,
    RankJob,
    Resource,
    Returned,
    receive,
    send,
)
from gradwire.testing.pool.shipping import dump_result, pack


class RankWorker:
    """One rank process: its main thread runs jobs, a second thread listens to the parent."""

    def __init__(self, control: int, store: str, *, notice: float, warm: bool) -> None:
        self._control = socket.socket(fileno=control)
        self._store = PrivateStore.open(store)
        self._store.set_timeout(timedelta(seconds=START_LIMIT))
        self._modules = leftovers.TorchModules() if warm else None
        if self._modules is not None:
            self._modules.replaced()
        self._notice = notice
        """Seconds that the main thread has to exit when the parent is gone, before the process is ended by force."""
        self._jobs: queue.SimpleQueue[RankJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._owned: Resource | None = None
        self._aborted: str | None = None
        self._released = threading.Event()

    def serve(self) -> None:
        """Run jobs until the parent is gone."""
        threading.Thread(target=self._listen, name="gradwire-pool-control", daemon=True).start()
        send(self._control, tuple(os.path.realpath(path) for path in sys.path if path))
        # Without a deadline: waiting for the parent is what an idle worker does.
        while (job := self._jobs.get()) is not None:
            send(self._control, self._perform(job))

    def _listen(self) -> None:
        try:
            while True:
                message = receive(self._control)
                if isinstance(message, RankJob):
                    self._aborted = None
                    self._released.clear()
                    self._jobs.put(message)
                    continue
                if isinstance(message, Abort):
                    self._abort(message.reason)
                self._released.set()
        except (EOFError, OSError):
            _flush()
            if self._notice:
                self._jobs.put(None)
                time.sleep(self._notice)
            os._exit(0)

    def _perform(self, job: RankJob) -> Ended:
        """Run a job. A worker that is kept for others looks for what it has left behind."""
        if self._modules is None:
            return Ended(self._finish(job), ())
        before = leftovers.Leftovers.snapshot()
        raised = self._finish(job)
        return Ended(raised, (*before.compare(grace=LEFTOVER_GRACE), *self._modules.replaced()))

    def _finish(self, job: RankJob) -> Raised | None:
        failure = None
        try:
            answer: Returned | Raised = Returned(dump_result(self._call(job), job.rank))
        except BaseException as error:
            answer = pack(error, job.rank, time.monotonic())
            failure = f"rank {job.rank} raised {type(error).__name__}: {error}"
        send(self._control, answer)
        if failure is None:
            self._released.wait(job.timeout + CLOSE_LIMIT)
        else:
            self._abort(failure)
        raised = self._leave(job)
        _flush()
        return raised

    def _call(self, job: RankJob) -> object:
        store = PrefixStore(job.name, self._store)
        context = JobContext(job.rank, job.size, job.name, job.timeout, store, self._own, self._report)
        sys.path.insert(0, job.path)
        try:
            return cloudpickle.loads(job.blob)(context)
        finally:
            with suppress(ValueError):
                sys.path.remove(job.path)

    def _report(self, progress: object) -> None:
        send(self._control, Progress(progress))

    def _own(self, resource: Resource | None) -> None:
        with self._lock:
            self._owned = resource
            reason = self._aborted
        if resource is not None and reason is not None:
            resource.abort(reason)

    def _abort(self, reason: str) -> None:
        with self._lock:
            self._aborted = reason
            owned = self._owned
        if owned is not None:
            try:
                owned.abort(reason)
            except Exception:  # must not end the thread that detects the parent's end, nor hide the rank's own error
                traceback.print_exc()

    def _leave(self, job: RankJob) -> Raised | None:
        with self._lock:
            owned, self._owned = self._owned, None
        try:
            if owned is not None:
                owned.close()
        except BaseException as error:
            return pack(error, job.rank, time.monotonic())
        return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def work(control: int, stack: int, dumped: int, store: str, parent: int, *, notice: float = 0.0) -> None:
    """The main function of a worker process for a single job. `store` is the name of the parent's store, `parent` its process id if
    the worker is to be killed with it, else 0.

    A worker that must exit normally when its parent is gone, instead of at once, has `notice` seconds for it.
    """
    _prepare(stack, dumped, parent)
    RankWorker(control, store, notice=notice, warm=False).serve()


def work_warm(control: int, stack: int, dumped: int, store: str, parent: int, *, notice: float = 0.0) -> None:
    """The main function of a worker that is kept for many jobs: see `work`."""
    _prepare(stack, dumped, parent)
    leftovers.prime()
    gc.collect()
    gc.enable()  # QUICK_START had it off
    gc.freeze()  # existing objects stay: a collection before each check for leftovers then costs almost nothing
    RankWorker(control, store, notice=notice, warm=True).serve()


def _prepare(stack: int, dumped: int, parent: int) -> None:
    """Signals, and torch's threads. Exits if the parent is gone already."""
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
