"""Who drives, what happens when a program breaks off in the middle, and how ranks come back into step."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.collectives import ReduceOp, build
from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, GroupError, PeerLost, UsageError
from gradwire.groups.shared_memory import board, sync
from gradwire.groups.shared_memory.board import LEFT
from gradwire.groups.shared_memory.engine import _Current
from helpers.threads import run_threads
from helpers.waiting import wait_until

LARGE = 300_000
"""Elements of a float32 tensor that needs several chunks."""


def works(groups: Any, everywhere: Any, rounds: int = 3) -> None:
    """The group is in step: sums of all sizes, an exchange and a message come out right."""

    def use(group: Any) -> None:
        for n in (1, LARGE, 20_000):
            for _ in range(rounds):
                t = torch.full((n,), float(group.rank + 1))
                group.all_reduce(t)
                assert t.eq(sum(range(1, group.size + 1))).all()
        parts = torch.empty(group.size)
        group.all_gather_into_tensor(parts, torch.tensor([float(group.rank)]))
        assert parts.tolist() == list(range(group.size))
        got = torch.empty(1)
        receiving = group.recv(got, src=(group.rank - 1) % group.size, async_op=True)
        group.send(torch.tensor([float(group.rank)]), dst=(group.rank + 1) % group.size)
        receiving.wait()
        assert got.item() == (group.rank - 1) % group.size

    assert everywhere(groups, use) == [None] * len(groups)


def recovered(groups: Any, everywhere: Any) -> None:
    assert everywhere(groups, lambda group: group.recover(10.0)) == [None] * len(groups)
    works(groups, everywhere, rounds=1)


class Once:
    """A function that raises `error` once, after `calls` calls, and calls `fn` otherwise."""

    def __init__(self, fn: Callable[..., Any], error: BaseException, *, calls: int = 0) -> None:
        self.fn = fn
        self.error: BaseException | None = error
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls:
            self.calls -= 1
            return self.fn(*args, **kwargs)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.fn(*args, **kwargs)


@pytest.mark.parametrize("how", ["run", "submit"])
@pytest.mark.parametrize("where", ["before the announcement", "after it"])
def test_a_local_failure_in_the_middle_is_reported_to_the_others(
    world: Any, everywhere: Any, how: str, where: str
) -> None:
    """As when there is no memory for a copy on one rank: before the announcement, or after it."""
    groups = world(3)
    calls = 0 if where == "before the announcement" else 1
    board = groups[1]._board
    board.signal = Once(board.signal, MemoryError("no memory on rank 1"), calls=calls)
    began = time.perf_counter()

    def reduce(group: Any) -> None:
        t = torch.ones(LARGE, dtype=torch.float16)
        if how == "run":
            group.all_reduce(t)
        else:
            group.all_reduce(t, async_op=True).wait()

    errors = everywhere(groups, reduce)
    assert time.perf_counter() - began < 30
    assert isinstance(errors[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(errors[rank], GroupAborted)
        assert "rank 1 failed: no memory on rank 1" in str(errors[rank])
    recovered(groups, everywhere)


@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("place", ["before the signal", "between the halves of a fence", "asleep"])
def test_ctrl_c_in_the_thread_that_drives(world: Any, everywhere: Any, size: int, place: str) -> None:
    """KeyboardInterrupt goes to the caller; the other ranks fail at once, and all can recover."""
    groups = world(2)
    board = groups[0]._board
    if place == "before the signal":
        board.signal = Once(board.signal, KeyboardInterrupt())
    elif place == "between the halves of a fence":
        board.fence.acquire = Once(board.fence.acquire, KeyboardInterrupt())
    else:
        board.wait_queue.sleep = Once(board.wait_queue.sleep, KeyboardInterrupt())
    began = time.perf_counter()

    def reduce(group: Any) -> None:
        if group.rank == 1 and place == "asleep":
            wait_until(lambda: board.wait_queue.sleep.error is None, "rank 0 goes to sleep, and is interrupted there")
        group.all_reduce(torch.ones(size), label="interrupted")

    errors = everywhere(groups, reduce)
    assert time.perf_counter() - began < 30
    assert isinstance(errors[0], KeyboardInterrupt)
    if place != "asleep" or errors[1] is not None:  # asleep, rank 0 had signaled: a small sum is then done on rank 1
        assert isinstance(errors[1], GroupAborted)
        assert "broken off on rank 0 by KeyboardInterrupt" in str(errors[1])
    with pytest.raises(GroupAborted, match="broken off on rank 0 by KeyboardInterrupt"):
        groups[0].barrier()
    recovered(groups, everywhere)


def test_ctrl_c_while_a_sum_spins_leaves_nothing_that_counts_later(world: Any, everywhere: Any) -> None:
    """The traceback keeps the program alive until after the recovery; what it does when it is closed must be done before."""
    groups = world(2)
    board = groups[0]._board

    class Signals:
        """As if Ctrl-C came while rank 0 looks for the others' signals."""

        def tolist(self) -> list[int]:
            raise KeyboardInterrupt

    signals, board.signals = board.signals, Signals()
    board.signal = lambda: setattr(board, "signaled", board.signaled + 1) or board.signaled
    with pytest.raises(KeyboardInterrupt) as caught:
        groups[0].all_reduce(torch.ones(3))
    board.signals = signals
    del board.signal
    assert everywhere(groups, lambda group: group.recover(10.0)) == [None, None]
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert [group._board.turn for group in groups] == [0, 0]
    works(groups, everywhere, rounds=1)


