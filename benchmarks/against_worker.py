"""The worker of `overhead --against`: one process with the gradwire of one checkout, which times steps on request.

It uses only what every version of gradwire has had: `gradwire.DistributedDataParallel`. Requests are lines on standard input,
answers are lines of JSON on standard output.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.models import GPT2, SIZES, ManySmall

BARE, TORCH, OURS, VIEWS, HOST = "bare", "torch", "gradwire", ", views", ", host"
_WARM_UP = 20
"""Untimed steps of each variant: buckets are rebuilt after the first, and both DDPs sample their own times in the first ten."""
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Step = Callable[[], None]


def main() -> None:
    """Build all variants, then answer one line with the time of every variant for each line read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints must not mix with the answers
    plan: dict[str, Any] = json.loads(sys.argv[1])
    device = torch.device(plan["device"])
    if device.type == "cpu":
        torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    import gradwire

    print(json.dumps({"gradwire": gradwire.__file__}), file=answers, flush=True)
    model, inputs = _workload(plan, device)
    steps = {name: _step(wrapped, inputs) for name, wrapped in _variants(model, gradwire).items()}
    for step in steps.values():
        for _ in range(_WARM_UP):
            step()
    gc.collect()
    gc.freeze()
    names, clock = list(steps), _CLOCKS[plan["clock"]]
    for number, _ in enumerate(sys.stdin):
        first = number % len(names)
        seconds: dict[str, float] = {}
        for name in names[first:] + names[:first]:
            seconds |= _measure(name, steps[name], plan["block"], device, clock)
        print(json.dumps(seconds), file=answers, flush=True)


def _workload(plan: dict[str, Any], device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if plan["size"] is None:
        return ManySmall(plan["parameters"]).to(device), ManySmall.batch(plan["batch"]).to(device)
    model = GPT2(SIZES[plan["size"]])
    return model.to(device), model.batch(plan["batch"]).to(device)


def _variants(model: nn.Module, gradwire: Any) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {BARE: copy.deepcopy(model)}
    for flags in ("", VIEWS):
        for name, wrap in ((TORCH, nn.parallel.DistributedDataParallel), (OURS, gradwire.DistributedDataParallel)):
            found[name + flags] = wrap(copy.deepcopy(model), gradient_as_bucket_view=bool(flags))
    return found


def _step(model: nn.Module, inputs: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=inputs.is_cuda):
            loss = model(inputs)
        loss.backward()

    return step


def _measure(name: str, step: Step, block: int, device: torch.device, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds per step. On CUDA also the time until backward returns, of steps that begin with an idle device."""
    step()
    if device.type == "cpu":
        begin = clock()
        for _ in range(block):
            step()
        return {name: (clock() - begin) / block}
    torch.cuda.synchronize()
    begin = clock()
    for _ in range(block):
        step()
    torch.cuda.synchronize()
    whole, host = clock() - begin, 0.0
    for _ in range(block):
        begin = clock()
        step()
        host += clock() - begin
        torch.cuda.synchronize()
    return {name: whole / block, name + HOST: host / block}


if __name__ == "__main__":
    main()
