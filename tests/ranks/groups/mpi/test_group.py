"""MPIGroup beyond conformance: large counts, memory that overlaps, late ranks, leaving, recovery, and every error it raises."""

import json
import sys
import threading
import time
import types
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import build
from gradwire.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupError,
    PeerLost,
    UsageError,
    UsageTypeError,
)
from gradwire.groups import Group
from gradwire.groups.mpi import MPIGroup
from gradwire.groups.mpi.group import world_ranks
from gradwire.groups.mpi.native import Native
from gradwire.groups.mpi.pending_requests import PendingRequests, Receive, ReceiveMatcher
from gradwire.groups.mpi.runtime import Runtime, runtime
from gradwire.groups.store.rendezvous import MemberProcess, Rendezvous
from gradwire.testing import check_group, run_ranks
from gradwire.testing.mpi import missing

needs_mpi = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def on_ranks(fn: Any, n: int = 2, **named: Any) -> list[Any]:
    return run_ranks(fn, n, kind="mpi", **named)


def test_without_mpi4py_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'gradwire\[mpi\]'"):
        MPIGroup()


class FakeMPI:
    """As much of mpi4py.MPI as starting needs."""

    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)

    def __init__(self, *, level: int = 3, initialized: bool = True, finalized: bool = False) -> None:
        self.level, self.initialized, self.finalized = level, initialized, finalized
        self.asked: int | None = None

    def Is_initialized(self) -> bool:
        return self.initialized

    def Is_finalized(self) -> bool:
        return self.finalized

    def Init_thread(self, level: int) -> None:
        self.asked, self.initialized = level, True

    def Query_thread(self) -> int:
        return self.level

    def Finalize(self) -> None:
        self.finalized = True


@pytest.mark.parametrize("started", [True, False])
def test_too_little_threading_is_refused(started: bool) -> None:
    fake = FakeMPI(level=2, initialized=started)
    with pytest.raises(UsageError, match="needs THREAD_MULTIPLE, with which this MPI does not run"):
        Runtime(fake)
    assert fake.finalized is not started  # what was started here is ended here
    fake.finalized = True


def test_a_finalized_mpi_is_refused() -> None:
    with pytest.raises(UsageError, match="MPI has been finalized"):
        Runtime(FakeMPI(finalized=True))


def test_mpi_is_started_with_all_threads_if_nobody_has() -> None:
    fake = FakeMPI(initialized=False)
    Runtime(fake)
    assert fake.asked == fake.THREAD_MULTIPLE
    fake.finalized = True  # so that nothing is done at exit


def test_a_finalizer_that_sweeps_meanwhile_does_not_settle_an_engine_twice() -> None:
    fake, settled = FakeMPI(), []
    here = Runtime(fake)
    last = types.SimpleNamespace(settle_departure=lambda: settled.append("last") or True)

    def settle() -> bool:
        settled.append("first")
        here.keep_alive.departing.append(last)  # as `leave` of a group that is finalized
        here.sweep()
        return True

    here.keep_alive.departing.append(types.SimpleNamespace(settle_departure=settle))
    here.sweep()
    assert (settled, here.keep_alive.departing) == (["first", "last"], [])
    fake.finalized = True


def arrive(store: dist.Store, rank: int, world_rank: int) -> None:
    """What another rank writes into the store."""
    store.set(f"gradwire/mpi/1/process/{rank}", json.dumps(asdict(MemberProcess.current())))
    store.set(f"gradwire/mpi/1/world-ranks/{rank}", str(world_rank))


def test_processes_of_several_worlds_are_told_to_use_one_mpirun() -> None:
    store = dist.HashStore()
    arrive(store, 1, 0)
    with pytest.raises(UsageError, match=r"processes \[0, 0\] of MPI's world of 1.*mpirun -n 2"):
        world_ranks(Rendezvous(store, 0, 2, timeout=1, who="making it"), 0, 1, what="making it")


def test_who_did_not_come_to_the_store_is_named() -> None:
    store = dist.HashStore()
    arrive(store, 2, 2)
    with pytest.raises(CollectiveTimeout, match=r"making it: ranks \[1, 3\] did not arrive") as caught:
        world_ranks(Rendezvous(store, 0, 4, timeout=0.05, who="making it"), 0, 4, what="making it")
    assert (caught.value.joined, caught.value.missing) == ((0, 2), (1, 3))


@needs_mpi
def test_counts_that_are_too_large_for_mpi() -> None:
    """The limit is lowered to a few elements, so that everything is above it."""

    def small_counts(group: Group) -> Group:
        assert isinstance(group, MPIGroup)
        old = group._engine
        old.retire()
        group._native = Native(runtime().mpi, most=3)
        group._engines[:] = [group._engine_on(old.comm, old.spare)]
        return group

    names = [
        "all_reduce_ops", "all_reduce_sizes", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_gather",
        "all_gather_into_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "send_recv", "recv_any",
    ]  # fmt: skip
    report = check_group(lambda fn: on_ranks(fn, 3, wrap=small_counts), only=names)
    assert set(report.ran) == set(names)


