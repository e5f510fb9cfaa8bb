"""What is wrong with a group, as one rank sees it: reads the board and the state of the processes, and changes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import UNEVEN, CollectiveTimeout, GroupAborted, GroupError, PeerLost
from gradwire.groups.shared_memory.board import FAILED, LEFT, Board
from gradwire.groups.shared_memory.liveness import Pulse
from gradwire.groups.work import Work

CLOSED = f"it has closed its group and will not join. {UNEVEN}"
_PASSED_ON = re.compile(r"rank \d+ failed: ")


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a rank waits for: the collective under way, and messages."""

    collective: Work | None = None
    messages: Sequence[Work] = ()

    def for_rank(self, rank: int) -> Work | None:
        """What to name when `rank` is lost: the collective, or else a message, preferably one of that rank."""
        if self.collective is not None:
            return self.collective
        return next(iter(sorted(self.messages, key=lambda work: work.op.peer != rank)), None)


def report(error: BaseException) -> tuple[int, str]:
    """A failure as a rank writes it on the board: its state, with the rank that it has lost, and the reason."""
    lost = error.rank if isinstance(error, PeerLost) else None
    reason = error.reason if isinstance(error, GroupAborted) else str(error)
    return FAILED | ((-1 if lost is None else lost) + 1) << 8, f"{type(error).__name__}\n{reason}"


class Diagnosis:
    """What one rank can find out about the others."""

    def __init__(self, name: str, board: Board, pulse: Pulse) -> None:
        self.name = name
        self.board = board
        self.pulse = pulse

    def trouble(self, waiting: Waiting) -> GroupError | None:
        """What is known to be wrong with the group. A rank that has closed it is not an error by itself."""
        return self.death(waiting) or self.failure(waiting)

    def death(self, waiting: Waiting) -> PeerLost | None:
        """A process has died. One that had closed its group before is missed only by operations that wait for it."""
        states = self.board.states
        dead = next((rank for rank in self.pulse.dead() if states[rank] & 0xFF != LEFT), None)
        return None if dead is None else self.lost(dead, "its process has died", waiting)

    def failure(self, waiting: Waiting) -> GroupError | None:
        """Another rank has failed, and has written why on the board."""
        states = self.board.states.tolist()
        for rank, word in enumerate(states):
            state, lost = word & 0xFF, (word >> 8) - 1
            if state == FAILED and rank != self.board.rank:
                if lost == rank or lost < 0:
                    return self._reported(rank, waiting)
                left = states[lost] & 0xFF == LEFT
                return self.lost(lost, CLOSED if left else f"rank {rank} has lost it", waiting)
        return None

    def left(self) -> list[int]:
        """The other ranks that have closed their group."""
        states = self.board.states.tolist()
        return [rank for rank, word in enumerate(states) if word & 0xFF == LEFT and rank != self.board.rank]

    def lost(self, rank: int, why: str, waiting: Waiting) -> PeerLost:
        """The error for a rank that is lost."""
        work = waiting.for_rank(rank)
        what = self.name if work is None else f"{work.op} (operation #{work.seq} of {self.name})"
        return PeerLost(
            f"{what} on rank {self.board.rank} of {self.board.size}: rank {rank} is lost: {why}. Look at its output for the cause; "
            "make a new group to go on.",
            rank=rank,
            op=None if work is None else work.op.signature,
        )

    def _reported(self, rank: int, waiting: Waiting) -> GroupError:
        kind, _, reason = self.board.words(rank).partition("\n")
        work = waiting.collective
        if kind == CollectiveTimeout.__name__ and work is not None:
            late = work.ledger.timed_out(work, time.perf_counter() - work.started)
            late.add_note(f"rank {rank} gave up first: {reason}")
            return late
        why = reason if _PASSED_ON.match(reason) else f"rank {rank} failed: {reason}"
        return GroupAborted(
            f"{self.name} on rank {self.board.rank} of {self.board.size}: the group was aborted: {why}", reason=why
        )