def test_a_bug_in_the_groups_own_thread_does_not_end_it(world: Any, everywhere: Any) -> None:
    groups = world(2)
    engine = groups[1]._engine
    engine._advance = Once(engine._advance, ZeroDivisionError("a bug"))
    errors = everywhere(groups, lambda group: group.all_reduce(torch.ones(3), async_op=True).wait())
    assert isinstance(errors[1], GroupAborted)
    assert "broken off on rank 1 by ZeroDivisionError: a bug" in str(errors[1])
    assert isinstance(errors[0], GroupAborted)
    recovered(groups, everywhere)
    assert everywhere(groups, lambda group: group.all_reduce(torch.ones(3), async_op=True).wait()) == [True, True]


def test_sparse_tensors_of_other_dimensions_leave_nobody_waiting(world: Any, everywhere: Any) -> None:
    """Rank 1 has an empty tensor of one sparse dimension. Rank 0 receives nothing of it that is wrong, and goes on."""
    groups = world(2)

    def reduce(group: Any) -> None:
        if group.rank == 0:
            t = torch.eye(3).to_sparse()
        else:
            t = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (3, 3), check_invariants=True
            )
        group.all_reduce(t)

    began = time.perf_counter()
    errors = everywhere(groups, reduce)
    assert time.perf_counter() - began < 30
    assert all(isinstance(error, GroupError) for error in errors)
    assert "expects other sizes" in str(errors[1])
    recovered(groups, everywhere)


def test_sizes_that_do_not_fit_on_one_rank_leave_all_in_step(world: Any, everywhere: Any) -> None:
    """Small, through the staging buffers, and from the heap; only rank 1 expects other sizes than it gets."""
    groups = world(3)

    def exchange(group: Any) -> list[str]:
        said = []
        for n, in_heap in ((4, False), (100_000, False), (100_000, True), (1_000_000, False)):
            for _ in range(3):
                size = group.size
                inputs = [group.allocate(n) if in_heap else torch.empty(n) for _ in range(size)]
                for t in inputs:
                    t.fill_(float(group.rank))
                wrong = 1 if group.rank == 1 else 0
                outputs = [torch.zeros(n + (wrong if r == 0 else 0)) for r in range(size)]
                try:
                    group.all_to_all(outputs, inputs)
                    assert all(t.eq(r).all() for r, t in enumerate(outputs))
                    said.append("good")
                except CollectiveMismatch as error:
                    said.append(str(error))
        return said

    said = everywhere(groups, exchange)
    assert said[0] == said[2] == ["good"] * 12
    assert all("rank 1 expects other sizes than it was sent: " in text and "from rank 0" in text for text in said[1])
    works(groups, everywhere)


