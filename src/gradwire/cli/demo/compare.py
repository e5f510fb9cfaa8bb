"""The demo's comparison: a few steps with torch's DDP and with gradwire, on this machine and over a simulated slow link."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from gradwire.cli.demo.text import standard_library
from gradwire.cli.demo.train import Job
from gradwire.cli.experiment import peers
from gradwire.cli.experiment.bar import bar
from gradwire.cli.experiment.rank_context import RankContext
from gradwire.cli.experiment.world import run_world
from gradwire.cli.lab.contenders import CONTENDERS, REFERENCE, Simulated, Wrapped
from gradwire.cli.lab.learner import Learner, start
from gradwire.groups import SharedMemoryGroup
from gradwire.parallel import DistributedDataParallel

_WARM_UP, _STEPS = 5, 40
_LATENCY_MS = 0.5
_RATE = 1e-3
HERE = {"torch's DDP over gloo": "torch", "gradwire over shared memory": "gradwire"}
OVER_LINK = {
    "torch's DDP": REFERENCE,
    "torch's DDP, its fp16 hook": "torch-fp16",
    "gradwire": "mean",
    "gradwire, 8 bits, error feedback": "quantize8",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared: the job's model, also over a link of `mbit` megabits per second."""

    job: Job
    mbit: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One way to train: seconds and bytes of a step on one rank; no bytes where there is no link."""

    name: str
    over_link: bool
    seconds: float
    nbytes: float


def compare(comparison: Comparison, ranks: int, console: Console, *, timeout: float) -> Table:
    """Measure all, and return the table."""
    with bar(console, "comparing", len(HERE) + len(OVER_LINK)) as progress:
        task = functools.partial(measure, comparison)
        results = run_world(task, ranks, name="demo", timeout=timeout, on_report=progress)
    return table(comparison, [max(of, key=lambda one: one.seconds) for of in zip(*results)])


def measure(comparison: Comparison, context: RankContext) -> list[Timing]:
    """On a rank: every way to train, one after another."""
    torch.set_num_threads(1)
    job, link = comparison.job, Simulated(comparison.mbit, _LATENCY_MS)
    corpus, found, keep = standard_library(), [], []
    ways = [(name, False) for name in HERE] + [(name, True) for name in OVER_LINK]
    for number, (name, over_link) in enumerate(ways, 1):
        model = start(job.size, job.seed)
        key = f"demo {number}"
        if over_link:
            wrapper = CONTENDERS[OVER_LINK[name]].wrap(model, context, link, key)
        else:
            wrapper = _here(HERE[name], model, context, key)
        with wrapper as wrapped:
            seed = job.seed * context.size + context.rank + 1
            learner = Learner(model, wrapped.model, corpus, seed=seed, batch=job.batch_size, rate=_RATE)
            for _ in range(_WARM_UP):
                learner.step()
            before = wrapped.sent()
            seconds = [_time(learner) for _ in range(_STEPS)]
            found.append(Timing(name, over_link, median(seconds), (wrapped.sent() - before) / _STEPS))
            keep.append(wrapped.keep)  # see lab.contenders, Note [Who drops a process group]
        context.barrier.wait()
        if context.rank == 0:
            context.report(number)
    return found


def _time(learner: Learner) -> float:
    began = time.perf_counter()
    learner.step()
    return time.perf_counter() - began


@contextmanager
def _here(which: str, model: nn.Module, context: RankContext, key: str) -> Iterator[Wrapped]:
    store = PrefixStore(key, context.store)
    if which == "torch":
        with peers.gloo_world(store, context.rank, context.size, timeout=context.timeout):
            ddp = nn.parallel.DistributedDataParallel(model)
            yield Wrapped(ddp, lambda: 0.0, keep=ddp.process_group)
        return
    with SharedMemoryGroup(store, context.rank, context.size, timeout=context.timeout, name=key) as group:
        ours = DistributedDataParallel(model, process_group=group)
        yield Wrapped(ours, lambda: 0.0)
        ours.replica.detach()


def table(comparison: Comparison, timings: list[Timing]) -> Table:
    """One row for each way; factors are relative to torch's DDP on the same link."""
    found = Table(caption=f"median of {_STEPS} steps; the link is simulated", caption_justify="left")
    for head in ("", "ms per step", "KB sent per step", "speed"):
        found.add_column(head, justify="right" if head else "left")
    for over_link, title in ((False, "on this machine"), (True, f"over {comparison.mbit:g} Mbit/s")):
        rows = [one for one in timings if one.over_link is over_link]
        found.add_row(f"[bold]{title}", end_section=False)
        for one in rows:
            sent = f"{one.nbytes / 1e3:,.0f}" if over_link else ""
            found.add_row(
                f"  {one.name}",
                f"{one.seconds * 1e3:.1f}",
                sent,
                f"{rows[0].seconds / one.seconds:.2f}x",
                end_section=one is rows[-1],
            )
    return found
