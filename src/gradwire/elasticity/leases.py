"""`Leases`: which launchers the hub hears. No I/O, and time is injected.

Note [Leases]
A launcher sends beats twice a second, two in a row: the second shows that the reply to the first has arrived, so only this counts.
Else a host that can send and cannot receive would keep its lease. A launcher that was not heard for `LEASE` seconds is silent, and
its ranks count as gone, until it is heard again: it has died, or its host cannot be reached. But a hub that hears nobody was itself
cut off or stopped: it takes nobody for silent, and when it hears one again, all leases begin again, as they do when it is started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

LEASE, BEAT, _ALONE = 3.0, 0.5, 1.5
"""Seconds: for which a launcher need not be heard; between two of its beats; without any beat. The last two together are less."""


class Leases:
    """When each launcher was last heard: see Note [Leases]. Any thread may call it: nothing depends on two values at once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._latest = clock()
        self._heard: dict[str, float] = {}
        self._beats: dict[str, float] = {}

    def beat(self, launcher: str) -> None:
        """A beat has come from this launcher, so it was reached at the time of the one before."""
        now = self._clock()
        if now - self._latest > _ALONE:
            self._begun = now
        self._heard[launcher] = self._beats.get(launcher, self._begun)
        self._latest = self._beats[launcher] = now

    def silent(self, launchers: Iterable[str]) -> dict[str, bool]:
        """Whether each of these launchers is silent; without those of which it is not known."""
        now = self._clock()
        alone = now - self._latest > _ALONE
        late = {one: now - max(self._begun, self._heard.get(one, self._begun)) > LEASE for one in launchers}
        return {one: is_late for one, is_late in late.items() if not (is_late and alone)}