def test_mismatches_by_every_way_leave_all_in_step(world: Any, everywhere: Any) -> None:
    groups = world(2)
    pairs: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda g: g.all_reduce(torch.ones(3)), lambda g: g.all_reduce(torch.ones(4))),
        (lambda g: g.all_reduce(torch.ones(LARGE)), lambda g: g.all_reduce(torch.ones(3))),
        (lambda g: g.all_reduce(torch.ones(LARGE)), lambda g: g.barrier()),
        (lambda g: g.all_reduce(g.allocate(LARGE)), lambda g: g.all_reduce(torch.ones(LARGE), op=ReduceOp.MAX)),
        (lambda g: g.broadcast(torch.ones(LARGE), src=0), lambda g: g.broadcast(torch.ones(LARGE), src=1)),
        (lambda g: g.all_reduce(torch.ones(3), async_op=True).wait(), lambda g: g.barrier()),
        (lambda g: g.all_reduce(list(torch.ones(20_000, 3))), lambda g: g.all_reduce(torch.ones(3))),
        (lambda g: g.all_reduce(torch.eye(3)), lambda g: g.all_reduce(torch.eye(3).to_sparse())),
    ]

    def disagree(group: Any) -> list[Any]:
        found = []
        for pair in pairs:
            try:
                pair[group.rank](group)
                found.append(None)
            except CollectiveMismatch as error:
                found.append(error)
            group.barrier()
        return found

    for found in everywhere(groups, disagree):
        assert [type(error) for error in found] == [CollectiveMismatch] * len(pairs)
    works(groups, everywhere)


def test_recovery_after_every_kind_of_failure_again_and_again(world: Any, everywhere: Any) -> None:
    groups = world(3)
    for _ in range(3):
        groups[1].abort("on a whim")
        assert all(isinstance(e, GroupAborted) for e in everywhere(groups, lambda group: group.barrier()))
        recovered(groups, everywhere)

        def late(group: Any) -> None:
            if group.rank:
                group.submit(build.all_reduce(torch.ones(LARGE), label="late").within(0.2)).wait()

        errors = everywhere(groups, late)
        assert errors[0] is None
        assert all(isinstance(error, CollectiveTimeout) and error.missing == (0,) for error in errors[1:])
        recovered(groups, everywhere)

        def messages(group: Any) -> Any:
            if group.rank == 0:
                sends = [group.send(torch.ones(9), dst=1, tag=tag, async_op=True) for tag in range(40)]
                wait_until(lambda: not group._engine.mailbox._free[1], "all slots for messages are taken")
                group.abort("messages are under way")
                return [type(send.exception()) for send in sends]
            return None

        assert everywhere(groups, messages)[0] == [GroupAborted] * 40
        recovered(groups, everywhere)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_recovery_that_timed_out_can_be_tried_again(world: Any, everywhere: Any, late: int) -> None:
    """One rank does not come; the others give up, some of them more often than others; then all come."""
    groups = world(3)
    groups[0].abort("on a whim")
    everywhere(groups, lambda group: group.check_peers())
    for group in groups:
        if group.rank != late:
            for _ in range(group.rank + 1):
                with pytest.raises(CollectiveTimeout, match="have not called recover"):
                    group.recover(0.1)
    recovered(groups, everywhere)


