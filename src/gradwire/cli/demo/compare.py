"""The demo's comparison: a few steps with torch's DDP and with gradwire, on this machine and over a simulated slow link."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
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

_ROUNDS, _BLOCK, _WARM_UP = 5, 10, 2
"""Steps of a way to train in a round, of which the first are not timed."""
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
    with bar(console, "comparing", _ROUNDS) as progress:
        task = functools.partial(measure, comparison)
        results = run_world(task, ranks, name="demo", timeout=timeout, on_report=progress)
    return table(comparison, [max(of, key=lambda one: one.seconds) for of in zip(*results)])


def measure(comparison: Comparison, context: RankContext) -> list[Timing]:
    """On a rank: a few steps of every way to train in turn, and again, so that a busy moment affects all alike."""
    torch.set_num_threads(1)
    job, corpus = comparison.job, standard_library()
    seed = job.seed * context.size + context.rank + 1
    with ExitStack() as opened:
        ways = [(name, False) for name in HERE] + [(name, True) for name in OVER_LINK]
        found = []
        for number, (name, over_link) in enumerate(ways):
            model = start(job.size, job.seed)
            wrapped = opened.enter_context(
                _wrap(comparison, model, context, name, f"demo {number}", over_link=over_link)
            )
            learner = Learner(model, wrapped.model, corpus, seed=seed, batch=job.batch_size, rate=_RATE)
            found.append((Timing(name, over_link, 0.0, wrapped.sent()), wrapped, learner, list[float]()))
        for done in range(1, _ROUNDS + 1):
            for _, _, learner, seconds in found:
                context.barrier.wait()
                seconds += [_time(learner) for _ in range(_BLOCK)][_WARM_UP:]
            if context.rank == 0:
                context.report(done)
        steps = _ROUNDS * _BLOCK
        return [
            replace(at_start, seconds=median(seconds), nbytes=(wrapped.sent() - at_start.nbytes) / steps)
            for at_start, wrapped, _, seconds in found
        ]


def _wrap(
    comparison: Comparison, model: nn.Module, context: RankContext, name: str, key: str, *, over_link: bool
) -> AbstractContextManager[Wrapped]:
    if over_link:
        return CONTENDERS[OVER_LINK[name]].wrap(model, context, Simulated(comparison.mbit, _LATENCY_MS), key)
    return _here(HERE[name], model, context, key)


def _time(learner: Learner) -> float:
    began = time.perf_counter()
    learner.step()
    return time.perf_counter() - began


@contextmanager
def _here(which: str, model: nn.Module, context: RankContext, key: str) -> Iterator[Wrapped]:
    store = PrefixStore(key, context.store)
    if which == "torch":
        with peers.torch_world("gloo", store, context.rank, context.size, timeout=context.timeout):
            ddp = nn.parallel.DistributedDataParallel(model)
            yield Wrapped(ddp, lambda: 0.0, keep=ddp.process_group)
        return
    with SharedMemoryGroup(store, context.rank, context.size, timeout=context.timeout, name=key) as group:
        ours = DistributedDataParallel(model, process_group=group)
        yield Wrapped(ours, lambda: 0.0)
        ours.replica.detach()


def table(comparison: Comparison, timings: list[Timing]) -> Table:
    """One row for each way; factors are relative to torch's DDP on the same link."""
    found = Table(
        caption=f"median of {_ROUNDS * (_BLOCK - _WARM_UP)} steps, all ways in turns; the link is simulated",
        caption_justify="left",
    )
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
