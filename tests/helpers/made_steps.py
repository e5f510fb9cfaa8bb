"""Steps that are made up: ranks that meet in every step, as a model of what a real run records."""

import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.observe.stragglers.steps import COMPUTE, Phase, StepTimes
from gradwire.recorder.format import RecordKind as K
from gradwire.recorder.writer import FlightRecorder
from gradwire.runtime.host import clock_identity, process_start
from helpers.recorder_put import group_id_of, put as put_record

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
            rows[rank].append(StepTimes(step, start, end, phases[rank] | waited, buckets, 1000, group_id_of("world")))
        start = end
    return rows


def step_seconds(rows: Mapping[int, Sequence[StepTimes]]) -> float:
    """The median of all steps."""
    return statistics.median(one.seconds for row in rows.values() for one in row)


def write_rings(directory: Path, rows: Mapping[int, Sequence[StepTimes]], *, size: int, pid: int | None = None) -> None:
    """Write the rings of ranks of this host that did these steps, the last of which ends now. They are of process `pid`: ours."""
    pid = os.getpid() if pid is None else pid
    now, last = time.perf_counter(), max(row[-1].end for row in rows.values() if row)
    for rank, row in rows.items():
        header = {
            "rank": rank,
            "size": size,
            "pid": pid,
            "process_start": process_start(pid) or "",
            "host": "here",
            "clock": clock_identity(),
            "started": time.monotonic_ns(),
            "started_wall": time.time_ns(),
            "ops": [],
        }
        recorder = FlightRecorder(directory / f"rank-{rank}.ring", header=header, capacity=4096)
        try:
            for i, one in enumerate(row):
                _write_step(recorder, rank, one, now + (one.start - last) / 1e9, first=i == 0)
        finally:
            recorder.close()


def _write_step(recorder: FlightRecorder, rank: int, one: StepTimes, start: float, *, first: bool) -> None:
    at = start

    def put(kind: K, after: float = 0.0, step: int | None = one.step, bucket: int = -1, nbytes: int = 0) -> None:
        nonlocal at
        at += after
        put_record(recorder, kind, rank, at=at, group="world", step=step, bucket=bucket, nbytes=nbytes)

    if first:
        put(K.STEP_ENDED, step=one.step - 1)
    put(K.OPTIMIZER_BEGAN, step=None)
    put(K.OPTIMIZER_ENDED, one.share(Phase.OPTIMIZER), step=None)
    put(K.FORWARD_BEGAN, one.share(Phase.DATA))
    put(K.SAMPLES, nbytes=one.samples)
    put(K.FORWARD_ENDED, one.share(Phase.FORWARD))
    put(K.BUCKET_FULL, one.share(Phase.BACKWARD), bucket=0)
    put(K.BUCKET_LAUNCHED, bucket=0)
    put(K.BACKWARD_ENDED)
    put(K.STEP_ENDED, one.share(Phase.EXPOSED))
