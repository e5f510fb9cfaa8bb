"""The parts of C10dGroup: what engines take, how their errors read, what the membership knows; recovery."""

import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire import observe
from gradwire.collectives import ReduceOp, build
from gradwire.errors import ClosedError, CollectiveTimeout, GradwireError, GroupError, PeerLost, UsageError
from gradwire.groups import C10dGroup, ThreadGroup
from gradwire.groups.c10d.capabilities import find_engine
from gradwire.groups.c10d.engine import GLOO, NCCL
from gradwire.groups.failure.membership import Membership
from gradwire.groups.failure.monitor import Monitor, find_culprit
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work
from gradwire.runtime.host import host_identity
from helpers.threads import run_threads


def work_of(op=None) -> Work:
    return Work(op or build.barrier(label="b"), Ledger(name="g", rank=1, size=3), seq=7, timeout=2.0)


TAKEN = [
    (build.all_reduce(torch.ones(3)), True),
    (build.all_reduce([torch.ones(3), torch.ones(2)]), False),
    (build.all_reduce(torch.ones(4, 2).t()), False),
    (build.all_reduce(torch.ones(3, dtype=torch.int16)), False),
    (build.all_reduce(torch.ones(3, dtype=torch.int32), op=ReduceOp.BAND), True),
    (build.all_reduce(torch.ones(3), op=ReduceOp.PREMUL_SUM, factor=2.0), False),
    (build.reduce(torch.ones(3), dst=0), False),
    (build.all_gather([torch.ones(3), torch.ones(2)], torch.ones(3)), False),
    (build.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3)), True),
    (build.all_to_all_single(torch.ones(2), torch.ones(2), output_split_sizes=[1, 1]), False),
    (build.send(torch.ones(3, dtype=torch.float8_e5m2), dst=1), False),
    (build.barrier(), True),
]


@pytest.mark.parametrize(("op", "taken"), TAKEN, ids=[str(op) for op, _ in TAKEN])
def test_what_gloo_takes_as_it_is(op, taken):
    assert GLOO.takes(op) is taken


def test_nccl_does_not_receive_from_anybody_and_orders_streams():
    assert not NCCL.takes(build.recv(torch.ones(2)))
    assert NCCL.takes(build.recv(torch.ones(2), src=1))
    assert NCCL.stream_ordered


class OnStream:
    """c10d's Work of an engine that orders streams."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.waits, self.completed, self.error = 0, False, error

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.completed


@pytest.fixture
def on_stream():
    """Submits a collective to an engine that orders streams, whose Work is given."""
    with C10dGroup.gloo(dist.HashStore(), 0, 1) as group:

        def submit(native: OnStream) -> Work:
            group._backends["cpu"] = None, replace(NCCL, call=lambda *_: native)
            return group.submit(build.all_gather_into_tensor(torch.empty(2), torch.ones(2)))

        yield submit


def test_no_stream_waits_before_the_waiters_does(on_stream) -> None:
    native = OnStream()
    work = on_stream(native)
    assert native.waits == 0
    assert work.wait()
    assert work.wait()
    assert (native.waits, work.settled, work.is_completed()) == (2, False, False)  # each in its own stream's order
    native.completed = True
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert native.waits == 2


def test_a_future_of_such_an_engine_is_ordered_at_once(on_stream) -> None:
    native = OnStream()
    work = on_stream(native)
    assert work.get_future().done()
    assert (native.waits, work.settled) == (1, False)
    native.completed = True
    assert work.is_completed()


def test_what_such_an_engine_raises_in_a_wait_fails_the_group(on_stream) -> None:
    work = on_stream(OnStream(RuntimeError("NCCL error: remote process exited")))
    for _ in range(2):
        with pytest.raises(GroupError, match="remote process exited"):
            work.wait()
    with pytest.raises(GroupError, match="remote process exited"):
        on_stream(OnStream())


class Engine:
    """As C++ engines look: a name, and no methods in Python."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(("name", "ordered"), [("ucc", True), ("xccl", True), ("mpi", False), ("gloo", False)])
def test_an_unknown_engine_is_asked_for_no_more_than_gloo(name: str, ordered: bool) -> None:
    """On a device, waiting for its Work orders streams."""
    odd = build.all_reduce(torch.ones(3, dtype=torch.int16))
    for device in ("cpu", "cuda"):
        _, engine = find_engine(Engine(name), torch.device(device))
        assert engine.name == name
        assert not engine.takes(odd)
        assert engine.stream_ordered == (ordered and device == "cuda")


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "nccl-lazy"])
def test_all_of_nccls_engines_are_alike(name: str) -> None:
    _, engine = find_engine(Engine(name), torch.device("cuda"))
    assert (engine.name, engine.stream_ordered, engine.takes) == (name, True, NCCL.takes)


def translate(error: Exception, work: Work) -> BaseException:
    with ThreadGroup.world(1)[0] as group:
        return Monitor(group, None).translate(error, work, "gloo")


SAID = [
    ("[pair.cc:553] Connection closed by peer [127.0.0.1]:1445. GLHF!", PeerLost),
    ("Application timeout caused pair closure", PeerLost),
    ("Broken pipe", PeerLost),
    ("Timed out waiting 1000ms for recv operation to complete", CollectiveTimeout),
    ("something nobody has seen", GroupError),
]


