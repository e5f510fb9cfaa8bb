"""`overhead`: what data parallelism adds to a step without any communication.

At world size 1 no bytes have to move, so the extra time of a wrapped model is pure bookkeeping: hooks, buckets, copies, a
collective of one rank. A step is `zero_grad(set_to_none=True)`, forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks import against, peers
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.timing import Ratio, Rounds, Series, Step, compare, interleave
from benchmarks.workload import Workload, find_device, settled
from gradwire.collectives.finite import probe
from gradwire.errors import UsageError
from gradwire.parallel import DistributedDataParallel
from gradwire.recorder import writer
from gradwire.recorder.writer import FlightRecorder

_WARM_UP = 15
"""Warm-up steps: buckets are rebuilt after the first, and both DDPs sample their own times in the first ten."""
_RECORDED = ", recorded"
_SUMS = "the sums alone"
_WAIT = "a wait alone"
"""On CUDA: a step without a check, and a wait for the device between backward and optimizer, where a check has to decide."""
_PARAMETERS = 400
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    device = find_device("overhead", args.device)
    if args.against is not None:
        return _run_against(args, console)
    if args.batch is not None and len(args.batch) > 1:
        raise UsageError("overhead --batch: several batches need --against. Name one.")
    machine = describe(device)
    block = args.block or (5 if device.type == "cuda" else 3)
    rounds = max(2, (args.steps or (100 if device.type == "cuda" else 300)) // block)
    adamw = args.adamw or (args.nonfinite and device.type == "cuda")  # without its steps the check would wait
    with settled(one_thread=device.type == "cpu"), peers.world_of_one(device), console.status("preparing") as status:
        work = _workload(args, device)
        series = _measure(
            work,
            _wrappers(args),
            Rounds(rounds, block=block, lead_in=1, warm_up=_WARM_UP),
            adamw=adamw,
            fence=functools.partial(_fence, device),
            after_round=lambda done: status.update(f"measuring: round {done} of {rounds}"),
            clock=_CLOCKS[args.clock or "wall"],
        )
    settings = {
        "model": work.words,
        "step": "zero_grad(set_to_none=True), forward, backward" + (", AdamW" if adamw else ""),
        "measured": f"{args.clock or 'wall'} time, {rounds} interleaved rounds of {block} steps each, after one untimed step",
    }
    figures, lines = figures_of_check(series) if args.nonfinite else figures_of(series, device)
    return Result("overhead", machine, settings, [figures], lines)


def _run_against(args: argparse.Namespace, console: Console) -> Result:
    cuda = args.device == "cuda"
    size = args.size or ("small" if cuda and args.parameters is None else None)
    block = args.block or (5 if cuda else 3)
    rounds = max(2, (args.steps or 120) // block)
    figures, lines = [], []
    for batch in args.batch or ([4] if size is None else [1, 32] if cuda else [8]):
        clock = args.clock or ("wall" if cuda else "cpu")
        plan = against.Plan(args.device, size, args.parameters or _PARAMETERS, batch, block, clock)
        found = against.compare_checkouts(plan, args.against, processes=args.processes, rounds=rounds, console=console)
        figures.append(against.figures_of(found))
        lines += against.lines_of(found)
    settings = {
        "new": str(against.HERE),
        "old": str(args.against.resolve()),
        "measured": f"{args.processes} pairs of processes, {rounds} turns of each process, {block} steps of each variant a turn",
    }
    return Result("overhead --against", describe(find_device("overhead", args.device)), settings, figures, lines)


def _wrappers(args: argparse.Namespace) -> Mapping[str, peers.Wrapper]:
    if args.nonfinite:
        return peers.checked_wrappers(waiting=args.device == "cuda")
    wrappers = dict(peers.wrappers())
    if args.record:
        wrappers |= {name + _RECORDED: wrappers[name] for name in (peers.OURS, peers.OURS + peers.VIEWS)}
    return wrappers


def _measure(
    work: Workload, wrappers: Mapping[str, peers.Wrapper], rounds: Rounds, *, adamw: bool, **how: Any
) -> dict[str, Series]:
    models = {name: wrap(copy.deepcopy(work.model)) for name, wrap in wrappers.items()}
    try:
        work.check(models)
        steps: dict[str, Step] = {
            name: work.step(model, adamw=adamw, attach=peers.CHECKED in name and not name.endswith(peers.WAITING))
            for name, model in models.items()
        }
        if peers.OURS + peers.CHECKED in models:
            if work.inputs.is_cuda:
                steps[_WAIT] = work.step(models[peers.OURS], adamw=adamw, wait=True)
            else:
                steps[_SUMS] = functools.partial(_sum, models[peers.OURS + peers.CHECKED])
        with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
            recorder = FlightRecorder(Path(folder, "rank-0.ring"), header={})
            try:
                steps |= {name: _recorded(steps[name], recorder) for name in steps if name.endswith(_RECORDED)}
                return interleave(steps, rounds, **how)
            finally:
                recorder.close()
    finally:
        for model in models.values():
            peers.unwrap(model)


def _sum(model: nn.Module) -> None:
    """What a check does in a healthy step: a sum over each bucket, and one look at all sums."""
    assert isinstance(model, DistributedDataParallel)
    buffers = [storage.buffer for storage in model.replica.reducer.buckets.storages]
    torch.stack([probe(buffer) for buffer in buffers if buffer is not None]).tolist()


def _recorded(step: Step, recorder: FlightRecorder) -> Step:
    def run() -> None:
        writer.active = recorder
        try:
            step()
        finally:
            writer.active = None

    return run


def _workload(args: argparse.Namespace, device: torch.device) -> Workload:
    batch = args.batch[0] if args.batch else None
    if args.size is None and device.type == "cpu":
        return Workload.many_small(args.parameters or _PARAMETERS, batch=batch or 4)
    return Workload.gpt2(args.size or "small", batch=batch or 8, device=device)


def _fence(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def figures_of(series: Mapping[str, Series], device: torch.device) -> tuple[Figures, list[str]]:
    """What each adds to the bare step, compared with torch's DDP; on CUDA, where steps overlap with it, whole steps."""
    bare = series[peers.BARE]
    over = bare if device.type == "cpu" else None
    what = "overhead" if over is not None else "step time"
    rows: dict[str, dict[str, Any]] = {peers.BARE: {"step": bare}}
    lines = []
    for flags, kind in (("", "with default flags"), (peers.VIEWS, "with bucket views")):
        theirs, ours = series[peers.TORCH + flags], series[peers.OURS + flags]
        recorded = series.get(peers.OURS + flags + _RECORDED)
        ratio = compare(ours, theirs, over=over)
        rows[theirs.name] = {"step": theirs, "more": theirs.median - bare.median}
        rows[ours.name] = {"step": ours, "more": ours.median - bare.median, "ratio": ratio}
        if recorded is not None:
            with_recorder = compare(recorded, theirs, over=over)
            rows[recorded.name] = {"step": recorded, "more": recorded.median - bare.median, "ratio": with_recorder}
            lines.append(
                f"The flight recorder adds {100 * (compare(recorded, ours).median_of_rounds - 1):.1f} % to a step {kind}, and "
                f"{with_recorder.median_of_rounds - ratio.median_of_rounds:+.2f} to the ratio (medians over rounds)."
            )
        if math.isnan(ratio.of_medians):
            lines.append(
                f"gradwire's {what} cannot be compared with torch's {kind}: torch's is lost in noise. Use more --steps, or an "
                "idle machine."
            )
        else:
            lines.append(
                f"gradwire's {what} is {ratio.of_medians:.2f} of torch's {kind} "
                f"(median over {ratio.rounds} rounds: {ratio.median_of_rounds:.2f})."
            )
    ratio_of = "our overhead over bare to torch's" if over is not None else "our step to torch's"
    return _figures(rows, "bare", ratio_of), lines