def test_a_rank_that_was_let_through_a_recovery_that_another_gave_up_comes_back(world: Any, everywhere: Any) -> None:
    """Rank 0 gives up in the second meeting, when rank 1 has just been let through."""
    groups = world(2, timeout=10.0)
    groups[0].abort("on a whim")
    everywhere(groups, lambda group: group.check_peers())
    engine = groups[0]._engine
    meet, meetings = engine.meet, []

    def gives_up(deadline: float, timeout: float) -> None:
        meet(deadline, timeout)
        meetings.append(1)
        if len(meetings) == 2:
            wait_until(lambda: groups[1].failure is None, "rank 1 has recovered")
            raise CollectiveTimeout("given up at the last moment")

    engine.meet = gives_up
    errors = everywhere(groups, lambda group: group.recover(5.0))
    assert isinstance(errors[0], CollectiveTimeout)
    assert errors[1] is None
    engine.meet = meet

    def go_on(group: Any) -> int:
        for attempt in range(5):
            try:
                if group.failure is not None:
                    group.recover(5.0)
                group.barrier()
                return attempt
            except GroupAborted:
                continue
        raise AssertionError

    assert all(isinstance(attempt, int) for attempt in everywhere(groups, go_on))
    works(groups, everywhere)


def test_recovery_with_a_rank_that_has_left_raises(world: Any) -> None:
    groups = world(2)
    groups[0].abort("on a whim")
    groups[1].close()
    with pytest.raises(PeerLost, match="rank 1 is lost: it has closed its group"):
        groups[0].recover(10.0)


def test_what_was_in_flight_does_not_reach_the_recovered_group(world: Any, everywhere: Any) -> None:
    """Blocks that others may still write are kept back until all have met."""
    groups = world(2)
    doomed = groups[0].allocate(LARGE)
    place = doomed.data_ptr()
    work = groups[0].all_reduce(doomed, async_op=True)
    wait_until(lambda: groups[0]._board.signals[0] >= 1, "rank 0 has come to the sum")
    groups[0].abort("on a whim")
    with pytest.raises(GroupAborted):
        work.wait()
    del doomed, work
    gc.collect()
    kept = [groups[0].allocate(LARGE) for _ in range(5)]
    assert place not in [t.data_ptr() for t in kept]
    del kept
    everywhere(groups, lambda group: group.check_peers())
    recovered(groups, everywhere)
    gc.collect()
    again = [groups[0].allocate(LARGE) for _ in range(5)]
    assert place in [t.data_ptr() for t in again]


def test_submits_of_a_second_thread_while_the_first_drives(world: Any, everywhere: Any) -> None:
    """Sums by `run` in one thread, messages by `submit` in another, at the same time."""
    groups = world(2)

    def use(group: Any) -> bool:
        problems: list[BaseException] = []

        def messages() -> None:
            try:
                for i in range(200):
                    got = torch.empty(3)
                    receiving = group.recv(got, src=1 - group.rank, tag=i, async_op=True)
                    group.send(torch.full((3,), float(i)), dst=1 - group.rank, tag=i, async_op=bool(i % 2)).wait()
                    receiving.wait()
                    assert got.eq(i).all()
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=messages)
        thread.start()
        for i in range(200):
            t = torch.full((1 if i % 3 else 20_000,), float(i))
            group.all_reduce(t)
            assert t.eq(2 * i).all()
        thread.join(100)
        if problems:
            raise problems[0]
        return not thread.is_alive()

    assert everywhere(groups, use) == [True, True]


def test_collectives_of_two_threads_in_an_agreed_order(world: Any, everywhere: Any) -> None:
    """Two threads take turns, one submits and goes on, the other waits at once: order of submission is what counts."""
    groups = world(2)

    def use(group: Any) -> None:
        turns = [threading.Semaphore(1), threading.Semaphore(0)]
        problems: list[BaseException] = []
        pending: list[Any] = []

        def one(which: int) -> None:
            try:
                for i in range(150):
                    assert turns[which].acquire(timeout=20)
                    t = torch.full((2,), float(2 * i + which))
                    if which == 0:
                        pending.append((group.all_reduce(t, async_op=True), t, 2 * i))
                        turns[1].release()
                    else:
                        group.all_reduce(t)
                        assert t.eq(2 * (2 * i + 1)).all()
                        turns[0].release()
            except BaseException as error:
                problems.append(error)
                turns[1 - which].release()

        run_threads(threading.Thread(target=one, args=(which,)) for which in (0, 1))
        for work, t, value in pending:
            work.wait()
            assert t.eq(2 * value).all()
        if problems:
            raise problems[0]

    assert everywhere(groups, use) == [None, None]


