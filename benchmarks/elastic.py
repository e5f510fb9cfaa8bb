"""`elastic`: what an elastic run adds to a step in which nothing fails.

On each rank a model under gradwire's DistributedDataParallel and one in a run of `gw.elastic` take turns, over shared memory, with
the same inputs and weights. The run's part of a step is the copies of what a dropped step would restore, the vote, and every 100
steps a digest of the parameters. On CUDA, where the device votes, it is a world of one over NCCL, next to torch's as well.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import nn

import gradwire as gw
from benchmarks import peers
from benchmarks.machine import describe
from benchmarks.models import GPT2, SIZES
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.timing import Rounds, compare, interleave, slowest
from benchmarks.training_rank import check_same
from benchmarks.workload import Workload, find_device, settled
from benchmarks.world import RankContext, bar, run_world
from gradwire import hooks
from gradwire.elasticity.hub import Hub
from gradwire.errors import UsageError
from gradwire.groups import SharedMemoryGroup

PLAIN, ELASTIC = "DistributedDataParallel", "gw.elastic"
LIMIT, CUDA_LIMIT = 1.02, 1.01
"""How much longer a step may take."""
_HOOKS = {"mean": hooks.mean(), "quantize8": hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8))}
_KEY = b"the key of a benchmark"
_WARM_UP = 3
Seconds = Mapping[str, tuple[float, ...]]


def run_trial(args: argparse.Namespace, hook: str, address: str, context: RankContext) -> Seconds:
    """Seconds per step on this rank, of both variants in each round."""
    member = {
        "GRADWIRE_HUB": address,
        "GRADWIRE_HUB_KEY": _KEY.hex(),
        "GRADWIRE_MEMBER": f"rank-{context.rank}",
        "GRADWIRE_STARTERS": str(context.size),
        "GRADWIRE_ELASTIC": f"{context.size}:{context.size}",
    }
    torch.manual_seed(0)
    start = GPT2(SIZES[args.size])
    torch.manual_seed(1 + context.rank)  # every rank reads different data
    inputs = start.batch(args.batch)[:, : args.tokens + 1]
    group = SharedMemoryGroup(context.store, context.rank, context.size, timeout=context.timeout)
    models = {name: copy.deepcopy(start) for name in (PLAIN, ELASTIC)}
    plain, elastic = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models.values())
    ddp = gw.DistributedDataParallel(models[PLAIN], process_group=group)
    ddp.set_hook(_HOOKS[hook])
    with mock.patch.dict(os.environ, member):
        run = gw.elastic(models[ELASTIC], elastic, hook=_HOOKS[hook])
    with group, run:
        steps = {PLAIN: _plain_step(ddp, plain, inputs), ELASTIC: lambda: _elastic_step(run, inputs)}
        for step in steps.values():
            for _ in range(_WARM_UP):
                step()
        if hook == "mean":  # the others round in blocks, and buckets differ until they are rebuilt
            check_same(start, models, group)
        gc.collect()
        gc.freeze()
        rounds = Rounds(args.steps // args.block, block=args.block, lead_in=1, warm_up=1)
        report = context.report if context.rank == 0 else None
        series = interleave(steps, rounds, fence=context.barrier.wait, after_round=report)
        context.barrier.wait()  # no rank closes while another is still working
        ddp.replica.detach()
    return {name: one.seconds for name, one in series.items()}


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()

    return step


def _elastic_step(run: Any, inputs: torch.Tensor) -> None:
    run.model(inputs).backward()
    assert run.step()


def _gated_step(run: Any, work: Workload) -> Callable[[], None]:
    steps = iter(run)

    def step() -> None:
        now = next(steps)
        for _ in now:
            work.loss(run.model).backward()
        assert now.commit()

    return step


def _on_cuda(args: argparse.Namespace, console: Console) -> Result:
    device, rows = find_device("elastic", "cuda"), dict[str, dict[str, Any]]()
    rounds = Rounds(max(2, args.steps // args.block), block=args.block, lead_in=1, warm_up=15)
    for batch in args.batch or [8, 32]:
        with settled(one_thread=False), peers.world_of_one(device), console.status(f"batch {batch}"):
            work = Workload.gpt2("small", batch=batch, device=device)
            models = {name: copy.deepcopy(work.model) for name in (peers.TORCH, PLAIN, ELASTIC)}
            ddp = nn.parallel.DistributedDataParallel(models[peers.TORCH])
            ours = gw.DistributedDataParallel(models[PLAIN])
            optimizer = torch.optim.AdamW(models[ELASTIC].parameters(), lr=1e-4, fused=True)
            deal = gw.Deal(range(1), global_batch=1, slots=1)
            with gw.elastic(models[ELASTIC], optimizer, data=deal, kind="nccl") as run:
                steps = {peers.TORCH: work.step(ddp, adamw=True), PLAIN: work.step(ours, adamw=True)}
                steps[ELASTIC] = _gated_step(run, work)
                series = interleave(steps, rounds, fence=torch.cuda.synchronize)
            ours.replica.detach()
        name = f"batch {batch}"
        rows[name] = {key: series[full] for key, full in zip(("torch", "plain", "elastic"), series, strict=True)}
        rows[name] |= {
            "ratio": compare(series[ELASTIC], series[PLAIN]),
            "torchs": compare(series[ELASTIC], series[peers.TORCH]),
        }
    settings = {
        "model": "GPT-2 small, bfloat16 autocast, fused AdamW, 1,024 tokens",
        "world": "one rank over NCCL: the vote is the device's",
        "measured": f"{rounds.count} interleaved rounds of {args.block} steps",
    }
    columns = [Column(key, key, fixed(2, 1e3)) for key in ("torch", "plain", "elastic")]
    columns += [Column("ratio", "to plain", fixed(3)), Column("torchs", "to torch", fixed(3))]
    caption = "ms per step: median, and quartiles below it, of torch's DistributedDataParallel, gradwire's (plain) and gw.elastic. "
    caption += "Ratios: of medians, and below it the median over rounds."
    line = f"Ratio at the largest batch: {rows[name]['ratio'].median_of_rounds:.3f}; the limit is {CUDA_LIMIT:g}."
    return Result("elastic", describe(device), settings, [Figures(rows, columns, caption, first="batch")], [line])


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    if args.device == "cuda":
        return _on_cuda(args, console)
    if len(args.batch or [1]) > 1:
        raise UsageError("elastic --batch: several batches need --device cuda. Name one.")
    (args.batch,) = args.batch or [1]
    machine, rows = describe(), {}
    for hook in args.hooks:
        with tempfile.TemporaryDirectory(prefix="gradwire-elastic-") as folder:
            hub = Hub(Path(folder) / "hub", key=_KEY)
            trial = functools.partial(run_trial, args, hook, "{}:{}".format(*hub.address))
            try:
                with bar(console, hook, args.steps // args.block) as on_report:
                    ranks = run_world(trial, args.ranks, name="elastic", timeout=args.timeout, on_report=on_report)
            finally:
                hub.close()
        rows[hook] = row_of(ranks)
    settings = {
        "model": f"a transformer of GPT-2's shape, {args.size}, AdamW, batch {args.batch} x {args.tokens} tokens per rank",
        "world": f"{args.ranks} ranks, one thread each, shared memory",
        "measured": f"{args.steps // args.block} interleaved rounds of {args.block} steps; the slowest rank counts",
    }
    columns = [
        Column("plain", PLAIN, fixed(1, 1e3)),
        Column("elastic", ELASTIC, fixed(1, 1e3)),
        Column("ratio", "ratio", fixed(3)),
    ]
    caption = "ms per step: median, and quartiles below it. Ratio: of medians, and below it the median over rounds."
    good = sum(row["ratio"].median_of_rounds <= LIMIT for row in rows.values())
    line = f"{good} of {len(rows)} take at most {LIMIT:g} x a step of {PLAIN}."
    return Result("elastic", machine, settings, [Figures(rows, columns, caption, first="hook")], [line])


def row_of(ranks: list[Seconds]) -> dict[str, Any]:
    """What one hook's ranks have measured."""
    plain, elastic = (slowest(name, [rank[name] for rank in ranks]) for name in (PLAIN, ELASTIC))
    return {"plain": plain, "elastic": elastic, "ratio": compare(elastic, plain)}
