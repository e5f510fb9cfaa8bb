"""DDP's logging data: what a model was built with and how its steps went, under torch's names.

Times come from events that the reducer emits anyway; they are sampled as in torch: every one of the first ten steps, then
every `sample_rate`-th.
"""

from __future__ import annotations

import time
from typing import Any

from gradwire.events import BackwardEnded, BucketLaunched, BucketReduced, Event, StepEnded

_FIRST_STEPS = 10


class StepStats:
    """Times of the current step and averages over the sampled ones, in nanoseconds."""

    LISTENS_TO = (BackwardEnded, BucketLaunched, BucketReduced, StepEnded)
    """Not GradientReady, which would require a hook call for every gradient."""

    def __init__(self) -> None:
        self.sample_rate = 100
        self.iteration = -1
        self.samples = 0
        self.last: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._now: dict[str, float] = {}

    def forward_begins(self) -> bool:
        """Call when a synchronized forward begins. Whether its step is sampled."""
        self.iteration += 1
        self._now = {"forward": time.perf_counter()}
        return self.sampled

    @property
    def sampled(self) -> bool:
        """Whether this step is sampled."""
        return self.iteration < _FIRST_STEPS or self.iteration % self.sample_rate == 0

    def listen(self, event: Event) -> None:
        """An event of the reducer."""
        now = self._now
        if isinstance(event, BackwardEnded):
            now["computed"] = event.time
        elif isinstance(event, BucketLaunched):
            now.setdefault("first launch", event.time)
        elif isinstance(event, BucketReduced):
            now["reduced"] = event.time
        elif isinstance(event, StepEnded) and "forward" in now:
            self._close()

    def _close(self) -> None:
        now = self._now
        begin = now.get("backward", now["forward"])
        computed, launched = now.get("computed", begin), now.get("first launch", begin)
        reduced = now.get("reduced", computed)
        times = {
            "forward_compute_time": begin - now["forward"],
            "backward_compute_time": computed - begin,
            "backward_comm_time": reduced - launched,
            "backward_compute_comm_overlap_time": max(0.0, min(computed, reduced) - launched),
        }
        self.samples += 1
        for name, seconds in times.items():
            ns = max(1, int(seconds * 1e9)) if "overlap" not in name else int(seconds * 1e9)
            self.last[name] = ns
            self._totals[name] = self._totals.get(name, 0) + ns
        self.last["forward_compute_time_start"] = int(now["forward"] * 1e9)
        self.last["backward_compute_time_start"] = int(begin * 1e9)
        self.last["backward_compute_time_end"] = int(computed * 1e9)
        self.last["backward_comm_time_start"] = int(launched * 1e9)
        self.last["backward_comm_time_end"] = int(reduced * 1e9)
        self.last["iteration"] = self.iteration

    def forward_ends(self) -> None:
        """Call when the forward ends: the time until the first gradient counts as backward."""
        self._now["backward"] = time.perf_counter()

    def data(self) -> dict[str, Any]:
        """The last sample, and averages."""
        averages = {f"avg_{name}": total // self.samples for name, total in self._totals.items()}
        return {**self.last, **averages}
