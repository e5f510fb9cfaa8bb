"""What is wrong with a group, as one rank sees it: reads the board and the state of the processes, and changes nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from gradwire.errors import CollectiveTimeout, GroupAborted, GroupError, PeerLost
from gradwire.groups.ledger import CLOSED, Ledger
from gradwire.groups.shared_memory.board import FAILED, LEFT, Board
from gradwire.groups.shared_memory.sync import SLICE
from gradwire.groups.work import Work
from gradwire.runtime.host import is_dead, process_start

_PASSED_ON = re.compile(r"rank \d+ failed: ")


class Pulse:
    """Which of the other ranks' processes have died, by their entries in /proc; looked up at most once per `SLICE`."""

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids` has the process of each rank. A rank of this very process lives as long as we do."""
        self._processes = {rank: (pid, process_start(pid)) for rank, pid in enumerate(pids) if pid != os.getpid()}
        self._dead: list[int] = []
        self._looked = -SLICE

    def dead(self) -> list[int]:
        if time.monotonic() - self._looked > SLICE:
            processes = self._processes.items()
            self._dead = [rank for rank, (pid, start) in processes if start is None or is_dead(pid, start)]
            self._looked = time.monotonic()
        return self._dead


def report(error: BaseException) -> tuple[int, str]:
    """A failure as a rank writes it on the board: its state, with the rank that it has lost, and the reason."""
    lost = error.rank if isinstance(error, PeerLost) else None
    reason = error.reason if isinstance(error, GroupAborted) else str(error)
    return FAILED | ((-1 if lost is None else lost) + 1) << 8, f"{type(error).__name__}\n{reason}"


class Diagnosis:
    """What one rank can find out about the others. `waiting` is what it waits for: the collective under way, and messages."""

    def __init__(self, ledger: Ledger, board: Board, pulse: Pulse) -> None:
        self.ledger = ledger
        self.board = board
        self.pulse = pulse

    def death(self, waiting: Sequence[Work]) -> PeerLost | None:
        """A process has died. One that had closed its group before is missed only by operations that wait for it."""
        left = self.left()
        dead = next((rank for rank in self.pulse.dead() if rank not in left), None)
        return None if dead is None else self.lost(dead, "its process has died", waiting)

    def failure(self, waiting: Sequence[Work]) -> GroupError | None:
        """Another rank has failed, and has written why on the board."""
        for rank, word in enumerate(self.board.states.tolist()):
            state, lost = word & 0xFF, (word >> 8) - 1
            if state == FAILED and rank != self.board.rank:
                if lost == rank or lost < 0:
                    return self._reported(rank, waiting)
                return self.lost(lost, CLOSED if lost in self.left() else f"rank {rank} has lost it", waiting)
        return None

    def left(self) -> list[int]:
        states = self.board.states.tolist()
        return [rank for rank, word in enumerate(states) if word & 0xFF == LEFT and rank != self.board.rank]

    def lost(self, rank: int, why: str, waiting: Sequence[Work]) -> PeerLost:
        """The error for a rank that is lost. It names the collective, or else a message, preferably one of that rank."""
        work = min(waiting, key=lambda work: (work.op.kind.is_p2p, work.op.peer != rank), default=None)
        return self.ledger.lost(rank, why, work)

    def _reported(self, rank: int, waiting: Sequence[Work]) -> GroupError:
        kind, _, reason = self.board.words(rank).partition("\n")
        work = next((work for work in waiting if not work.op.kind.is_p2p), None)
        if kind == CollectiveTimeout.__name__ and work is not None:
            late = self.ledger.timed_out(work, time.perf_counter() - work.started)
            late.add_note(f"rank {rank} gave up first: {reason}")
            return late
        why = reason if _PASSED_ON.match(reason) else f"rank {rank} failed: {reason}"
        return self.ledger.aborted(why)