def test_the_shortest_way_is_not_taken_past_an_operation_that_is_being_taken_up(world: Any) -> None:
    """The driving lock is free, and the operation before is current: the sum must queue behind it."""
    groups = world(2)
    engine = groups[0]._engine
    first = groups[0].begin(build.barrier())
    steps = engine.programs.carry_out(first.op)
    acquire = engine._driving.acquire
    taken = threading.Event()

    class Lock:
        """As if the thread that drove had let go just before we got the lock."""

        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            if not taken.is_set():
                taken.set()
                engine._current = _Current(first, steps, next(steps))
            return acquire(*args, **kwargs)

        def release(self) -> None:
            driving.release()

    driving, engine._driving = engine._driving, Lock()  # type: ignore[assignment]
    try:
        assert engine.sum_now(build.all_reduce(torch.ones(1)), lambda: pytest.fail("begun")) is False
    finally:
        engine._driving = driving
    assert groups[0]._board.signaled == 1
    engine.wake()
    groups[1].barrier()
    first.wait()


def test_only_the_rank_that_completes_a_signal_wakes_the_others(world: Any, everywhere: Any) -> None:
    """A sleeper waits for all ranks: each wake-up before the last signal would be for nothing."""
    groups = world(3)
    boards, woken = [group._board for group in groups], []
    for one in boards:
        one.wait_queue.wake_all = lambda rank=one.rank: woken.append(rank)
    for rank in (0, 2, 2, 1, 0, 1):
        boards[rank].signal()
    assert woken == [1, 1]
    for one in boards:
        del one.wait_queue.wake_all
    works(groups, everywhere)


@pytest.mark.parametrize(("stall", "fewest", "most"), [(float("inf"), 3 * 40, 10**6), (-1.0, 1, 1)])
def test_a_rank_whose_core_others_use_sleeps_instead_of_giving_it_up(
    world: Any, everywhere: Any, monkeypatch: pytest.MonkeyPatch, stall: float, fewest: int, most: int
) -> None:
    """A rank gives up its core a number of times before it sleeps, unless it was once slow to come back."""
    groups = world(2)
    patience, sleep, slept, yields = groups[0]._engine.patience, groups[0]._board.wait_queue.sleep, [], []
    patience.crowded, patience.spins, patience.yields = False, 1, 45
    monkeypatch.setattr(sync, "_STALL", stall)
    monkeypatch.setattr(sync.os, "sched_yield", lambda: yields.append(1))
    monkeypatch.setattr(groups[0]._board.wait_queue, "sleep", lambda *args: (slept.append(1), sleep(*args)))

    def use(group: Any) -> None:
        for op in (group.barrier, lambda: group.all_reduce(torch.ones(1)), lambda: group.broadcast(torch.ones(1), 0)):
            before = len(slept)
            if group.rank == 1:
                wait_until(lambda before=before: len(slept) > before, "rank 0 sleeps")
            op()

    assert everywhere(groups, use) == [None, None]
    assert fewest <= len(yields) <= most
    assert patience.contested == (0 if stall > 0 else sync._CONTESTED - len(slept))


def test_what_is_written_is_no_longer_what_autograd_saved(world: Any, everywhere: Any) -> None:
    def use(group: Any) -> list[int]:
        small, large, part = torch.ones(8), torch.ones(LARGE), torch.ones(4)
        group.all_reduce(small)
        group.all_reduce(large)
        group.broadcast(part, 0)
        group.all_gather_into_tensor(small, part)
        return [small._version, large._version, part._version]

    for rank, (small, large, part) in enumerate(everywhere(world(2), use)):
        assert small >= 2
        assert large >= 1
        assert bool(part) == (rank == 1)  # the root's is only read


def test_a_tensor_without_memory_is_refused(world: Any, everywhere: Any) -> None:
    groups = world(2)
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    for op in (
        build.all_reduce(freed),
        build.broadcast(freed, src=0),
        build.all_gather_into_tensor(torch.ones(16), freed),
    ):
        for run in (groups[0].submit, groups[0].run):
            with pytest.raises(UsageError, match=r"a tensor of type Tensor has no memory of its own"):
                run(op)
    works(groups, everywhere)


