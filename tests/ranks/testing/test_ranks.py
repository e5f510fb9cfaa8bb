"""run_ranks: results, failures, deaths, time-outs and leftovers of ranks."""

import _thread
import os
import re
import signal
import threading
import time
import traceback

import pytest
import torch

from gradwire.errors import (
    CollectiveTimeout,
    GroupAborted,
    GroupError,
    InternalError,
    PeerLost,
    UsageError,
    UsageTypeError,
)
from gradwire.groups import Group, GroupWrapper
from gradwire.groups.kinds import find_kind
from gradwire.testing import LeftBehind, kinds, ranks, run_ranks
from gradwire.testing.pool.protocol import Fate, RankResult, RemoteTraceback
from gradwire.testing.ranks import Request, _verdict

OFFSET = 40
every_kind = pytest.mark.parametrize("kind", ["threads", "gloo"])


class LocalError(Exception):
    """Of this test module, which no worker can import."""


class Named(GroupWrapper):
    """A wrapper that the worker can only have by value."""


def offset_rank(group: Group) -> int:
    return OFFSET + group.rank


def my_pid(group: Group) -> int:
    return os.getpid()


def die(group: Group) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_kinds_are_a_table() -> None:
    assert {"threads", "gloo"} <= set(kinds())
    with pytest.raises(UsageError, match=r"'carrier-pigeon'.*Known kinds: threads, shared_memory"):
        run_ranks(offset_rank, 2, kind="carrier-pigeon")


@every_kind
def test_results_come_in_rank_order_and_ranks_communicate(kind: str) -> None:
    factor = torch.tensor([3.0])

    def total(group: Group) -> tuple[int, float]:
        t = factor * (group.rank + 1)
        group.all_reduce(t)
        return group.rank, t.item()

    assert run_ranks(total, 3, kind=kind) == [(0, 18.0), (1, 18.0), (2, 18.0)]


@every_kind
def test_wrap_is_applied_on_each_rank(kind: str) -> None:
    names = run_ranks(lambda group: type(group).__name__, 2, kind=kind, wrap=Named)
    assert names == ["Named", "Named"]


@every_kind
def test_groups_are_closed_afterwards(kind: str) -> None:
    marks = run_ranks(lambda group: group, 1) if kind == "threads" else None
    assert marks is None or marks[0].closed

    def close_myself(group: Group) -> bool:
        group.close()
        return group.closed

    assert run_ranks(close_myself, 2, kind=kind) == [True, True]


@every_kind
def test_a_rank_that_returns_early_has_not_left(kind: str) -> None:
    def last_waits(group: Group) -> tuple[int, ...] | None:
        if group.rank == 0:
            return None
        try:
            group.monitored_barrier(timeout=1.0)
        except CollectiveTimeout as error:
            return error.missing
        return ()

    assert run_ranks(last_waits, 2, kind=kind) == [None, (0,)]


