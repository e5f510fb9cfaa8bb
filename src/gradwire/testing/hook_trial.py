"""`HookTrial`: one hook on one bucket and simulated ranks, for the laws that it must satisfy; and how results are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Layout
from gradwire.collectives.lower import as_bytes
from gradwire.hooks import BucketSpec, CommHook
from gradwire.testing.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class HookTrial:
    """One hook on one bucket and a given number of ranks."""

    hook: CommHook
    spec: BucketSpec
    ranks: int
    seed: int
    steps: int
    hosts: Layout | None = None

    def gradients(self, step: int = 0) -> list[Tensor]:
        """One per rank: normal values with a different scale on each rank."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + step)
        kind = torch.complex128 if self.spec.dtype.is_complex else torch.float64
        wide = [torch.randn(self.spec.numel, generator=generator, dtype=kind) for _ in range(self.ranks)]
        return [(g * (1 + r)).to(self.spec.dtype).to(self.spec.device) for r, g in enumerate(wide)]

    def run(self, gradients: Sequence[Tensor], states: Sequence[Any] | None = None, **named: Any) -> Simulation:
        return simulate(
            self.hook, gradients, spec=self.spec, states=states, hosts=self.hosts, anchor=self.anchor, **named
        )

    @property
    def anchor(self) -> Tensor:
        """Parameters, for hooks inside `diloco`."""
        return torch.linspace(-2, 2, self.spec.numel, dtype=self.spec.dtype, device=self.spec.device)

    def train(self, steps: int) -> Iterator[Simulation]:
        """The first `steps` steps, one after another."""
        states: Any = None
        for step in range(steps):
            done = self.run(self.gradients(step), states, step=step)
            states = done.states
            yield done


def wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return bool(a == b)


def difference(a: Tensor, b: Tensor) -> str:
    places = (a != b).nonzero().flatten().tolist()
    return f"not the same bits ({len(places)} elements differ, first at {places[:3]})"
