"""`balance`: ranks of which one is half as fast, with equal shares of a batch and with those of `gw.Balance`; and what
`agree_to_skip` costs.

A rank is slowed by a sleep for each sample in its forward. Ideal is what the sleeps take if all ranks end at the same time.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.oversubscribed import busy_processes
from benchmarks.result import Column, Figures, Result, fixed, time_words
from benchmarks.timing import slowest
from benchmarks.world import RankContext, bar, run_world
from gradwire.groups import C10dGroup, Group, SharedMemoryGroup
from gradwire.parallel import Balance, DistributedDataParallel

LEARNING = 20
"""Steps before anything is timed."""
LIMIT = 1.15
"""How much longer than ideal a step may take."""
_CALLS = 200


@dataclass(frozen=True, slots=True)
class Task:
    """What ranks do: rank r sleeps (1 + r) times `seconds` for each of its samples, of `total` in all."""

    group: str
    total: int
    seconds: float
    steps: int

    def ideal(self, ranks: int) -> float:
        """Seconds of a step if shares were no whole numbers, and nothing took time but the sleeps."""
        return self.total / sum(1 / (self.seconds * (1 + rank)) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds on one rank: of each step, and of a call of `agree_to_skip`; and the shares in the end."""

    equal: tuple[float, ...]
    balanced: tuple[float, ...]
    skip: tuple[float, ...]
    shares: tuple[int, ...]


class Slow(nn.Module):
    """A small model that sleeps for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.seconds = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * len(x))
        loss: Tensor = self.layers(x).pow(2).mean()
        return loss


def run_task(task: Task, context: RankContext) -> Times:
    """Measure on this rank: steps with equal shares and with those of Balance, in turns."""
    make = C10dGroup.gloo if task.group == "gloo" else SharedMemoryGroup
    group: Group = make(context.store, context.rank, context.size, timeout=context.timeout, name=task.group)
    try:
        equal, ddp = (
            DistributedDataParallel(Slow(task.seconds * (1 + group.rank)), process_group=group) for _ in range(2)
        )
        balance, data = Balance(ddp), torch.randn(task.total, 64, generator=torch.Generator().manual_seed(1))
        same = torch.tensor_split(data, group.size)[group.rank]
        found: tuple[list[float], list[float], list[float]] = [], [], []
        for step in range(LEARNING + task.steps):
            if step >= LEARNING:
                found[0].append(_timed(lambda: equal(same).backward()))
            found[1].append(_timed(lambda: ddp(_mine(balance, group, data)).backward()))
            _check(ddp, data)
            context.report(step if group.rank == 0 else 0)
        for _ in range(_CALLS):
            found[2].append(_timed(lambda: ddp.agree_to_skip(True)))
        context.barrier.wait()
        return Times(tuple(found[0]), tuple(found[1][LEARNING:]), tuple(found[2][1:]), balance.shares)
    finally:
        group.close()


def _mine(balance: Balance, group: Group, data: Tensor) -> Tensor:
    balance.batch_size(len(data))
    parts: list[Tensor] = list(data.split(list(balance.shares)))
    return parts[group.rank]


def _timed(do: Callable[[], object]) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def _check(ddp: DistributedDataParallel, data: Tensor) -> None:
    """The gradients are those of the mean over all samples; zero them."""
    layers: Any = ddp.module.layers
    wanted = torch.autograd.grad(layers(data).pow(2).mean(), list(layers.parameters()))
    for p, want in zip(ddp.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-5, atol=1e-6)
    ddp.zero_grad()


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    machine, rows, above = describe(), {}, []
    for kind in args.groups:
        for busy in args.busy:
            task = Task(kind, args.total, args.ms / 1e3, args.steps)
            name = f"{'shm' if kind == 'shared_memory' else kind}, {busy} busy"
            with busy_processes(busy), bar(console, name, LEARNING + task.steps, "steps") as on_report:
                times: list[Times] = run_world(
                    functools.partial(run_task, task), 2, name="balance", timeout=args.timeout, on_report=on_report
                )
            rows[name] = row_of(times, task)
            if rows[name]["balanced"].median > LIMIT * task.ideal(2):
                above.append(name)
    settings = {
        "step": f"a total of {args.total} samples; rank 0 sleeps {args.ms:g} ms for each of its own, rank 1 twice that",
        "measured": f"{args.steps} steps after {LEARNING}; the slowest rank counts",
    }
    columns = [
        Column("ideal", "ideal", time_words),
        Column("equal", "equal", time_words),
        Column("balanced", "balanced", time_words),
        Column("ratio", "to ideal", fixed(2)),
        Column("shares", "shares"),
        Column("skip", "skip", time_words),
    ]
    caption = "Medians, and quartiles below them. To ideal: balanced. Skip: a call of agree_to_skip."
    words = f"{len(rows) - len(above)} of {len(rows)} take at most {LIMIT:g} x ideal"
    return Result(
        "balance",
        machine,
        settings,
        [Figures(rows, columns, caption, first="group")],
        [f"{words}{'; not ' + ', '.join(above) if above else ''}."],
    )


def row_of(times: Sequence[Times], task: Task) -> dict[str, Any]:
    """The row of one world."""
    ideal = task.ideal(len(times))
    balanced = slowest("balanced", [one.balanced for one in times])
    return {
        "ideal": ideal,
        "equal": slowest("equal", [one.equal for one in times]),
        "balanced": balanced,
        "ratio": balanced.median / ideal,
        "shares": " + ".join(map(str, times[0].shares)),
        "skip": slowest("skip", [one.skip for one in times]),
    }
