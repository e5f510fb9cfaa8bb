"""Bringing all ranks back into step after a failure.

Note [Rounds of recovery]
Ranks meet twice in a recovery, so the word that counts a rank's meetings is even outside of one. A rank that gives a recovery
up returns to the even number it started from: the next one then begins at the same place on all ranks, however far each had
got. A rank that has passed in the meantime sees that this one has failed, and returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gradwire.errors import CollectiveTimeout
from gradwire.groups.shared_memory.board import HERE, LEFT, Board
from gradwire.groups.shared_memory.diagnosis import Diagnosis, Waiting
from gradwire.groups.shared_memory.sync import SLICE, Fence


class BoardRecovery:
    """The recoveries of one rank of one group."""

    def __init__(self, board: Board, diagnosis: Diagnosis) -> None:
        self.board = board
        self._diagnosis = diagnosis

    def run(self, deadline: float, timeout: float, start_over: Callable[[], None]) -> None:
        """Meet all ranks, forget what was under way, and meet again. The caller drives the group."""
        board = self.board
        before, state = board.recoveries[board.rank], board.states[board.rank]
        try:
            board.fence = Fence()  # Ctrl-C may have hit the old one between its two halves
            self.meet(deadline, timeout)
            board.start_over()
            start_over()
            board.set_state(HERE)
            self.meet(deadline, timeout)
        except BaseException:
            board.recoveries[board.rank] = before  # see Note [Rounds of recovery]
            board.set_state(state)
            raise

    def meet(self, deadline: float, timeout: float) -> None:
        """A barrier of its own, without signals."""
        board, diagnosis = self.board, self._diagnosis
        target = board.recoveries[board.rank] + 1
        board.fence()
        board.recoveries[board.rank] = target
        board.fence()
        board.wait_queue.wake_all()

        def all_there() -> bool:
            return min(board.recoveries.tolist()) >= target

        while not all_there():
            missing = [r for r, count in enumerate(board.recoveries.tolist()) if count < target]
            left = next((r for r in missing if board.states[r] & 0xFF == LEFT), None)
            nothing = Waiting()
            lost = (
                diagnosis.death(nothing) if left is None else diagnosis.lost(left, "it has closed its group", nothing)
            )
            if lost is not None:
                raise lost
            if time.perf_counter() > deadline:
                raise CollectiveTimeout(
                    f"recovery of {diagnosis.name} on rank {board.rank}: ranks {missing} have not called recover() within "
                    f"{timeout:.3g} s. Every rank must call it after a failure.",
                    joined=[r for r in range(board.size) if r not in missing],
                    missing=missing,
                )
            board.wait_queue.sleep(all_there, board.fence, SLICE)
        board.fence()
