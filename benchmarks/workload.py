"""What one variant does in a step: a model, its inputs, forward, backward and optionally the optimizer; and its device."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import GPT2, SIZES, ManySmall
from gradwire.errors import InternalError, UsageError
from gradwire.parallel import DistributedDataParallel

_CLOSE = 0.02
"""The relative difference that a wrapped model's gradient may have from the bare one's: bfloat16, summed in any order."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model as it is trained, with a description."""

    model: nn.Module
    inputs: Tensor
    words: str

    @classmethod
    def many_small(cls, parameters: int, *, batch: int) -> Workload:
        """Small linear layers in float32 on the CPU."""
        torch.manual_seed(0)
        words = f"{parameters} parameters of 16 x 16 linear layers, float32, batch {batch}"
        return cls(ManySmall(parameters), ManySmall.batch(batch), words)

    @classmethod
    def gpt2(cls, size: str, *, batch: int, device: torch.device) -> Workload:
        """The shape of GPT-2: under bfloat16 autocast on CUDA, in float32 on the CPU."""
        torch.manual_seed(0)
        model = GPT2(SIZES[size])
        count, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
        dtype = "bfloat16 autocast" if device.type == "cuda" else "float32"
        words = f"GPT-2 {size} shape, {count:,} elements in {tensors} parameters, {dtype}, "
        words += f"batch {batch} x {SIZES[size].context}"
        return cls(model.to(device), model.batch(batch).to(device), words)

    def loss(self, model: nn.Module) -> Tensor:
        """A forward of `model`, which may be a wrapped copy."""
        kind = self.inputs.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            value: Tensor = model(self.inputs)
        return value

    def step(self, model: nn.Module, *, adamw: bool, wait: bool = False, attach: bool = False) -> Callable[[], None]:
        """A step of `model`. `wait`: for the CUDA device, after backward. `attach`: the optimizer, to our wrapper."""
        fused = True if self.inputs.device.type == "cuda" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        if attach:
            assert isinstance(model, DistributedDataParallel)
            model.attach_optimizer(optimizer)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self.loss(model).backward()
            if wait:
                torch.cuda.synchronize(self.inputs.device)
            if adamw:
                optimizer.step()

        return step

    def check(self, models: Mapping[str, nn.Module]) -> None:
        """Before timing: raise unless all variants compute the same gradient."""
        expected: Tensor | None = None
        for name, model in models.items():
            model.zero_grad(set_to_none=True)
            self.loss(model).backward()
            found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            expected = found if expected is None else expected
            if found.shape != expected.shape or bool((found - expected).norm() > _CLOSE * expected.norm()):
                raise InternalError(f"bench: {name} computes a different gradient than {next(iter(models))}.")


def find_device(command: str, kind: str) -> torch.device:
    """The device that `command --device kind` means."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{command} --device cuda: torch sees no CUDA device. Omit --device for the CPU.")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@contextmanager
def settled(*, one_thread: bool) -> Iterator[None]:
    """No garbage from before, and perhaps one thread, where more would only add noise."""
    # oneDNN writes every kernel that it makes to /tmp/perf-PID.map, for profilers, and leaves the file there.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    threads = torch.get_num_threads()
    if one_thread:
        torch.set_num_threads(1)
    gc.collect()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