def figures_of_check(series: Mapping[str, Series]) -> tuple[Figures, list[str]]:
    """What a check for NaN adds to a step."""
    rows: dict[str, dict[str, Any]] = {}
    lines = []
    plain = series[peers.OURS]
    for flags, words in (("", "With default flags"), (peers.VIEWS, "With bucket views")):
        names = peers.OURS + flags, peers.OURS + flags + peers.CHECKED
        without, checked = (series[name].averaged_with(series[name + peers.AGAIN]) for name in names)
        ratio = compare(checked, without)
        apart = [abs(compare(series[name + peers.AGAIN], series[name]).median_of_rounds - 1) for name in names]
        rows[names[0]] = {"step": without}
        rows[names[1]] = {"step": checked, "more": checked.median - without.median, "ratio": ratio}
        lines.append(
            f"{words}, the check adds {_percent(ratio.median_of_rounds)} to a step (median over {ratio.rounds} rounds"
            f"{_confidence(ratio)}; ratio of medians: {_percent(ratio.of_medians)}). Two such models without it differ by "
            f"{100 * apart[0]:.2f} %, two with it by {100 * apart[1]:.2f} %."
        )
    if _SUMS in series:
        alone = compare(series[_SUMS], plain)
        rows[_SUMS] = {"step": series[_SUMS], "ratio": alone}
        lines.append(
            f"The sums alone, which differences of whole steps hide in noise, take {100 * alone.median_of_rounds:.2f} % of a step "
            "with default flags (median over rounds)."
        )
    for name, words in (
        (
            peers.OURS + peers.CHECKED + peers.WAITING,
            "Without attach_optimizer() the host waits for the result after backward, which",
        ),
        (_WAIT, "A wait for the device there, without any check,"),
    ):
        if name in series:
            ratio = compare(series[name], plain)
            rows[name] = {"step": series[name], "more": series[name].median - plain.median, "ratio": ratio}
            lines.append(
                f"{words} adds {_percent(ratio.median_of_rounds)} to a step with default flags (median over rounds)."
            )
    return _figures(rows, "plain", "a step with nonfinite=NonFinite.RAISE to one without"), lines


def _figures(rows: Mapping[str, Mapping[str, Any]], base: str, ratio_of: str) -> Figures:
    columns = (
        Column("step", "step", fixed(3, 1e3)),
        Column("more", f"over {base}", lambda seconds: f"{seconds * 1e3:+.3f}"),
        Column("ratio", "ratio", fixed(3)),
    )
    caption = (
        "ms per step: median, and quartiles below it. Ratio of medians, and below it the median of the ratios of single rounds, "
        f"of {ratio_of}."
    )
    return Figures(rows, columns, caption)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.2f} %"


def _confidence(ratio: Ratio) -> str:
    return "" if ratio.confidence is None else ", 95 % confidence: " + " to ".join(map(_percent, ratio.confidence))
