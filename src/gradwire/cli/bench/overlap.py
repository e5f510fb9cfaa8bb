"""`gradwire bench overlap`: whether communication hooks overlap with backward, on the streams of a GPU.

One process, so nothing is sent, but hooks compute as usual. Kernels and their streams come from torch's profiler.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gradwire.cli.arguments import at_least
from gradwire.cli.bench import timeline
from gradwire.cli.bench.models import SIZES
from gradwire.cli.bench.workload import Workload
from gradwire.cli.experiment import peers
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.plot_file import check
from gradwire.cli.experiment.recipes import RECIPES, names_of
from gradwire.cli.experiment.report import add_json_option, new_table, present
from gradwire.errors import UsageError
from gradwire.hooks import CommHook
from gradwire.parallel import DistributedDataParallel

_DEFAULT = ("mean", "bf16", "quantize8", "power_sgd", "top_k")
_WARM_UP = 5


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench overlap` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "overlap",
        help="whether hooks overlap with backward on a GPU",
        description="One step of a model of GPT-2's shape on one GPU, with each hook: which kernels ran on the model's stream, "
        "which on the hook's, and how much of the hook's time overlapped with the model's. Profiling slows down kernel launches; "
        "with small batches the model's stream then waits for the host. Needs CUDA.",
    )
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="small", metavar="SIZE", help="%(choices)s (default: small)"
    )
    parser.add_argument(
        "--batch", type=at_least(1), default=16, metavar="N", help="sequences per step (default: %(default)s)"
    )
    known = [name for name, recipe in RECIPES.items() if not recipe.steps_on_its_own]
    parser.add_argument(
        "--hooks",
        type=names_of(known),
        default=list(_DEFAULT),
        metavar="A,B",
        help=f"{', '.join(known)} (default: {', '.join(_DEFAULT)})",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the timeline to FILE, a .png, .svg or .pdf")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Profile a step of each, and show the results."""
    if args.plot is not None:
        check("--plot", args.plot)
    if not torch.cuda.is_available():
        raise UsageError(
            "bench overlap: torch sees no CUDA device. On the CPU, gradwire bench training shows how much communication a "
            "step waits for."
        )
    device = torch.device("cuda", 0)
    machine, console = describe(device), Console(highlight=False)
    with peers.world_of_one(device), console.status("preparing"):
        work = Workload.gpt2(args.size, batch=args.batch, device=device)
        timelines = [_profile(name, RECIPES[name].build(), work) for name in args.hooks]
    if args.plot is not None:
        timeline.draw(args.plot, timelines, machine)
    present(
        {**machine, "model": work.words},
        [_table(timelines)],
        [f"The timeline is in {args.plot}."] if args.plot is not None else [],
        data={"machine": machine, "model": work.words, "hooks": {t.name: _as_json(t) for t in timelines}},
        json_file=args.json,
        console=console,
    )
    return 0


def _profile(name: str, hook: CommHook, work: Workload) -> timeline.Timeline:
    model: nn.Module = DistributedDataParallel(copy.deepcopy(work.model), gradient_as_bucket_view=True)
    try:
        model.set_hook(hook)  # type: ignore[operator]
        step = work.step(model, adamw=False)
        for _ in range(_WARM_UP):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        return timeline.Timeline.of(name, timeline.kernels_of(profile))
    finally:
        peers.unwrap(model)


def _table(timelines: list[timeline.Timeline]) -> Table:
    caption = "The hook's kernels are all kernels that did not run on the model's stream."
    table = new_table("hook", "step\nms", "hook's kernels\nms", "overlapped\nms", "share", caption=caption)
    for t in timelines:
        share = f"{t.hidden / t.busy:.0%}" if t.busy else ""
        table.add_row(t.name, f"{t.seconds * 1e3:.2f}", f"{t.busy * 1e3:.3f}", f"{t.hidden * 1e3:.3f}", share)
    return table


def _as_json(t: timeline.Timeline) -> dict[str, Any]:
    return {
        "step_ms": t.seconds * 1e3,
        "hook_ms": t.busy * 1e3,
        "beside_ms": t.hidden * 1e3,
        "model_intervals": t.model,
        "hook_intervals": t.hook,
    }
