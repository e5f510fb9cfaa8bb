"""A rank of `gradwire run --verify-ddp`: a script for torch's DDP with fixed seeds, whose first steps are written down as digests.

Note [Seeds]
torch's generators start from the same number on all ranks, as they do without a seed; those of Python and numpy, which then start
from noise, from the rank. A script that sets seeds of its own overrides all of them.

Note [The last step]
Nothing after it may have an effect, and scripts catch exceptions, also SystemExit. So the process ends within the optimizer's step,
with code 0 and by os._exit, once all ranks are there or have ended: the others may still need what this rank has sent.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.parallel
from torch import Tensor, nn

from gradwire import observe
from gradwire.autograd.optimizer_steps import after_optimizer_steps, before_optimizer_steps
from gradwire.errors import UsageError
from gradwire.integrations.ddp_replacement import replace_ddp
from gradwire.launch import run_script
from gradwire.launch.environment import VERIFY
from gradwire.launch.world import find_world
from gradwire.observe.step_digests import Digest, digest_file
from gradwire.parallel.divergence import digest

_PATIENCE, _PAUSE = 60.0, 0.01
"""Seconds that a rank waits for the others after its last step, and between two looks."""
_SUMS = 32
"""In a sketch."""


def main() -> None:
    """Run the script, with torch's class or with ours."""
    which, steps, folder = os.environ[VERIFY].split(":", 2)
    if which == "gradwire":
        replace_ddp()
    world = find_world(os.environ)
    writer = DigestWriter(Path(folder), world.rank, world.size, steps=int(steps))
    writer.watch(torch.nn.parallel.DistributedDataParallel)
    random.seed(world.rank)
    torch.manual_seed(0)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(world.rank)
    run_script.main()


class DigestWriter:
    """Writes a line for each model that is wrapped and for each step of an optimizer of its parameters."""

    def __init__(self, folder: Path, rank: int, size: int, *, steps: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._left = steps
        self._file = open(digest_file(folder, rank), "a", buffering=1)  # noqa: SIM115
        self._models: list[weakref.ref[Any]] = []
        self._gradients: list[dict[str, Digest]] = []
        """Of the steps that have begun: an optimizer may call another."""
        self._pid = os.getpid()

    def watch(self, cls: Any) -> None:
        """Write what happens to models that are wrapped in `cls` from now on."""
        original: Callable[..., None] = cls.__init__

        @functools.wraps(original)
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self._models.append(weakref.ref(model))
            self._write({"model": type(model.module).__name__})

        cls.__init__ = init
        before_optimizer_steps(self._before)
        after_optimizer_steps(self._after)
        atexit.register(self._arrive)

    def _before(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        self._gradients.append({} if has_closure else self._digests(optimizer, gradients=True))

    def _after(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        gradients = self._gradients.pop() or self._digests(optimizer, gradients=True)
        if gradients and os.getpid() == self._pid:
            self._write({"gradients": gradients, "parameters": self._digests(optimizer, gradients=False)})
            self._left -= 1
            if not self._left:
                self._end()

    @torch.no_grad()
    def _digests(self, optimizer: Any, *, gradients: bool) -> dict[str, Digest]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: _digest(p.grad if gradients else p) for name, p in self._parameters() if id(p) in held}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, model in enumerate(model() for model in self._models):
            if model is not None:
                where = f" of model {number}" if number else ""
                yield from ((f"{name}{where}", p) for name, p in model.module.named_parameters())

    def _write(self, row: dict[str, Any]) -> None:
        if os.getpid() == self._pid:
            self._file.write(json.dumps(row) + "\n")

    def _arrive(self) -> None:
        if os.getpid() == self._pid:
            (self._folder / f"rank-{self._rank}.done").touch()

    def _end(self) -> None:
        """See Note [The last step]."""
        self._arrive()
        deadline = time.monotonic() + _PATIENCE
        while len(list(self._folder.glob("*.done"))) < self._size:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"gradwire run --verify-ddp: rank {self._rank} made all steps, and has waited {_PATIENCE:g} s for others. "
                    "Those with fewer batches, as in join(), make fewer steps: ask for no more than they make."
                )
            time.sleep(_PAUSE)
        observe.stop()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _digest(t: Tensor | None) -> Digest:
    if t is None:
        return None
    t = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double().flatten()
    return [int(digest(t)), float(flat.norm()), *_sketch(flat)]


def _sketch(flat: Tensor) -> list[float]:
    """See step_digests.py. Exact for a tensor of no more elements than it has; else within a fifth, usually."""
    signs = torch.randint(
        0, 2, flat.shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.int8, device="cpu"
    )
    signed = flat * (2 * signs - 1).to(flat.device)
    found: list[float] = nn.functional.pad(signed, (0, -len(flat) % _SUMS)).view(-1, _SUMS).sum(0).tolist()
    return found
