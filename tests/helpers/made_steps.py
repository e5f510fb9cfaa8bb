"""Steps that are made up: ranks that meet in every step, as a model of what a real run records."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from gradwire.observe.step_times import COMPUTE, StepTimes
from gradwire.observe.steps import Phase

MS = 1_000_000
USUAL = {Phase.OPTIMIZER: 10 * MS, Phase.DATA: 30 * MS, Phase.FORWARD: 30 * MS, Phase.BACKWARD: 50 * MS}
EXPOSED = 20 * MS

Extra = Mapping[tuple[int, Phase], float]


def made_steps(
    ranks: int, steps: int, extra: Extra | None = None, *, jitter: float = 0.01, seed: int = 0, first: int = 1
) -> dict[int, list[StepTimes]]:
    """`extra` is what a rank takes more for a phase, as a share of it; `jitter` the standard deviation of every phase."""
    rng = random.Random(seed)
    rows: dict[int, list[StepTimes]] = {rank: [] for rank in range(ranks)}
    start = 0
    for step in range(first, first + steps):
        common = rng.uniform(0.8, 1.2)  # long and short batches, on all ranks alike
        phases = {
            rank: {
                phase: int(
                    USUAL[phase] * common * (1 + (extra or {}).get((rank, phase), 0.0)) * max(0.1, rng.gauss(1, jitter))
                )
                for phase in COMPUTE
            }
            for rank in range(ranks)
        }
        ready = {rank: start + sum(phases[rank].values()) for rank in range(ranks)}
        end = max(ready.values()) + EXPOSED
        for rank in range(ranks):
            buckets = {0: ready[rank] - 20 * MS, 1: ready[rank]}
            waited = {Phase.EXPOSED: end - ready[rank]}
            rows[rank].append(StepTimes(step, start, end, phases[rank] | waited, buckets, 1000, "world", rank))
        start = end
    return rows


def step_seconds(rows: Mapping[int, Sequence[StepTimes]]) -> float:
    """The median of all steps."""
    every = sorted(one.seconds for row in rows.values() for one in row)
    return every[len(every) // 2]
