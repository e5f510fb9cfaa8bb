"""Ranks that make no progress, where collectives are not recorded: torch's own DDP over torch's own groups. Pure.

All that is known of such a rank is which step it is in, what its process does, and where its threads are. If no rank has written
anything for far longer than a step takes, and the main threads of some are inside torch's communication or backward while others
are elsewhere, then the former wait for the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.observe.hangs.analysis import SOFT_DEADLINE, TIMES_USUAL, Suspect, process_cause
from gradwire.observe.hangs.stacks import Frame, Stack, user_frames
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.runtime.host import ProcessState

_WAITS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that wait, for other ranks and not in a collective of gradwire."""

    seconds: float
    """Since when no rank has made progress."""
    ranks: tuple[int, ...]
    step: int
    where: Frame | None
    """The line of user code in which the first of them waits."""


def idle_seconds(ranks: Sequence[RankProgress], now: int, *, deadline: float = SOFT_DEADLINE) -> float | None:
    """For how long no rank has made progress, if that is longer than `deadline` and ten times as long as a step.

    None where groups of gradwire are recorded, whose collectives say more, and before the first step.
    """
    if len(ranks) < 2 or any(rank.groups or not rank.forwards for rank in ranks):
        return None
    seconds = min((now - rank.last[-1].time) / 1e9 for rank in ranks)
    usual = TIMES_USUAL * max(rank.usual_step for rank in ranks)
    return seconds if seconds > max(deadline, usual) else None


def find_stall(
    ranks: Sequence[RankProgress],
    seconds: float,
    *,
    state: Callable[[RankProgress], ProcessState],
    stacks: Mapping[int, Sequence[Stack]],
) -> tuple[Stall, list[Suspect]] | None:
    """The ranks that wait, and those that they wait for. None if all wait or none does, which shows no cause."""
    waiting = [rank for rank in ranks if _waits(stacks.get(rank.rank, ()), rank)]
    others = [rank for rank in ranks if rank not in waiting]
    if not waiting or not others:
        return None
    first = waiting[0]
    own = user_frames(stacks[first.rank][0].frames, first.header)
    numbers = tuple(sorted(rank.rank for rank in waiting))
    stall = Stall(seconds, numbers, max(rank.step for rank in waiting), own[0] if own else None)
    return stall, [_suspect(rank, state(rank), stacks.get(rank.rank, ())) for rank in others]


def _waits(stacks: Sequence[Stack], rank: RankProgress) -> bool:
    """Whether the main thread is in torch's communication or backward, called by the innermost line of user code."""
    frames = stacks[0].frames if stacks else ()
    own = user_frames(frames, rank.header)
    inner = frames[: frames.index(own[0])] if own else frames
    return any(part in frame.file for frame in inner for part in _WAITS)


def _suspect(rank: RankProgress, state: ProcessState, stacks: Sequence[Stack]) -> Suspect:
    main = stacks[0] if stacks else None
    frames = main.frames if main is not None else ()
    own = user_frames(frames, rank.header)
    cause = process_cause(state, main)
    return Suspect(rank.rank, int(rank.header["pid"]), cause, state, tuple(frames), own[0] if own else None)
