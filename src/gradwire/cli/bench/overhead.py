"""`gradwire bench overhead`: what data parallelism adds to a step without any communication.

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

from gradwire.cli.arguments import at_least
from gradwire.cli.bench.models import SIZES
from gradwire.cli.bench.workload import Workload
from gradwire.cli.experiment import peers
from gradwire.cli.experiment.bench_device import add_device_option, find_device, settled
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.report import Result, Row, add_json_option, show
from gradwire.cli.experiment.timing import Ratio, Rounds, Series, Step, compare, interleave
from gradwire.collectives.finite import probe
from gradwire.parallel import DistributedDataParallel
from gradwire.recorder import flight_recorder
from gradwire.recorder.flight_recorder import FlightRecorder

_WARM_UP = 15
"""Warm-up steps: buckets are rebuilt after the first, and both DDPs sample their own times in the first ten."""
_RECORDED = ", recorded"
_SUMS = "the sums alone"
_WAIT = "a wait alone"
"""On CUDA: a step without a check, and a wait for the device between backward and optimizer, where a check has to decide."""
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench overhead` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "overhead",
        help="a step of the bare model, torch's DDP and gradwire's, on one rank",
        description="What data parallelism adds to a step at world size 1, where nothing has to be communicated: the bare "
        "model, torch's DistributedDataParallel and gradwire's, with default flags and with gradient_as_bucket_view. On the "
        "CPU, a model of many small parameters in float32 on one thread; on CUDA, a model of GPT-2's shape under bfloat16 "
        "autocast.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add_device_option(parser)
    add("--parameters", type=at_least(1), default=400, help="number of small parameters (default: %(default)s)")
    add(
        "--size",
        choices=tuple(SIZES),
        metavar="SIZE",
        help="train the model of GPT-2's shape, also on the CPU: %(choices)s (default on cuda: small)",
    )
    add("--batch", type=at_least(1), help="sequences per step (default: 8), or rows for the small parameters (4)")
    add("--steps", type=at_least(1), help="timed steps of each variant (default: 300, on cuda 100)")
    add("--block", type=at_least(1), help="timed steps of a variant per round (default: 3, on cuda 5)")
    add(
        "--clock",
        choices=tuple(_CLOCKS),
        default="wall",
        metavar="CLOCK",
        help="wall, or cpu: the processor time of this process, which is more reliable on a busy machine (default: %(default)s)",
    )
    parser.add_argument(
        "--adamw", action="store_true", help="include an AdamW step, fused on cuda; always with --nonfinite on cuda"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--record", action="store_true", help="also measure gradwire's with the flight recorder on")
    instead.add_argument(
        "--nonfinite",
        action="store_true",
        help="instead: a step of gradwire's DDP with nonfinite=NonFinite.RAISE, and without",
    )
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and show the results."""
    device = find_device("bench overhead", args.device)
    machine, console = describe(device), Console(highlight=False)
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
            clock=_CLOCKS[args.clock],
        )
    settings = {
        "model": work.words,
        "step": "zero_grad(set_to_none=True), forward, backward" + (", AdamW" if adamw else ""),
        "measured": f"{args.clock} time, {rounds} interleaved rounds of {block} steps each, after one untimed step",
    }
    check = args.nonfinite
    result = _result_of_check(machine, settings, series) if check else _result(machine, settings, series, device)
    show(result, json_file=args.json, console=console)
    return 0


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
        flight_recorder.active = recorder
        try:
            step()
        finally:
            flight_recorder.active = None

    return run


def _workload(args: argparse.Namespace, device: torch.device) -> Workload:
    if args.size is None and device.type == "cpu":
        return Workload.many_small(args.parameters, batch=args.batch or 4)
    return Workload.gpt2(args.size or "small", batch=args.batch or 8, device=device)


def _fence(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _result(
    machine: dict[str, str], settings: dict[str, str], series: dict[str, Series], device: torch.device
) -> Result:
    bare = series[peers.BARE]
    over = bare if device.type == "cpu" else None
    rows, lines = [Row(bare)], []
    for flags in ("", peers.VIEWS):
        theirs, ours = series[peers.TORCH + flags], series[peers.OURS + flags]
        ratio = compare(ours, theirs, over=over)
        rows += [Row(theirs, theirs.median - bare.median), Row(ours, ours.median - bare.median, ratio)]
        kind = "with bucket views" if flags else "with default flags"
        recorded = series.get(peers.OURS + flags + _RECORDED)
        if recorded is not None:
            with_recorder = compare(recorded, theirs, over=over)
            rows.append(Row(recorded, recorded.median - bare.median, with_recorder))
            lines.append(
                f"The flight recorder adds {100 * (compare(recorded, ours).median_of_rounds - 1):.1f} % to a step {kind}, and "
                f"{with_recorder.median_of_rounds - ratio.median_of_rounds:+.2f} to the ratio (medians over rounds)."
            )
        what = "overhead" if over is not None else "step time"
        if math.isnan(ratio.of_medians):
            lines.append(
                f"gradwire's {what} cannot be compared with torch's {kind}: torch's is lost in noise. Use more --steps, or an "
                "idle machine."
            )
            continue
        lines.append(
            f"gradwire's {what} is {ratio.of_medians:.2f} of torch's {kind} "
            f"(median over {ratio.rounds} rounds: {ratio.median_of_rounds:.2f})."
        )
    ratio_of = "our overhead over bare to torch's" if over is not None else "our step to torch's"
    return Result("overhead", machine, settings, rows, ratio_of, lines)


def _result_of_check(machine: dict[str, str], settings: dict[str, str], series: dict[str, Series]) -> Result:
    rows, lines = [], []
    for flags, words in (("", "with default flags"), (peers.VIEWS, "with bucket views")):
        names = peers.OURS + flags, peers.OURS + flags + peers.CHECKED
        plain, checked = (series[name].averaged_with(series[name + peers.AGAIN]) for name in names)
        ratio = compare(checked, plain)
        apart = [abs(compare(series[name + peers.AGAIN], series[name]).median_of_rounds - 1) for name in names]
        rows += [Row(plain), Row(checked, checked.median - plain.median, ratio)]
        lines.append(
            f"{words.capitalize()}, the check adds {_percent(ratio.median_of_rounds)} to a step (median over {ratio.rounds} rounds"
            f"{_confidence(ratio)}; ratio of medians: {_percent(ratio.of_medians)}). Two such models without it differ by "
            f"{100 * apart[0]:.2f} %, two with it by {100 * apart[1]:.2f} %."
        )
    if _SUMS in series:
        alone = compare(series[_SUMS], series[peers.OURS])
        rows.append(Row(series[_SUMS], None, alone))
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
            ratio = compare(series[name], series[peers.OURS])
            rows.append(Row(series[name], series[name].median - series[peers.OURS].median, ratio))
            lines.append(
                f"{words} adds {_percent(ratio.median_of_rounds)} to a step with default flags (median over rounds)."
            )
    ratio_of = "a step with nonfinite=NonFinite.RAISE to one without"
    return Result("overhead of a check", machine, settings, rows, ratio_of, lines, more_than="plain")


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.2f} %"


def _confidence(ratio: Ratio) -> str:
    return "" if ratio.confidence is None else ", 95 % confidence: " + " to ".join(map(_percent, ratio.confidence))