LENGTHS = (2, 8, 5000, 40_000)
"""Of messages into a room of 4: too few, too many, and more than Open MPI sends at once within a host and over TCP."""


@needs_mpi
def test_a_message_of_another_size_is_a_mismatch_and_nothing_is_overwritten() -> None:
    """See Note [Why a message is matched before it is received] in pending_requests.py."""

    def rank_main(group: Group) -> float:
        if group.rank == 0:
            for n in LENGTHS:
                group.send(torch.ones(n), dst=1, tag=n)
            group.barrier()
            return 0.0
        memory = torch.zeros(50_000)
        for n in LENGTHS:
            with pytest.raises(CollectiveMismatch, match=rf"rank 0 sent {4 * n} bytes, but there is room for 16"):
                group.recv(memory[:4], src=0, tag=n)
        group.barrier()  # messages do not put the group out of step
        return memory.sum().item()

    assert on_ranks(rank_main)[1] == 0.0


@needs_mpi
@pytest.mark.parametrize("n", LENGTHS)
def test_a_part_of_another_size_is_a_mismatch_and_nothing_is_overwritten(n: int) -> None:
    def rank_main(group: Group) -> float:
        memory = torch.zeros(50_000)
        if group.rank == 1:
            with suppress(GroupAborted):  # rank 0 has its bytes, and may have said so or ended the group by then
                group.gather(torch.ones(n), None, dst=0)
            return 0.0
        with pytest.raises(CollectiveMismatch, match=rf"rank 1 sent {4 * n} bytes, but there is room for 16"):
            group.gather(torch.ones(4), [torch.empty(4), memory[:4]], dst=0)
        with pytest.raises(CollectiveMismatch):  # the ranks are not in step
            group.barrier()
        return memory.sum().item()

    assert on_ranks(rank_main)[0] == 0.0


@needs_mpi
def test_messages_go_to_receives_in_the_order_of_both() -> None:
    """Whichever receive is waited for first; and one from anybody stands before a later one from a rank it also matches."""

    def rank_main(group: Group) -> Any:
        many = 60
        if group.rank < 2:
            for i in range(many):
                group.send(torch.full((1 + i % 5,), float(i)), dst=2, tag=7)
            group.barrier()
            group.send(torch.full((3,), 100.0 + group.rank), dst=2)
            return None
        places = [(src, torch.empty(1 + i % 5)) for i in range(many) for src in (0, 1)]
        works = [group.recv(t, src=src, tag=7, async_op=True) for src, t in places]
        for work in reversed(works):
            work.wait()
        assert [t[0].item() for _, t in places] == [float(i) for i in range(many) for _ in range(2)]
        first, second = torch.empty(3), torch.empty(3)
        works = [group.recv(first, src=1, async_op=True), group.recv(second, async_op=True)]
        group.barrier()
        for work in reversed(works):
            work.wait()
        return (first[0].item(), second[0].item(), [work.source_rank() for work in works])

    assert on_ranks(rank_main, 3)[2] == (101.0, 100.0, [1, 0])


@needs_mpi
@pytest.mark.parametrize("n", [100, 100_000])
def test_a_receive_that_was_given_up_writes_into_nobodys_memory(n: int) -> None:
    """Its message comes when its tensor is gone, and other tensors of that size have been made."""

    def rank_main(group: Group) -> float:
        if group.rank == 0:
            group.barrier()
            group.send(torch.ones(n), dst=1)
            group.barrier()
            return 0.0
        with pytest.raises(CollectiveTimeout):
            group.submit(build.recv(torch.zeros(n), src=0).within(0.1)).wait()
        later = [torch.zeros(n) for _ in range(50)]
        group.barrier()
        group.barrier()
        return sum(t.sum().item() for t in later)

    assert on_ranks(rank_main)[1] == 0.0


@needs_mpi
def test_an_operation_that_was_begun_in_part_keeps_its_memory() -> None:
    def rank_main(group: Group) -> tuple[int, int]:
        assert isinstance(group, MPIGroup)
        keep_alive, native, calls = runtime().keep_alive, group._native, [0]
        before, real = len(keep_alive.requests), native.bytes_of

        def failing(t: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] == 4:
                raise MemoryError("no memory for the second send")
            return real(t)

        native.bytes_of = failing  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            group.all_to_all([torch.empty(2) for _ in range(3)], [torch.ones(2) for _ in range(3)])
        (kept,) = keep_alive.requests[before:]
        return len(kept.requests), len(kept.receives)

    assert on_ranks(rank_main, 3) == [(1, 0)] * 3


