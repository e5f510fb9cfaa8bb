"""The report of all ranks' recorders, for the error of a rank whose collective has failed: under any launcher."""

from __future__ import annotations

import functools
import math
from pathlib import Path

from gradwire.observe.hangs.analysis import find_suspects, find_waiting
from gradwire.observe.hangs.hang_report import report_lines
from gradwire.observe.rings.run_follower import RunFollower

_TAIL = 1000
_WITHIN = 0.4
"""Seconds for stacks, twice if py-spy has to help: an error must not come much later because of its explanation."""
_FRAMES = 4


def report_for_error(directory: Path) -> list[str]:
    """The hang report of the ranks in `directory` that are on this host; nothing if no collective has failed or is pending."""
    run = RunFollower(directory, tail=_TAIL)
    try:
        run.look()
        waiting = find_waiting(run.local_ranks, run.now, deadline=-math.inf, failed=True)
        if waiting is None:
            return []
        run.read_descriptions()
        stacks = functools.partial(run.stacks, within=_WITHIN)
        suspects = find_suspects(waiting, state=run.state, stacks=stacks, ask=run.ask)
        return report_lines(waiting, suspects, frames=_FRAMES)
    finally:
        run.close()
