"""`python -m detection.follow`: CPU time of a launcher per record of the ranks that it follows, and its share of a core."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from gradwire.observe.rings.run_follower import RunFollower
from gradwire.recorder.writer import FlightRecorder
from gradwire.runtime.host import clock_identity
from helpers.made_rings import header, write_steps

RANKS, A_LOOK, LOOKS = 8, 3333, 12
"""8 ranks that write 10,000 records a second, with three looks a second."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        facts = {"clock": clock_identity(), "started": time.monotonic_ns()}
        rings = [
            FlightRecorder(Path(folder, f"rank-{r}.ring"), header={**header(r, RANKS), **facts}) for r in range(RANKS)
        ]
        run, step, costs = RunFollower(Path(folder)), 0, []
        for _ in range(LOOKS):
            step = max(write_steps(ring, rank, step, A_LOOK) for rank, ring in enumerate(rings))
            before = time.process_time()
            run.look()
            costs.append((time.process_time() - before) / (RANKS * A_LOOK))
        run.close()
        for ring in rings:
            ring.close()
    best, middle = min(costs), sorted(costs)[LOOKS // 2]
    print(f"{best * 1e6:.2f} us a record at best, {middle * 1e6:.2f} in the median (limit 2.00);")
    print(f"{best * RANKS * 1e6:.1f} % of a core at {RANKS} x 10,000 records a second (limit 20)")


if __name__ == "__main__":
    main()