class FakeRequest:
    """Is over when it is set to be, or fails."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)

    def Test(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_request_that_fails_does_not_end_the_others() -> None:
    fake: Any = types.SimpleNamespace(Exception=ValueError, Status=lambda: None)
    op = build.barrier()
    pending = PendingRequests(ReceiveMatcher(fake, None), op)
    pending.requests += [FakeRequest(ValueError("first")), FakeRequest(False, False, True), FakeRequest(True)]
    assert [pending.test(fake) for _ in range(3)] == [False, False, True]
    assert str(pending.error) == "first"
    assert pending.op is op, "it keeps the memory"


def test_a_receive_that_mpi_cannot_look_for_is_over() -> None:
    class Broken:
        size = 2

        def Improbe(self, **named: Any) -> None:
            raise ValueError("gone")

    fake: Any = types.SimpleNamespace(Exception=ValueError, Status=lambda: None, ANY_SOURCE=-1)
    pending = PendingRequests(ReceiveMatcher(fake, Broken()), build.barrier())
    for source in (0, 1):
        pending.add_receive(Receive(torch.empty(1), None, source, 3))
    assert pending.test(fake)
    assert str(pending.error) == "gone"


@needs_mpi
def test_mistakes() -> None:
    def rank_main(group: Group) -> None:
        assert isinstance(group, MPIGroup)
        with pytest.raises(UsageTypeError, match=r"MPIGroup\(3\): not a communicator"):
            MPIGroup(3)
        with pytest.raises(UsageTypeError, match="not a communicator"):
            MPIGroup(runtime().mpi.COMM_NULL)
        with pytest.raises(UsageError, match="timeout is -1"):
            MPIGroup(timeout=-1)
        with pytest.raises(UsageError, match="has no data"):
            group.all_reduce(torch.ones(2, device="meta"))
        with pytest.raises(UsageError, match="the tag is too large"):
            group.send(torch.ones(2), dst=1 - group.rank, tag=2**31 - 1)
        group.barrier()

    on_ranks(rank_main)


@needs_mpi
def test_over_the_world_and_over_a_communicator() -> None:
    def rank_main(group: Group) -> None:
        world = runtime().mpi.COMM_WORLD
        with MPIGroup(timeout=20) as everybody, MPIGroup(world, name="second") as second:
            assert (everybody.rank, everybody.size, everybody.name) == (world.rank, world.size, "mpi")
            a, b = torch.ones(1), torch.full((1,), 10.0)
            order = [(everybody, a), (second, b)]
            for work in [g.all_reduce(t, async_op=True) for g, t in (order if group.rank else reversed(order))]:
                work.wait()
            assert (a.item(), b.item()) == (3.0, 30.0)

    on_ranks(rank_main, 3)


@needs_mpi
def test_a_group_whose_rank_does_not_come_is_not_made() -> None:
    def rank_main(group: Group) -> None:
        assert isinstance(group, MPIGroup)
        side = group.split(0)
        assert side is not None
        group.timeout = 0.2
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"making MPIGroup 'pair' of ranks \[0, 1\].* within 0.2 s"):
                group.subgroup([0, 1], name="pair")
        side.barrier()
        side.close()
        if group.rank == 1:  # late: the other has given up, though its call is still there
            with pytest.raises(CollectiveTimeout, match=r"making MPIGroup 'pair' on rank 1 of 2.* within 0.2 s"):
                group.subgroup([0, 1], name="pair")

    on_ranks(rank_main)
    print(on_ranks(lambda group: group.split(0).close()))


@needs_mpi
def test_communicators_are_freed_when_all_have_left_and_all_is_well() -> None:
    def rank_main(group: Group) -> tuple[bool, bool]:
        null = runtime().mpi.COMM_NULL
        fine, torn = group.split(0), group.split(0)
        assert isinstance(fine, MPIGroup)
        assert isinstance(torn, MPIGroup)
        fine.all_reduce(torch.ones(1))
        engines = [fine._engine, torn._engine]
        if group.rank == 0:
            with pytest.raises(GroupError):  # out of time, or told that the other has left
                torn.submit(build.barrier().within(0.1)).wait()
        fine.close()
        torn.close()
        group.barrier()
        deadline = time.perf_counter() + 10
        while any(engine in runtime().keep_alive.departing for engine in engines) and time.perf_counter() < deadline:
            runtime().sweep()
        assert not set(engines) & set(runtime().keep_alive.departing)
        return engines[0].comm == null, engines[1].comm == null

    assert on_ranks(rank_main) == [(True, False)] * 2


@needs_mpi
def test_a_dropped_group_ends_its_threads() -> None:
    def rank_main(group: Group) -> None:
        part = group.split(0)
        assert part is not None
        part.all_reduce(torch.ones(2, dtype=torch.bfloat16))
        assert [t for t in threading.enumerate() if part.name in t.name]
        name = part.name
        del part
        for thread in [t for t in threading.enumerate() if name in t.name]:
            thread.join(100)  # the lane may still be letting go of its last job
        assert not [t for t in threading.enumerate() if name in t.name]

    on_ranks(rank_main)


@needs_mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["MPI's own", "a program"])
def test_a_rank_that_comes_late_finds_the_group_in_step(dtype: torch.dtype) -> None:
    def rank_main(group: Group) -> tuple[list[float], Any, Any]:
        side, t, who = group.split(0), torch.full((4,), 1.0 + group.rank, dtype=dtype), None
        assert side is not None
        if group.rank < 2:
            with pytest.raises(CollectiveTimeout) as caught:
                group.submit(build.all_reduce(t).within(3.0)).wait()  # long enough for both to have joined
            who = caught.value.joined, caught.value.missing
        side.barrier()
        if group.rank == 2:
            group.all_reduce(t)
        second = torch.ones(2, dtype=dtype)
        group.all_reduce(second)
        side.close()
        return second.tolist(), t.tolist(), who

    first, second, third = on_ranks(rank_main, 3)
    assert first == second == ([3.0, 3.0], [6.0] * 4, ((0, 1), (2,)))
    assert third == ([3.0, 3.0], [6.0] * 4, None)


@needs_mpi
def test_an_abort_is_reported_to_the_others_at_once() -> None:
    def rank_main(group: Group) -> float:
        side = group.split(0)
        assert side is not None
        side.barrier()
        side.close()
        began = time.perf_counter()
        if group.rank == 1:
            group.abort("enough " + "of this " * 1000)
            return 0.0
        with pytest.raises(GroupAborted, match="the group was aborted: rank 1 aborted: enough"):
            group.submit(build.all_reduce(torch.ones(2))).wait()
        with pytest.raises(GroupAborted):
            group.barrier()
        return time.perf_counter() - began

    assert max(on_ranks(rank_main, 3)) < 20


@needs_mpi
def test_check_peers_raises_after_an_abort() -> None:
    def rank_main(group: Group) -> None:
        side = group.split(0)
        assert side is not None
        if group.rank == 1:
            group.abort("quietly")
        side.barrier()
        if group.rank == 0:
            deadline = time.perf_counter() + 60
            with pytest.raises(GroupAborted, match="quietly"):
                while time.perf_counter() < deadline:
                    group.check_peers()
        side.close()

    on_ranks(rank_main)


@needs_mpi
@pytest.mark.parametrize("what", ["all_reduce", "recv", "send"])
def test_a_rank_that_leaves_is_named(what: str) -> None:
    def rank_main(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            group.close()
            return
        ops = {
            "all_reduce": build.all_reduce(torch.ones(2)),
            "recv": build.recv(torch.ones(2), src=1),
            "send": build.send(torch.ones(2), dst=1),
        }
        began = time.perf_counter()
        with pytest.raises(PeerLost, match="rank 1 is lost: it has closed its group") as caught:
            group.submit(ops[what]).wait()
        assert caught.value.rank == 1
        assert time.perf_counter() - began < 100
        with pytest.raises(PeerLost):
            group.recover()

    on_ranks(rank_main)


@needs_mpi
def test_recovery() -> None:
    def rank_main(group: Group) -> None:
        for round_ in range(3):
            side = group.split(0)
            assert side is not None
            if group.rank == 0:
                group.all_reduce(torch.ones(5), async_op=True)
                group.all_reduce(torch.ones(5, dtype=torch.bfloat16), async_op=True)
                group.abort(f"round {round_}")
            if group.rank == 1:
                with pytest.raises(GroupAborted):
                    group.all_reduce(torch.ones(3, dtype=torch.float16))
            group.recover(timeout=20)
            t = torch.ones(4)
            group.all_reduce(t)
            half = torch.ones(4, dtype=torch.float16)
            group.all_reduce(half)
            assert t.tolist() == half.tolist() == [3.0] * 4
            side.close()

    on_ranks(rank_main, 3)


@needs_mpi
def test_different_sizes_end_with_an_error_on_the_rank_that_sees_it() -> None:
    """Of MPI's own collectives. Open MPI writes past the end of the smaller tensor, here into memory that is the test's."""

    def rank_main(group: Group) -> str:
        t = torch.ones(4000)[: 2 if group.rank == 0 else 4000]
        try:
            group.submit(build.broadcast(t, src=1).within(3)).wait()
        except GroupError as error:
            return str(error)
        return ""

    said = on_ranks(rank_main)[0]
    assert "another rank sent more than there is room for" in said
    assert "do not trust this process any more" in said
    assert "the Verified wrapper" in said