@pytest.mark.parametrize(("n", "timeout", "lost"), [(0, 1.0, ()), (2, 0.0, ()), (2, 1.0, (2,)), (2, 1.0, (-1,))])
def test_arguments_are_checked(n: int, timeout: float, lost: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        run_ranks(offset_rank, n, kind="gloo", timeout=timeout, lost=lost)


def test_threads_cannot_be_lost() -> None:
    with pytest.raises(UsageError, match=r"cannot die alone. Use shared_memory or hierarchical or gloo"):
        run_ranks(offset_rank, 2, lost=(1,))


@every_kind
def test_a_rank_that_raises_stops_the_others_and_is_named(kind: str) -> None:
    def rank_one_fails(group: Group) -> None:
        if group.rank == 1:
            error = LocalError("on purpose")
            error.add_note("a note of its own")
            raise error
        group.barrier()

    started = time.monotonic()
    with pytest.raises(LocalError, match="on purpose") as caught:
        run_ranks(rank_one_fails, 3, kind=kind)
    assert time.monotonic() - started < 100
    notes = caught.value.__notes__
    assert notes[0] == "a note of its own"
    assert "raised on rank 1 of 3" in notes[1]
    assert repr(kind) in notes[1]
    assert any(re.match(r"rank [02] failed too: (GroupAborted|PeerLost)", note) for note in notes)
    assert "rank_one_fails" in "".join(traceback.format_exception(caught.value))


def test_the_remote_traceback_is_the_cause() -> None:
    def outer(group: Group) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise LocalError("outer") from error

    with pytest.raises(LocalError) as caught:
        run_ranks(outer, 1, kind="gloo")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = str(caught.value.__cause__)
    assert "KeyError: 'inner'" in text
    assert "in outer" in text


@every_kind
def test_a_wrapper_that_raises_is_a_failure_of_its_rank(kind: str) -> None:
    def refuse(group: Group) -> Group:
        raise LocalError(f"rank {group.rank} will not be wrapped")

    with pytest.raises(LocalError, match="will not be wrapped"):
        run_ranks(offset_rank, 2, kind=kind, wrap=refuse)


@every_kind
def test_an_error_on_closing_is_a_failure(kind: str) -> None:
    def bad_hook(group: Group) -> None:
        def hook(info: object) -> None:
            raise LocalError("from the hook")

        group.on_completion(hook)
        group.barrier()

    with pytest.raises(UsageError, match="from the hook") as caught:
        run_ranks(bad_hook, 2, kind=kind)
    assert re.match(r"raised on rank [01] of 2", caught.value.__notes__[0])


def test_an_exception_that_cannot_be_pickled_is_reported() -> None:
    class Awkward(Exception):
        def __init__(self, left: str, right: str) -> None:
            super().__init__(left + right)

    def hold_a_lock(group: Group) -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def two_arguments(group: Group) -> None:
        raise Awkward("left", "right")

    with pytest.raises(GroupError, match=r"raised ValueError: with a lock.*cannot pickle '_thread.lock'") as caught:
        run_ranks(hold_a_lock, 1, kind="gloo")
    assert "hold_a_lock" in str(caught.value.__cause__)
    with pytest.raises(GroupError, match=r"Awkward: leftright.*missing 1 required positional argument"):
        run_ranks(two_arguments, 1, kind="gloo")


def test_what_cannot_be_sent_is_refused_clearly() -> None:
    with pytest.raises(UsageTypeError, match=r"rank 0 returned a lock that cannot be sent to another process"):
        run_ranks(lambda group: threading.Lock(), 1, kind="gloo")
    lock = threading.Lock()
    with pytest.raises(
        UsageTypeError, match=r"cannot be sent to rank processes: TypeError: cannot pickle '_thread.lock'"
    ):
        run_ranks(lambda group: lock.locked(), 1, kind="gloo")


def test_an_interrupt_in_the_parent_ends_the_run() -> None:
    parent = os.getpid()

    def interrupt_parent(group: Group) -> None:
        if group.rank == 0:
            os.kill(parent, signal.SIGINT)
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(interrupt_parent, 2, kind="gloo")
    assert run_ranks(offset_rank, 2, kind="gloo") == [40, 41]


def test_an_interrupt_ends_threads_too() -> None:
    def interrupt_main(group: Group) -> None:
        if group.rank == 0:
            _thread.interrupt_main()
        group.send(torch.zeros(1), dst=1 - group.rank)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(interrupt_main, 2)


REQUEST = Request(offset_rank, 3, find_kind("gloo", who="test"), 5.0, frozenset(), None)


def returned(rank: int) -> RankResult:
    return RankResult(rank, Fate.RETURNED, value=rank, when=0.0)


def raised(rank: int, when: float, error: BaseException) -> RankResult:
    return RankResult(rank, Fate.RAISED, error=error, when=when)


def died(rank: int, when: float) -> RankResult:
    return RankResult(rank, Fate.DIED, detail="its process 1 was killed by SIGKILL (signal 9)", when=when)


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        ([raised(0, 2.0, KeyError()), raised(1, 1.9, ValueError()), returned(2)], ValueError),
        ([raised(0, 1.9, PeerLost("")), raised(1, 2.0, ValueError()), raised(2, 1.8, GroupAborted(""))], ValueError),
        ([raised(0, 1.0, PeerLost("")), raised(1, 9.0, ValueError()), returned(2)], PeerLost),
        ([raised(0, 1.0, GroupAborted("")), died(1, 1.5), returned(2)], PeerLost),
        ([raised(0, 1.0, ValueError()), died(1, 0.9), returned(2)], ValueError),
        (
            [RankResult(0, Fate.STUCK, detail="here", when=1.0), raised(1, 3.0, GroupAborted("")), returned(2)],
            GroupAborted,
        ),
    ],
)
def test_which_failure_is_raised(outcomes: list[RankResult], wanted: type[Exception]) -> None:
    with pytest.raises(wanted) as caught:
        _verdict(outcomes, REQUEST)
    failures = [outcome for outcome in outcomes if outcome.failed(())]
    others = [note for note in getattr(caught.value, "__notes__", []) if "failed too" in note or "was stopped" in note]
    assert len(others) == len(failures) - 1


def test_a_rank_that_dies_is_peer_lost_and_is_replaced() -> None:
    before = run_ranks(my_pid, 2, kind="gloo")

    def rank_one_dies(group: Group) -> None:
        if group.rank == 1:
            die(group)
        group.barrier()

    with pytest.raises(
        PeerLost, match=rf"rank 1 died: its process {before[1]} was killed by SIGKILL \(signal 9\)"
    ) as caught:
        run_ranks(rank_one_dies, 2, kind="gloo")
    assert caught.value.rank == 1
    after = run_ranks(my_pid, 2, kind="gloo")
    assert before[1] not in after
    with pytest.raises(PeerLost, match="exited with code 3"):
        run_ranks(lambda group: os._exit(3), 1, kind="gloo")