@pytest.mark.parametrize(("said", "kind"), SAID, ids=[s for s, _ in SAID])
def test_engines_errors_are_translated(said, kind):
    original = RuntimeError(said)
    error = translate(original, work_of(build.all_reduce(torch.ones(2), label="doomed")))
    assert type(error) is kind
    assert error.__cause__ is original
    assert "label='doomed'" in str(error)
    assert said.splitlines()[0] in str(error)


def test_our_own_errors_pass_untouched():
    error = GradwireError("as it is")
    assert translate(error, work_of()) is error


# -- membership ---------------------------------------------------------------------------------------------------------


def test_pages_are_read_by_the_others():
    store = dist.HashStore()
    a, b = Membership(store, 0, 2), Membership(store, 1, 2)
    b.joined = 3
    b.publish()
    a.refresh()
    assert (a.peers.members[1].joined, a.peers.members[1].pid, a.peers.members[1].host) == (
        3,
        os.getpid(),
        host_identity(),
    )
    assert a.peers.dead() is None
    b.leave("closed")
    a.refresh()
    assert a.peers.left_before(4) == 1
    assert a.peers.left_before(3) is None


def test_a_rank_is_told_that_it_is_left_alone() -> None:
    store = dist.HashStore()
    ranks = [Membership(store, rank, 3) for rank in range(3)]
    ranks[1].leave("closed")
    ranks[0].refresh()
    assert ranks[0].peers.all_left() is None
    ranks[2].leave("closed")
    ranks[0].refresh()
    assert ranks[0].peers.all_left() == 2


def test_a_lost_rank_is_reported_to_everybody_and_the_first_stays():
    store = dist.HashStore()
    a, b = Membership(store, 0, 2), Membership(store, 1, 2)
    a.record_failure(1, "gone")
    a.record_failure(None, "later")
    b.refresh()
    assert b.peers.failure_record == (1, "gone")
    assert find_culprit(b, 1) == (1, "gone")


def test_the_rank_that_was_reported_first_is_lost_not_those_that_ended_because_of_it(monkeypatch):
    store = dist.HashStore()
    ranks = [Membership(store, rank, 4) for rank in range(4)]
    for one in ranks:
        one.publish()
    ranks[3].refresh()
    monkeypatch.setattr("gradwire.groups.failure.membership.is_dead", lambda pid, start: True)
    assert ranks[3].peers.dead() == 0
    ranks[1].record_failure(2, "found by rank 1")
    ranks[3].refresh()
    assert ranks[3].peers.dead() == 2
    assert find_culprit(ranks[3], 1)[0] == 2


def test_two_groups_on_one_store_do_not_mix():
    store = dist.HashStore()
    first, second = Membership(store, 0, 1), Membership(store, 0, 1)
    first.record_failure(0, "gone")
    second.refresh()
    assert second.peers.failure_record is None


def test_a_store_that_fails_is_given_up():
    class Broken(dist.Store):
        calls = 0

        def add(self, key, amount):
            return 1

        def set(self, key, value):
            Broken.calls += 1
            raise RuntimeError("gone")

    membership = Membership(Broken(), 0, 1)
    for joined in range(1, 10):
        membership.joined = joined
        membership.publish()
    assert membership.store_lost
    assert Broken.calls == 3


# -- the group -----------------------------------------------------------------------------------------------------------


def test_only_a_process_group_will_do():
    with pytest.raises(UsageError, match=r"not a torch[.]distributed process group"):
        C10dGroup(object())


# -- recovery ------------------------------------------------------------------------------------------------------------


def test_a_process_groups_own_time_out_is_kept() -> None:
    limit = timedelta(hours=2)
    engine = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit)
    pg = dist.ProcessGroup(dist.HashStore(), 0, 1)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, engine)
    for given in (engine, pg):
        with C10dGroup(given) as group:
            assert group.timeout == 7200
        with C10dGroup(given, timeout=5) as group:
            assert group.timeout == 5


def test_records_name_the_engine_of_each_device(tmp_path: Path) -> None:
    pg = dist.ProcessGroup(dist.HashStore(), 0, 1)
    for device in ("cpu", "cuda"):
        engine = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
        pg._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, engine)
    observe.start(tmp_path, rank=0, size=1)
    try:
        with C10dGroup(pg, name="mine"):
            pass
    finally:
        observe.stop()
    described = observe.read_rings(tmp_path)[0].descriptions["group"][-1]
    assert (described["name"], described["engines"]) == ("mine", {"cpu": "gloo", "cuda": "gloo"})


def test_closing_leaves_somebody_elses_engine_alone() -> None:
    store, engines = dist.HashStore(), {}

    def make(rank: int) -> None:
        engines[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    run_threads(threading.Thread(target=make, args=(rank,)) for rank in range(2))
    group = C10dGroup(engines[0])
    given_up = group.all_reduce(torch.ones(3), async_op=True)
    group.close(timeout=0)
    assert isinstance(given_up.exception(), ClosedError)
    engines[1].allreduce([torch.ones(3)]).wait(timedelta(seconds=20))
    works = [engine.allreduce([torch.ones(3)]) for engine in engines.values()]
    assert all(work.wait(timedelta(seconds=20)) for work in works)
