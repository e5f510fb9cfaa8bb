"""The demo's comparison: a few steps with torch's DDP and with gradwire, on this machine and over a simulated slow link."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from gradwire.cli.demo.model import DemoJob, Transformer, random_windows, standard_library
from gradwire.groups import Group, SharedMemoryGroup
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.interop import as_process_group
from gradwire.lab import Throttled
from gradwire.observe.units import plural
from gradwire.parallel import DistributedDataParallel
from gradwire.testing import run_ranks

_ROUNDS, _BLOCK, _WARM_UP = 5, 10, 2
"""Rounds, and steps of a variant in a round, of which the first are not timed."""
_LATENCY_MS = 0.5
_BUSY = 0.1
"""The load per core, in addition to that of the ranks, at which the times are called unreliable."""
Times = tuple[list[float], list[float]]
"""What a rank has measured: of each variant the seconds and the bytes of a step."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train: by torch's DDP or gradwire's, over a simulated link or not, perhaps with a hook."""

    name: str
    torchs: bool
    over_link: bool
    hook: str = ""


VARIANTS = (
    Variant("torch's DDP over gloo", torchs=True, over_link=False),
    Variant("gradwire over shared memory", torchs=False, over_link=False),
    Variant("torch's DDP", torchs=True, over_link=True),
    Variant("torch's DDP, its fp16 hook", torchs=True, over_link=True, hook="fp16"),
    Variant("gradwire", torchs=False, over_link=True),
    Variant("gradwire, 8 bits, error feedback", torchs=False, over_link=True, hook="quantize8"),
)


def compare(job: DemoJob, mbit: float, ranks: int, *, timeout: float) -> Table:
    """Measure all variants, and return the table."""
    with tempfile.TemporaryDirectory(prefix="gradwire-demo-") as folder:
        rank_main = functools.partial(measure, job, mbit, f"{folder}/store")
        times = run_ranks(rank_main, ranks, kind="shared_memory", timeout=timeout)
    return table(mbit, times, load=os.getloadavg()[0], cores=len(os.sched_getaffinity(0)))


def measure(job: DemoJob, mbit: float, store: str, group: Group) -> Times:
    """On a rank: a few steps of every variant in turn, and again, so that a busy moment affects all alike."""
    torch.set_num_threads(1)
    data = torch.Generator().manual_seed(job.seed * group.size + group.rank + 1)
    text, length = standard_library().train, job.shape.context + 1
    with ExitStack() as opened:
        steps, sent = [], []
        for variant in VARIANTS:
            model = job.model()
            meet = PrefixStore(variant.name, FileStore(store, group.size))
            wrapped, count = _wrap(variant, model, meet, group, mbit, opened)
            steps.append(_step(wrapped, model, lambda: random_windows(text, job.batch_size, length, data)))
            sent.append(count)
        before = [count() for count in sent]
        seconds: list[list[float]] = [[] for _ in VARIANTS]
        for _ in range(_ROUNDS):
            for step, times in zip(steps, seconds):
                group.barrier(label="next variant")
                times += [step() for _ in range(_BLOCK)][_WARM_UP:]
        group.barrier(label="all variants done")  # no rank closes while another is still working
        nbytes = [(count() - at_start) / (_ROUNDS * _BLOCK) for count, at_start in zip(sent, before)]
        return [median(times) for times in seconds], nbytes


def _wrap(
    variant: Variant, model: nn.Module, store: Store, group: Group, mbit: float, opened: ExitStack
) -> tuple[nn.Module, Callable[[], float]]:
    """The model as the variant wraps it, and what counts the bytes that this rank has sent."""
    if variant.torchs and not variant.over_link:
        limit = timedelta(seconds=group.timeout)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size, timeout=limit)
        opened.callback(dist.destroy_process_group)
        return nn.parallel.DistributedDataParallel(model), lambda: 0.0
    own: Group = SharedMemoryGroup(store, group.rank, group.size, timeout=group.timeout, name=variant.name)
    link = Throttled(own, mbit=mbit, latency_ms=_LATENCY_MS) if variant.over_link else None
    opened.callback((link or own).close)
    if variant.torchs:
        theirs = nn.parallel.DistributedDataParallel(model, process_group=as_process_group(link or own))
        if variant.hook:
            theirs.register_comm_hook(theirs.process_group, fp16_compress_hook)
        wrapped: nn.Module = theirs
    else:
        wrapped = ours = DistributedDataParallel(model, process_group=link or own)
        if variant.hook:
            ours.set_hook(NAMED_HOOKS[variant.hook].build())
        opened.callback(ours.replica.detach)
    return wrapped, lambda: 0.0 if link is None else link.sent_bytes


def _step(wrapped: nn.Module, model: Transformer, batch: Callable[[], torch.Tensor]) -> Callable[[], float]:
    """A step of training, which returns how many seconds it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        windows = batch()
        logits = wrapped(windows[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        return time.perf_counter() - began

    return step


def table(mbit: float, times: Sequence[Times], *, load: float, cores: int) -> Table:
    """One row for each variant, of its slowest rank; factors are relative to torch's DDP on the same link."""
    lines = [f"Median of {_ROUNDS * (_BLOCK - _WARM_UP)} steps, all variants in turns; the link is simulated."]
    if len(times) > cores:
        lines.append(
            f"{len(times)} ranks share {plural(cores, 'core')}: times depend on the scheduler more than on either DDP."
        )
    if load - len(times) > _BUSY * cores:
        lines.append(f"The machine was busy (load {load:.1f} on {plural(cores, 'core')}): repeat this on an idle one.")
    found = Table(caption="\n".join(lines), caption_justify="left")
    for head in ("", "ms per step", "KB sent per step", "speed"):
        found.add_column(head, justify="right" if head else "left")
    slowest = [max(seconds[i] for seconds, _ in times) for i in range(len(VARIANTS))]
    for over_link, title in ((False, "on this machine"), (True, f"over {mbit:g} Mbit/s")):
        rows = [i for i, variant in enumerate(VARIANTS) if variant.over_link is over_link]
        found.add_row(f"[bold]{title}")
        for i in rows:
            found.add_row(
                f"  {VARIANTS[i].name}",
                f"{slowest[i] * 1e3:.1f}",
                f"{times[0][1][i] / 1e3:,.0f}" if over_link else "",
                f"{slowest[rows[0]] / slowest[i]:.2f}x",
                end_section=i == rows[-1],
            )
    return found
