"""The check of one step whose result the host waits for, before the averages are put back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.reducer.checks.nonfinite_search import Found, Look, Search, examine


class WaitingCheck:
    """The check of one step. It has the methods of a `nonfinite_scan.Scan`, whose result is read one step later."""

    def __init__(self, search: Search, device: torch.device) -> None:
        self._search = search
        self._device = device
        self._gradients: list[Look] = []
        self._averages: list[Look] = []
        self._kept: list[GradBucket] = []

    def keep(self, bucket: GradBucket) -> None:
        """The gradients of a bucket stay in `.grad` until the end of the step."""
        self._kept.append(bucket)

    def look_at_gradients(self, bucket: GradBucket, narrow: torch.dtype | None) -> None:
        """Look at the gradients of a bucket, which will be overwritten."""
        look = self._search.before(bucket, narrow)
        if look is not None:
            self._gradients.append(look)

    def add_average(self, spec: BucketSpec, result: Tensor) -> None:
        """Look at an average."""
        look = self._search.after(spec, result)
        if look is not None:
            self._averages.append(look)

    def look_at_averages(self) -> None:
        """All were looked at when they were added."""

    def found(self) -> tuple[list[Found], list[Found]]:
        """What is not finite in the gradients that were looked at, and in the averages. Waits for the device."""
        found = examine([*self._gradients, *self._averages], self._device)
        count = len(self._gradients)
        gradients, averages = ([f for look in part for f in look] for part in (found[:count], found[count:]))
        return gradients, averages

    def found_in_kept(self, narrow: Callable[[torch.dtype], torch.dtype | None]) -> list[Found]:
        """What is not finite in the gradients that are still in `.grad`."""
        return [f for bucket in self._kept for f in self._search.in_grads(bucket, narrow(bucket.spec.dtype))]
