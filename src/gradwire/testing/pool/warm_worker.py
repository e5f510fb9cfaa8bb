"""A worker that is kept for many jobs: it looks for what each has left behind."""

from __future__ import annotations

import gc
from dataclasses import replace

from gradwire.testing.leftovers import Leftovers, TorchModules, prime
from gradwire.testing.pool.messages import Ended, Job
from gradwire.testing.pool.outcome import LEFTOVER_GRACE
from gradwire.testing.pool.worker import Worker, prepare


class WarmWorker(Worker):
    """Adds the leftovers of a job to its end."""

    def __init__(self, control: int, store: str, *, notice: float) -> None:
        super().__init__(control, store, notice=notice)
        self._modules = TorchModules()
        self._modules.replaced()

    def _perform(self, job: Job) -> Ended:
        before = Leftovers.snapshot()
        ended = super()._perform(job)
        return replace(ended, left=(*before.compare(grace=LEFTOVER_GRACE), *self._modules.replaced()))


def work(control: int, stack: int, dumped: int, store: str, parent: int, *, notice: float = 0.0) -> None:
    """The main function of a worker process: see `worker.work`."""
    prepare(stack, dumped, parent)
    prime()
    gc.collect()
    gc.enable()  # QUICK_START had it off
    gc.freeze()  # existing objects stay: a collection before each check for leftovers then costs almost nothing
    WarmWorker(control, store, notice=notice).serve()