def test_a_callback_that_submits(world: Any, everywhere: Any) -> None:
    """In the thread that settles: the next operation is run by the thread that drives, however the first was waited for."""
    groups = world(2)

    def use(group: Any) -> list[float]:
        values = []
        for how in ("run", "submit"):
            first, second, third = torch.ones(1), torch.ones(1), torch.ones(LARGE)
            chain: list[Any] = []
            done = threading.Event()

            def then(work: Any) -> None:
                chain.append(group.all_reduce(second, async_op=True))
                chain[-1].add_done_callback(last)

            def last(work: Any) -> None:
                chain.append(group.all_reduce(third, async_op=True))
                done.set()

            work = group.submit(build.all_reduce(first))
            work.add_done_callback(then)
            if how == "run":
                work.wait()
            assert done.wait(100)
            for link in chain:
                link.wait()
            work.wait()
            values += [first.item(), second.item(), third.sum().item() / LARGE]
        return values

    assert everywhere(groups, use) == [[2.0] * 6] * 2


def test_a_rank_that_left_is_missed_only_by_who_waits_for_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends after it has closed its group: the others can go on with messages, and nobody calls it a death."""
    groups = world(3)
    groups[2].close()
    for group in groups[:2]:
        monkeypatch.setattr(group._engine.diagnosis.pulse, "dead", lambda: [2])
    assert groups[0]._board.states[2] == LEFT
    got = torch.empty(3)
    receiving = groups[1].recv(got, src=0, async_op=True)
    time.sleep(0.2)  # it sleeps and looks around a few times
    groups[0].check_peers()
    groups[0].send(torch.ones(3), dst=1)
    receiving.wait()
    with pytest.raises(PeerLost, match="rank 2 is lost: it has closed its group"):
        groups[0].recv(torch.ones(3), src=2)
    with pytest.raises(PeerLost, match="rank 2 is lost: it has closed its group"):
        groups[0].barrier()


def test_the_reason_reaches_ranks_that_get_it_from_another_rank(world: Any) -> None:
    """Rank 1 looks when rank 0 has already failed because rank 2 left: it gets rank 2's reason, and the advice."""
    groups = world(3)
    groups[2].close()
    with pytest.raises(PeerLost, match="it has closed its group"):
        groups[0].barrier()
    groups[0].fail(PeerLost("rank 2 is lost", rank=2))
    with pytest.raises(PeerLost, match=r"rank 2 is lost: it has closed its group and will not join. .*model.join\(\)"):
        groups[1].barrier()


def test_a_failure_that_is_passed_on_names_one_rank(world: Any) -> None:
    groups = world(3)
    groups[2].abort("the loss is wrong")
    for group in groups[:2]:  # the second may look at the first, which failed because of the third
        with pytest.raises(GroupAborted) as caught:
            group.barrier()
        assert caught.value.reason == "rank 2 failed: the loss is wrong"


def test_a_dropped_group_ends_its_threads(world: Any) -> None:
    del world
    from concurrent.futures import ThreadPoolExecutor

    from torch.distributed import HashStore

    from gradwire.groups import SharedMemoryGroup

    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: SharedMemoryGroup(store, rank, 2), range(2)))
    open_end = groups[0].all_reduce(torch.ones(3), async_op=True)
    threads = [group._engine._thread for group in groups if group._engine._thread is not None]
    assert threads
    weak = [weakref.ref(group) for group in groups]
    del groups
    gc.collect()
    # Rank 0's thread ends when it has seen that rank 1 has left, which fails the operation that keeps its group.
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert [ref() for ref in weak] == [None, None]
    del open_end


def test_programs_are_where_the_tests_think(world: Any) -> None:
    """The sizes above straddle the ways a sum can take."""
    assert board.SMALL < 20_000 * 4
    assert LARGE * 4 > board.CHUNK
