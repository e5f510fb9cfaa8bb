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
from torch._C._distributed_c10d import PrefixStore, Store

from gradwire.groups import Group
from gradwire.groups.private_store import PrivateStore
from gradwire.testing.leftovers import Leftovers, prime
from gradwire.testing.pool.messages import Abort, Ended, Job, Raised, Ready, Returned, receive, send
from gradwire.testing.pool.outcome import CLOSE_LIMIT, LEFTOVER_GRACE, START_LIMIT
from gradwire.testing.pool.shipping import dump_result, pack


class Worker:
    """One rank process: its main thread runs jobs, a second thread listens to the parent."""

    def __init__(self, control: socket.socket, store: Store, *, notice: float = 0.0) -> None:
        self._control = control
        self._store = store
        self._notice = notice
        """Seconds that the main thread has to exit when the parent is gone, before the process is ended by force."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._aborted: str | None = None
        self._released = threading.Event()

    def serve(self) -> None:
        """Run jobs until the parent is gone."""
        threading.Thread(target=self._listen, name="gradwire-pool-control", daemon=True).start()
        send(self._control, Ready(tuple(os.path.realpath(path) for path in sys.path if path)))
        # Without a deadline: waiting for the parent is what an idle worker does.
        while (job := self._jobs.get()) is not None:
            self._perform(job)
            del job

    def _listen(self) -> None:
        try:
            while True:
                message = receive(self._control)
                if isinstance(message, Job):
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

    def _perform(self, job: Job) -> None:
        before = Leftovers.snapshot()
        answer = self._call(job)
        send(self._control, answer)
        if isinstance(answer, Returned):
            self._released.wait(job.timeout + CLOSE_LIMIT)
        raised = self._leave(job)
        del answer, job
        _flush()
        send(self._control, Ended(raised, tuple(before.compare(grace=LEFTOVER_GRACE))))

    def _call(self, job: Job) -> Returned | Raised:
        try:
            fn, build, wrap = cloudpickle.loads(job.blob)
            store = PrefixStore(job.name, self._store)
            self._adopt(build(store, job.rank, job.size, timeout=job.timeout, name=job.name))
            if wrap is not None:
                self._adopt(wrap(self._group))
            return Returned(dump_result(fn(self._group), job.rank))
        except BaseException as error:
            when = time.monotonic()
            self._abort(f"rank {job.rank} raised {type(error).__name__}: {error}")
            return pack(error, job.rank, when)

    def _adopt(self, group: Group) -> None:
        with self._lock:
            self._group = group
            reason = self._aborted
        if reason is not None:
            group.abort(reason)

    def _abort(self, reason: str) -> None:
        with self._lock:
            self._aborted = reason
            group = self._group
        if group is not None:
            try:
                group.abort(reason)
            except Exception:  # must not end the thread that detects the parent's end, nor hide the rank's own error
                traceback.print_exc()

    def _leave(self, job: Job) -> Raised | None:
        with self._lock:
            group, self._group = self._group, None
        try:
            if group is not None:
                group.close()
        except BaseException as error:
            return pack(error, job.rank, time.monotonic())
        return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def work(control: int, stack: int, dumped: int, store: str, parent: int, *, notice: float = 0.0) -> None:
    """The main function of a worker process. `store` is the name of the parent's store, `parent` its process id if the worker is to
    be killed with it, else 0.

    A worker that must exit normally when its parent is gone, instead of at once, has `notice` seconds for it.
    """
    if parent:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            return
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole process group; the parent decides how to handle it
    faulthandler.enable()
    # On SIGUSR1 every thread's stack goes to `stack`, without the interpreter lock; chained after it, Python's own handler
    # then writes a byte to `dumped`, still in the signal handler, which signals the parent that the stacks are complete.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    os.set_blocking(dumped, False)
    signal.set_wakeup_fd(dumped, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=True)
    torch.set_num_threads(1)
    prime()
    gc.collect()
    gc.enable()  # QUICK_START had it off
    gc.freeze()  # existing objects stay: a collection before each check for leftovers then costs almost nothing
    meeting = PrivateStore.open(store)
    meeting.set_timeout(timedelta(seconds=START_LIMIT))
    Worker(socket.socket(fileno=control), meeting, notice=notice).serve()