def test_a_death_is_seen_even_if_a_forked_child_keeps_the_sockets(tmp_path: object) -> None:
    fifo = os.path.join(str(tmp_path), "fifo")
    os.mkfifo(fifo)

    def fork_and_die(group: Group) -> None:
        if os.fork() == 0:
            os.close(os.open(fifo, os.O_RDONLY))  # until the test opens the other end
            os._exit(0)
        die(group)

    with pytest.raises(PeerLost):
        run_ranks(fork_and_die, 1, kind="gloo")
    os.close(os.open(fifo, os.O_WRONLY))


def test_lost_ranks_may_die() -> None:
    def rank_two_dies(group: Group) -> str:
        if group.rank == 2:
            die(group)
        try:
            group.barrier()
        except GroupError as error:
            return type(error).__name__
        return "nothing happened"

    results = run_ranks(rank_two_dies, 3, kind="gloo", lost=(2,))
    assert results[2] is None
    assert "nothing happened" not in results


def test_a_lost_rank_that_lives_fails_the_run() -> None:
    def nobody_dies(group: Group) -> int:
        if group.rank == 0:
            group.barrier()  # which rank 1 never joins: the run must not wait for its time-out
        return group.rank

    started = time.monotonic()
    with pytest.raises(UsageError, match=r"rank 1 was expected to die \(lost=\[1\]\) but returned 1"):
        run_ranks(nobody_dies, 2, kind="gloo", lost=(1,))
    assert time.monotonic() - started < 100


@every_kind
def test_a_time_out_names_the_ranks_and_shows_their_stacks(kind: str) -> None:
    def linger_here(group: Group) -> None:
        if group.rank == 1:
            group.barrier()

    with pytest.raises(CollectiveTimeout, match=r"ranks \[1\] had not returned after 4 s") as caught:
        run_ranks(linger_here, 2, kind=kind, timeout=4.0)
    assert caught.value.joined == (0,)
    assert caught.value.missing == (1,)
    assert "stack of rank 1:" in str(caught.value)
    assert "in linger_here" in str(caught.value)


def test_a_stopped_process_is_killed_without_a_stack() -> None:
    def stop(group: Group) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(CollectiveTimeout, match=r"\(no stack within 2 s\)"):
        run_ranks(stop, 1, kind="gloo", timeout=0.5)


def test_a_rank_that_does_not_stop_after_a_failure_is_killed() -> None:
    def ignore_the_abort(group: Group) -> None:
        if group.rank == 0:
            raise LocalError("first")
        threading.Event().wait(60)

    with pytest.raises(LocalError, match="first") as caught:
        run_ranks(ignore_the_abort, 2, kind="gloo")
    note = next(note for note in caught.value.__notes__ if "did not finish and was stopped" in note)
    assert "in ignore_the_abort" in note


def test_a_leak_on_a_rank_is_a_failure_and_its_process_is_replaced() -> None:
    def leak_on_rank_one(group: Group) -> int:
        if group.rank == 1:
            threading.Thread(target=threading.Event().wait, args=(60,), name="leaky", daemon=True).start()
        return os.getpid()

    before = run_ranks(my_pid, 2, kind="gloo")
    with pytest.raises(InternalError, match=r"rank 1 left behind.*thread 'leaky' \(daemon\)") as caught:
        run_ranks(leak_on_rank_one, 2, kind="gloo")
    ours = [one for one in caught.value.story if "/sem." not in one]  # made and removed by another test just now
    assert ours == ["thread 'leaky' (daemon)"]
    after = run_ranks(my_pid, 2, kind="gloo")
    assert before[1] not in after
    assert before[0] in after


def test_what_a_users_function_leaves_is_no_error_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its process ends with it: torch's process group, say."""

    def leave_a_process_group(group: Group) -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return os.getpid()

    monkeypatch.setattr(ranks, "DEFAULT_LEFTOVERS", LeftBehind.IGNORE)
    first = run_ranks(leave_a_process_group, 1, kind="gloo")
    assert run_ranks(leave_a_process_group, 1, kind="gloo") != first  # in a process that knows nothing of the first
    with pytest.raises(InternalError, match="rank 0 left behind"):
        run_ranks(leave_a_process_group, 1, kind="gloo", leftovers=LeftBehind.RAISE)


def test_a_leak_after_a_failure_is_a_note() -> None:
    def leak_and_fail(group: Group) -> None:
        os.pipe()
        raise LocalError("first")

    with pytest.raises(LocalError, match="first") as caught:
        run_ranks(leak_and_fail, 1, kind="gloo")
    assert any("and then: InternalError" in note and "file descriptor" in note for note in caught.value.__notes__)


class IgnoresAbort(GroupWrapper):
    """Does nothing about an abort."""

    def abort(self, reason: str = "") -> None:
        pass


def test_threads_are_stopped_whatever_their_wrapper_does_with_an_abort():
    raised_types = []

    def wait_alone(group):
        if group.rank == 0:
            try:
                group.barrier()
            except GroupError as error:
                raised_types.append(type(error))

    with pytest.raises(CollectiveTimeout, match=r"ranks \[0\] had not returned after 0.3 s"):
        run_ranks(wait_alone, 2, timeout=0.3, wrap=IgnoresAbort)
    assert raised_types == [GroupAborted]
