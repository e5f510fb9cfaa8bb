"""The engine: which thread moves the bytes. That is the caller that waits, or else the group's own thread.

Collectives are carried out one after another, in the order in which they were submitted; sends and receives independently of
them, as their messages arrive. A thread *drives* the group while it holds the driving lock: it advances the program at the head of
the queue and all messages, and when nothing moves it spins for a while, then sleeps on the wait queue.

Note [Who drives]
A caller that waits anyway (`Group.run`) drives, in its own thread: no hand-over, no switch. Other operations, and what a caller
leaves behind, are driven by the group's thread, which starts with the first of them. A thread that finds the lock taken leaves its
operation in the queue and wakes the one that drives.

Note [Giving up]
When a deadline passes, the Work has failed, but its program may have signaled; the ranks are out of step, and a late rank must not
pair its operation with a later one of ours. So this rank publishes its failure on the board, and the group fails with the error of
that operation; a rank that arrives late, or waits for this one, fails at once. `recover` brings all ranks back into step.

Note [Breaking off]
A program may also end in the middle on this rank alone: no memory for a copy, or Ctrl-C in the thread that drives. So the group
fails at once, and publishes why. Only CollectiveMismatch leaves ranks in step: a program raises it after its last signal.

Note [The last reference]
Operations in flight keep their group, so the last reference to it may go when one of them is settled, in the thread that drives.
The group's finalizer unmaps the segment. So the thread that takes up an operation keeps the group until it has stopped driving.

Note [Rounds of recovery]
Ranks meet twice in a recovery, so the word that counts a rank's meetings is even outside of one. A rank that gives up returns to
the even number it started from: the next recovery then begins at the same place on all ranks. A rank that has passed in the
meantime sees that this one has failed, and returns.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gradwire.collectives import Collective
from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted
from gradwire.groups.ledger import CLOSED, Arrivals
from gradwire.groups.shared_memory.all_reduce import Steps
from gradwire.groups.shared_memory.board import HERE, LEFT, Board
from gradwire.groups.shared_memory.diagnosis import Diagnosis
from gradwire.groups.shared_memory.heap import Heap
from gradwire.groups.shared_memory.p2p import Mailbox, MailboxMessage, checks_per_round
from gradwire.groups.shared_memory.programs import Programs
from gradwire.groups.shared_memory.sync import SLICE, Fence, Patience
from gradwire.groups.work import Work

_NAP = 5e-3
"""The longest sleep, in seconds, of an operation that has no Work yet, and with it no deadline."""


class _Current(NamedTuple):
    """The collective that is being carried out, and how many signals of every rank it waits for."""

    work: Work
    steps: Steps
    target: int


class SharedMemoryEngine:
    """Drives one rank of one group. Holds no reference to the group: `fail` is a weak one."""

    def __init__(self, board: Board, heap: Heap, diagnosis: Diagnosis, fail: Callable[[BaseException], None]) -> None:
        self.name = diagnosis.ledger.name
        self.rank, self.size = board.rank, board.size
        self.board = board
        self.programs = Programs(self.name, board)
        self.mailbox = Mailbox(board, heap)
        self.diagnosis = diagnosis
        self._fail = fail
        self._driving = threading.Lock()
        self._queue: deque[Work] = deque()
        self._new_p2p: deque[Work] = deque()
        self._messages: list[MailboxMessage] = []
        self._current: _Current | None = None
        self._keep: object = None
        self._all_here = [HERE] * self.size
        self._stopping = False
        self._submitted = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.patience = Patience(self.size, shares=board.pids.tolist().count(os.getpid()) > 1)

    # -- for the group -------------------------------------------------------------------------------------------------

    def put(self, work: Work) -> None:
        if work.op.kind.is_p2p:
            self._new_p2p.append(work)
        else:
            self._queue.append(work)

    def wake(self) -> None:
        """Make sure that a thread drives what was queued."""
        if self._driving.locked():
            self.board.wait_queue.wake(self.rank)  # the one that drives may sleep
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._stopping:
                    name = f"gradwire-shm-{self.name}-{self.rank}"
                    self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    self._thread.start()
        self._submitted.release()

    def drive_for(self, work: Work) -> bool:
        """Drive in this thread until `work` is over. False if another thread drives."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            self._drive(work, self.patience.spins)
        except BaseException as error:
            self._broken_off(error)
            raise
        finally:
            self._keep = None  # the caller has the group
            self._driving.release()
        if self._busy():  # what was submitted while this thread was driving is left to the group's own
            self.wake()
        return True

    def sum_now(self, op: Collective, begin: Callable[[], Work]) -> Work | bool:
        """The shortest way: see Note [Plain sums] in all_reduce.py. False if it is not for `op`, or something else is under way.

        True when it is done; a Work, from `begin`, if the others did not arrive at once: then it was driven like any operation.
        """
        if not self._driving.acquire(blocking=False):
            return False
        steps: Steps | None = None
        try:
            # Only the driving thread may check: an operation that is being taken up is neither in the queue nor current.
            steps = None if self._busy() else self.programs.plain_sum(op)
            if steps is None:
                return False
            for target in steps:
                if not self._arrived(target):
                    work = begin()
                    self._current = _Current(work, steps, target)
                    self._drive(work, self.patience.spins)
                    break
            else:
                return True
        except CollectiveMismatch:  # every rank has raised it, and all are in step
            raise
        except BaseException as error:
            self._broken_off(error)
            if steps is not None:
                steps.close()  # now, and not when the traceback is dropped: it counts the collective as done
            raise
        finally:
            self._keep = None  # the caller has the group
            self._driving.release()
        if self._busy():
            self.wake()
        return work

    def _arrived(self, target: int) -> bool:
        """Whether all ranks have signaled so often, or do soon."""
        signals, patience = self.board.signals, self.patience
        for _ in range(patience.spins):
            if min(signals.tolist()) >= target:
                self.board.fence()
                return True
            if patience.contested:
                break
            if patience.crowded:
                patience.give_way()
        if not patience.sleeps_early():
            return False
        self.board.wait_queue.sleep(lambda: min(signals.tolist()) >= target, self.board.fence, _NAP)
        arrived = min(signals.tolist()) >= target
        self.board.fence()  # after the counter, and before the bytes
        return arrived

    def _busy(self) -> bool:
        return bool(self._current is not None or self._queue or self._messages or self._new_p2p)

    def arrivals(self, work: Work) -> Arrivals:
        """Which ranks have reached what the operation waits for; an operation that is queued waits for the one before it."""
        current = self._current
        target = 0 if current is None or work.is_completed() else current.target
        return Arrivals.of([r for r, count in enumerate(self.board.signals.tolist()) if count >= target], self.size)

    # -- driving -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            self._submitted.acquire()
            while self._submitted.acquire(blocking=False):
                pass
            if self._stopping:
                return
            with self._driving:
                try:
                    self._drive(None, self.patience.thread_spins)
                except BaseException as error:  # those who wait must get the error, and the thread is needed again
                    self._broken_off(error)
                keep, self._keep = self._keep, None
            del keep  # see Note [The last reference]

    def _drive(self, until: Work | None, checks: int) -> None:
        spins, waits = 0, self.patience
        while not self._stopping:
            moved = self._advance()
            if until is not None and until.settled:
                return
            if moved:
                spins = 0
                continue
            if not self._busy():
                return
            spins += checks_per_round(self._messages, alone=self._current is None)
            if spins < checks + waits.yields and not waits.contested:
                if waits.crowded or spins >= checks:
                    waits.give_way()
                continue
            waits.sleeps_early()
            spins, states = 0, self.board.states.tolist()
            if states != self._all_here:
                self._check_states()
            if (dead := self.diagnosis.death(self.waiting())) is not None and not self._advance():
                self._fail(dead)  # what it signaled before it died has been seen
            if until is not None and time.perf_counter() >= until.deadline:
                until.ledger.expire(until)
                continue

            def can_move(states: list[int] = states) -> bool:
                return self._stopping or self._advance() or self.board.states.tolist() != states

            self.board.wait_queue.sleep(can_move, self.board.fence, SLICE)

    def _advance(self) -> bool:
        """One step of everything that can take one."""
        current, moved = self._current, True
        if current is None and self._queue:
            self._begin(self._queue.popleft())
        elif current is not None and current.work.settled:
            self._give_up(current)
        elif current is not None and min(self.board.signals.tolist()) >= current.target:
            self.board.fence()
            self._go_on(current.work, current.steps)
        else:
            moved = False
        if self._new_p2p:
            work = self._new_p2p.popleft()
            self._keep = work.group
            self._messages.append(self.mailbox.message(work))
            moved = True
        if self._messages:
            for message in self._messages:
                moved = message.step() or moved
            self._messages = [message for message in self._messages if not message.over]
        return moved

    def _begin(self, work: Work) -> None:
        self._keep = work.group
        steps = self.programs.carry_out(work.op)
        self._current = _Current(work, steps, self.board.signaled)
        if work.settled:  # given up before it began: the others may be waiting for it
            self._give_up(self._current)
            return
        if work.ledger.events:
            work.ledger.started(work, time.perf_counter())
        self._go_on(work, steps)

    def _go_on(self, work: Work, steps: Steps) -> None:
        try:
            self._current = _Current(work, steps, next(steps))
        except StopIteration:
            self._current = None
            work.finish()
        except CollectiveMismatch as error:  # every rank has signaled as often as the others
            self._current = None
            work.fail(error)
        except Exception as error:
            self._current = None
            work.fail(error)
            self._fail(error)  # see Note [Breaking off]

    def _give_up(self, current: _Current) -> None:
        """See Note [Giving up]."""
        self._current = None
        current.steps.close()
        if (error := current.work.exception()) is not None:
            self._fail(error)

    def _broken_off(self, error: BaseException) -> None:
        """See Note [Breaking off]."""
        current = self._current
        what = self.name if current is None else f"{current.work.op} of {self.name}"
        why = f"{what} was broken off on rank {self.rank} by {type(error).__name__}{f': {error}' if str(error) else ''}"
        self._fail(GroupAborted(f"{why}. Every rank can call recover() to go on.", reason=why))

    # -- when nothing moves --------------------------------------------------------------------------------------------

    def _check_states(self) -> None:
        """Nothing has moved for a while, and not all ranks are there: fail what waits for the others in vain."""
        waiting = self.waiting()
        if (error := self.diagnosis.failure(waiting)) is not None:
            self._fail(error)
            return
        current, left = self._current, self.diagnosis.left()
        for rank in left:
            works = [m.work for m in self._messages if m.is_stranded(rank, left) and not m.step()]
            if current is not None and self.board.signals[rank] < current.target:
                works.append(current.work)
            for work in works:  # they fail, and so does every later collective; messages between the others go on
                work.fail(self.diagnosis.lost(rank, CLOSED, waiting))

    def waiting(self) -> list[Work]:
        """What this rank waits for now: the collective under way, and messages."""
        current = self._current
        messages = [message.work for message in self._messages if not message.over]
        return messages if current is None else [current.work, *messages]

    # -- after a failure, and at the end -------------------------------------------------------------------------------

    def recover(self, timeout: float) -> None:
        """Meet all ranks, drop what was under way, count from the beginning, and meet again: see Note [Rounds of recovery]."""
        deadline = time.perf_counter() + timeout
        board = self.board
        board.wait_queue.wake(self.rank)
        if not self._driving.acquire(timeout=timeout):
            raise CollectiveTimeout(
                f"recovery of {self.name} on rank {self.rank}: another thread still drives an operation after {timeout:.3g} s."
            )
        before, state = board.recoveries[self.rank], board.states[self.rank]
        try:
            self._queue.clear()
            self._new_p2p.clear()
            self._messages.clear()
            if self._current is not None:
                self._current.steps.close()
                self._current = None
            board.fence = Fence()  # Ctrl-C may have hit the old one between its two halves
            self.meet(deadline, timeout)
            board.start_over()
            self.mailbox.start_over()
            board.set_state(HERE)
            self.meet(deadline, timeout)
        except BaseException:
            board.recoveries[self.rank] = before
            board.set_state(state)
            raise
        finally:
            self._driving.release()

    def meet(self, deadline: float, timeout: float) -> None:
        """A barrier of its own, without signals."""
        board, diagnosis = self.board, self.diagnosis
        target = board.recoveries[self.rank] + 1
        board.fence()
        board.recoveries[self.rank] = target
        board.fence()
        board.wait_queue.wake_all()

        def all_there() -> bool:
            return min(board.recoveries.tolist()) >= target

        while not all_there():
            there = Arrivals.of([r for r, count in enumerate(board.recoveries.tolist()) if count >= target], self.size)
            left = next((r for r in there.missing if r in diagnosis.left()), None)
            lost = diagnosis.death([]) if left is None else diagnosis.ledger.lost(left, CLOSED)
            if lost is not None:
                raise lost
            if time.perf_counter() > deadline:
                raise diagnosis.ledger.not_recovered(there, timeout)
            board.wait_queue.sleep(all_there, board.fence, SLICE)
        board.fence()

    def stop(self, timeout: float = 5.0) -> None:
        self._stopping = True
        thread = self._thread
        self.board.wait_queue.wake(self.rank)
        self._submitted.release()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        if self.board.states[self.rank] & 0xFF == HERE:
            self.board.set_state(LEFT)
