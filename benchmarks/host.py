"""`host`: the host time and the step time of a hook, compared with torch's DDP without a hook in the same run.

Host time is from the start of a step, with an idle device, to the return of `backward()`. Step time is that of steps in a row, in
which the host runs ahead of the device where it can. A step is `zero_grad(set_to_none=True)`, forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks import peers
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.timing import Rounds, Series, Step, compare, interleave
from benchmarks.workload import Workload, find_device, settled
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.parallel import DistributedDataParallel

_WARM_UP = 5
"""Steps of each variant: buckets are rebuilt after the first, and a hook's work may be recorded in the second and third."""
_LEAD_IN = 1
INSIDE = ", inside"
"""The DDP of a compiled model. In torch's it overlaps nothing; around torch's, Dynamo makes a graph of each bucket."""
_SINGLE = 3
"""Steps of a round whose host time is taken; their median counts."""


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure every batch."""
    device = find_device("host", args.device)
    block = 5 if device.type == "cuda" else 2
    figures, lines = [], []
    with settled(one_thread=device.type == "cpu"), peers.world_of_one(device), console.status("preparing") as status:
        for batch in args.batch:
            work = Workload.gpt2(
                args.size or ("small" if device.type == "cuda" else "tiny"), batch=batch, device=device
            )
            with _models(args.hooks, work, compiled=args.compiled) as models:
                series = _measure(work, models, args.rounds, block, status.update)
            made, said = figures_of(*series, title=f"{'compiled around' if args.compiled else 'eager'}, batch {batch}")
            figures.append(made)
            lines += said
    settings = {
        "model": work.words.rpartition(", ")[0],
        "step": "zero_grad(set_to_none=True), forward, backward",
        "measured": f"{args.rounds} interleaved rounds of {block} steps in a row and {_SINGLE} single ones of each variant",
    }
    lines.append("The world has one rank, so communication is free: what is measured is what happens on this rank.")
    return Result("host", describe(device), settings, figures, lines)


@contextmanager
def _models(hooks: Sequence[str], work: Workload, *, compiled: bool) -> Iterator[dict[str, nn.Module]]:
    """The bare model, in torch's DDP, in ours, and in ours with each hook. `compiled` around the DDPs, and inside."""
    kinds, wrapped = peers.wrappers(), []
    around: Any = torch.compile if compiled else lambda model: model

    def wrap(model: nn.Module, hook: str | None = None) -> nn.Module:
        wrapped.append(ours := kinds[peers.OURS](model))
        assert isinstance(ours, DistributedDataParallel)
        if hook is not None:
            ours.set_hook(NAMED_HOOKS[hook].build())
        return ours

    try:
        models = {name: around(kinds[name](_copy(work.model))) for name in (peers.BARE, peers.TORCH)}
        if compiled:
            models[peers.TORCH + INSIDE] = kinds[peers.TORCH](around(_copy(work.model)))
        work.check(models)  # which compiles them, before there is a DDP of ours: later graphs report gradients
        models[peers.OURS] = around(wrap(_copy(work.model)))
        if compiled:
            models[peers.OURS + INSIDE] = wrap(around(_copy(work.model)))
        work.check(models)
        yield models | {name: around(wrap(_copy(work.model), name)) for name in hooks}
    finally:
        for model in wrapped:
            peers.unwrap(model)


def _copy(model: nn.Module) -> nn.Module:
    """With a forward of its own, as torch.compile keeps what it has compiled by code, and not by model."""
    own = type(model).forward
    code = types.FunctionType(own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    copied = copy.deepcopy(model)
    copied.__class__ = type(type(model).__name__, (type(model),), {"forward": code})
    return copied


class _Single:
    """A step with an idle device at its start, whose host time is kept."""

    def __init__(self, step: Step, fence: Step) -> None:
        self._step = step
        self._fence = fence
        self.seconds: list[float] = []

    def __call__(self) -> None:
        self._fence()
        begin = time.perf_counter()
        self._step()
        self.seconds.append(time.perf_counter() - begin)

    def series(self, name: str, rounds: int) -> Series:
        """The median of each round, without its first step."""
        taken, each = self.seconds[-rounds * (_LEAD_IN + _SINGLE) :], _LEAD_IN + _SINGLE
        return Series(
            name, tuple(statistics.median(taken[i + _LEAD_IN : i + each]) for i in range(0, len(taken), each))
        )


def _measure(
    work: Workload, models: Mapping[str, nn.Module], rounds: int, block: int, report: Any
) -> tuple[dict[str, Series], dict[str, Series]]:
    """Step times and host times by variant."""
    device = work.inputs.device
    fence = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    steps: dict[str, Step] = {name: work.step(model, adamw=False) for name, model in models.items()}
    single = {name: _Single(step, fence) for name, step in steps.items()}
    variants = steps | {f"{name}, host": step for name, step in single.items()}
    plan = Rounds(rounds, {name: block if name in steps else _SINGLE for name in variants}, _LEAD_IN, _WARM_UP)
    report(f"{work.words}: warming up")
    found = interleave(variants, plan, fence=fence, after_round=lambda done: report(f"round {done} of {rounds}"))
    return {name: found[name] for name in steps}, {name: one.series(name, rounds) for name, one in single.items()}


def figures_of(step: Mapping[str, Series], host: Mapping[str, Series], *, title: str) -> tuple[Figures, list[str]]:
    """Each variant next to torch's DDP."""
    rows: dict[str, dict[str, Any]] = {}
    for name in step:
        rows[name] = {"step": step[name], "host": host[name]}
        if name not in (peers.BARE, peers.TORCH):
            for key, series in (("step", step), ("host", host)):
                more = series[name].minus(series[peers.TORCH])
                rows[name] |= {f"{key}_more": more, f"{key}_ratio": compare(series[name], series[peers.TORCH])}
    said = [
        f"{name} {row['step_more'].median * 1e3:+.1f} ms ({row['host_more'].median * 1e3:+.1f} of host time)"
        for name, row in rows.items()
        if "step_more" in row
    ]
    columns = (
        *(Column(key, f"{key}\nms", fixed(1, 1e3)) for key in ("step", "host")),
        *(Column(f"{key}_more", f"{key}\n+ ms", lambda s: f"{s * 1e3:+.1f}") for key in ("step", "host")),
        *(Column(f"{key}_ratio", f"{key}\nratio", fixed(2)) for key in ("step", "host")),
    )
    caption = (
        "Medians, and quartiles below them. + ms and ratios: over torch's DDP without a hook, by round; the upper ratio is that of "
        "medians. Step: of steps in a row. Host: until backward() returns, of single steps that begin with an idle device."
    )
    return Figures(rows, columns, caption, title=title), [f"Over a step of torch's DDP, {title}: {', '.join(said)}."]
