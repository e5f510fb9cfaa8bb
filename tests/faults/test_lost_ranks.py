"""Ranks that are lost, stopped, left alone or out of descriptors: the others name them, and none hangs."""

import os
import resource
import signal
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.collectives import Collective, build
from gradwire.errors import CollectiveTimeout, GroupError, PeerLost
from gradwire.groups import Group
from gradwire.groups.shared_memory.board import HERE
from gradwire.groups.store.rendezvous import host_store
from gradwire.testing import run_ranks
from gradwire.testing.conformance.compare import meet, side_group
from gradwire.testing.mpi import missing
from helpers.waiting import wait_until
from helpers.warm_python import WarmPython

SIZE, VICTIM = 4, 2
DEADLINE = 120.0
KINDS = ["gloo", "shared_memory", "hierarchical"]
SOON = DEADLINE / 2
"""Seconds after the death within which survivors must fail: far from the deadline, and more than a loaded machine delays."""

LARGE = 3_000_000


def _ops(group: Group) -> dict[str, Collective]:
    t = torch.ones(100_000)
    return {
        "all_reduce": build.all_reduce(t, label="doomed"),
        "composed all_reduce": build.all_reduce(torch.ones(1000, dtype=torch.int16), label="doomed"),
        "broadcast": build.broadcast(t, src=VICTIM, label="doomed"),
        "all_gather": build.all_gather([torch.empty(5) for _ in range(SIZE)], torch.ones(5), label="doomed"),
        "barrier": build.barrier(label="doomed"),
        "recv": build.recv(t, src=VICTIM, label="doomed"),
    }


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exits() -> None:
    os._exit(3)


def _facts(group: Group, act: Callable[[], Any]) -> dict[str, Any]:
    """The error that a survivor gets from `act`, and how its group ends."""
    began = time.perf_counter()
    facts: dict[str, Any] = {}
    try:
        act()
    except (PeerLost, CollectiveTimeout) as error:
        facts |= {"type": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error)}
    facts["seconds"] = time.perf_counter() - began
    try:
        group.all_reduce(torch.ones(1))
    except GroupError as error:
        facts["afterwards"] = type(error).__name__
    began = time.perf_counter()
    group.close()
    facts["closing"] = time.perf_counter() - began
    return facts


def _check(results: list[Any], label: str = "doomed") -> None:
    for rank, facts in enumerate(results):
        if rank == VICTIM:
            continue
        assert facts["type"] == "PeerLost", facts
        assert facts["rank"] == VICTIM, facts
        assert f"label='{label}'" in facts["text"]
        assert facts["seconds"] < SOON, facts
        assert facts["afterwards"] == "PeerLost"
        assert facts["closing"] < SOON


def _survive(group: Group, what: str, end: Callable[[], None], run: bool) -> dict[str, Any]:
    group.barrier()
    op = _ops(group)[what].within(DEADLINE)
    if group.rank == VICTIM:
        end()
    return _facts(group, lambda: group.run(op) if run else group.submit(op).wait())


@pytest.mark.parametrize("what", ["all_reduce", "composed all_reduce", "broadcast", "all_gather", "barrier", "recv"])
@pytest.mark.parametrize("kind", KINDS)
def test_sigkill_is_reported_to_every_survivor(kind: str, what: str) -> None:
    run = kind == "shared_memory" and what in ("all_reduce", "barrier")
    _check(run_ranks(lambda group: _survive(group, what, _killed, run), SIZE, kind=kind, lost=[VICTIM]))


def test_a_rank_that_exits_is_reported_to_every_survivor() -> None:
    """`os._exit`: no farewell."""
    results = run_ranks(
        lambda group: _survive(group, "all_reduce", _exits, False), SIZE, kind="shared_memory", lost=[VICTIM]
    )
    _check(results)


def _in_the_middle(group: Any, end: Callable[[], None], nth: int, in_heap: bool, run: bool) -> dict[str, Any]:
    """The victim ends at its `nth` signal of a large sum. The others are told long before the deadline."""
    t = group.allocate(LARGE) if in_heap else torch.empty(LARGE)
    t.fill_(1.0)
    group.barrier()
    board = group._board
    if group.rank == VICTIM:
        real, before = board.signal, board.signaled

        def last_signal() -> int:
            if board.signaled - before == nth - 1:
                end()
            return real()

        board.signal = last_signal
    op = build.all_reduce(t, label="in the middle").within(DEADLINE)
    return _facts(group, lambda: group.run(op) if run else group.submit(op).wait())


@pytest.mark.parametrize(
    ("in_heap", "nth", "run"),
    [
        pytest.param(True, 2, True, id="one pass, its share done"),
        pytest.param(False, 1, False, id="before it has announced"),
        pytest.param(False, 4, True, id="before the first chunk is reduced"),
        pytest.param(False, 7, False, id="between chunks"),
    ],
)
def test_killed_in_the_middle_of_a_large_sum(in_heap: bool, nth: int, run: bool) -> None:
    """After its share of a one-pass sum, or between the chunks of a sum of ordinary memory."""
    results = run_ranks(
        lambda group: _in_the_middle(group, _killed, nth, in_heap, run), SIZE, kind="shared_memory", lost=[VICTIM]
    )
    _check(results, "in the middle")


def _stopped(group: Group, gave_up: Path) -> tuple[str, Any]:
    group.barrier()
    if group.rank == 1:
        # Alive, but stopped, as in a debugger.
        while not gave_up.exists():
            pass
        return "", None
    try:
        group.submit(build.all_reduce(torch.ones(3), label="patience").within(1.0)).wait()
    except CollectiveTimeout as error:
        return str(error), error.missing
    finally:
        gave_up.touch()
    return "finished", None


@pytest.mark.parametrize("kind", KINDS)
def test_silence_is_no_death(kind: str, tmp_path: Path) -> None:
    text, missing = run_ranks(lambda group: _stopped(group, tmp_path / "gave up"), 2, kind=kind)[0]
    assert "patience" in text
    assert missing == (1,)


def _sigstop(group: Any, nth: int) -> dict[str, Any]:
    """Rank 2 is stopped at its `nth` signal of a large sum; rank 0 wakes it when the others have given up."""
    pid = int(group._board.pids[VICTIM])
    group.barrier()
    if group.rank == VICTIM:
        board = group._board
        real, before = board.signal, board.signaled

        def stopped_signal() -> int:
            if board.signaled - before == nth - 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return real()

        board.signal = stopped_signal
    facts: dict[str, Any] = {"error": None}
    began = time.perf_counter()
    try:
        group.run(build.all_reduce(torch.ones(LARGE), label="patience").within(1.0))
    except GroupError as error:
        facts |= {"error": type(error).__name__, "text": str(error), "missing": getattr(error, "missing", None)}
    facts["seconds"] = time.perf_counter() - began
    if group.rank == 0:
        wait_until(lambda: all(group._board.states[rank] != HERE for rank in (1, 3)), "ranks 1 and 3 give up too")
        with open(f"/proc/{pid}/stat") as file:
            facts["victim was"] = file.read().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGCONT)
    began = time.perf_counter()
    group.close()
    facts["closing"] = time.perf_counter() - began
    return facts


@pytest.mark.parametrize("nth", [1, 4])
def test_a_rank_that_is_stopped_is_named_at_the_deadline(nth: int) -> None:
    results = run_ranks(lambda group: _sigstop(group, nth), SIZE, kind="shared_memory")
    assert results[0]["victim was"] == "T", "the fault did not fire"
    for rank, facts in enumerate(results):
        assert facts["closing"] < SOON
        if rank == VICTIM:
            assert facts["error"] is not None, "the others had given up"
            assert facts["seconds"] < SOON
            continue
        assert facts["error"] == "CollectiveTimeout", facts
        assert f"missing: ranks [{VICTIM}]" in facts["text"]
        assert "label='patience'" in facts["text"]
        assert 0.9 < facts["seconds"] < SOON


def receive_alone(group: Group) -> float | None:
    """On rank 0: how long the receive waited after the others had left."""
    side = side_group(group)
    if group.rank:
        meet(side)
        group.close()
        meet(side)
        side.close()
        return None
    waiting = group.submit(build.recv(torch.zeros(1), label="from anyone").within(DEADLINE))
    meet(side)
    meet(side)
    began = time.perf_counter()
    with pytest.raises(PeerLost) as caught:
        waiting.wait()
    assert caught.value.rank in range(1, group.size)
    waited = time.perf_counter() - began
    with pytest.raises(PeerLost):
        group.run(build.recv(torch.zeros(1), tag=3).within(DEADLINE))
    side.close()
    return waited


@pytest.mark.parametrize("kind", ["threads", "shared_memory"])
def test_a_receive_from_any_rank_that_nobody_can_answer(kind: str) -> None:
    waited = run_ranks(receive_alone, 3, kind=kind)[0]
    assert waited < DEADLINE / 2


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_same_over_mpi() -> None:
    assert run_ranks(receive_alone, 2, kind="mpi")[0] < DEADLINE / 2


def _without_descriptors(group: Group, *, killed: bool = False) -> tuple[float, str]:
    group.barrier()
    if group.rank != 0:
        time.sleep(2.5)  # the operation is slow, and rank 0 looks for the others
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
    held: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    t = torch.ones(3)
    try:
        group.all_reduce(t)
        return t[0].item(), ""
    except Exception as error:
        return 0.0, repr(error)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if not killed:
            group.barrier()


@pytest.mark.parametrize("kind", ["gloo", "hierarchical", "shared_memory"])
def test_a_rank_without_descriptors_loses_only_who_has_died(kind: str) -> None:
    assert run_ranks(_without_descriptors, 2, kind=kind) == [(2.0, "")] * 2
    (_, error), _ = run_ranks(partial(_without_descriptors, killed=True), 2, kind=kind, lost=(1,))
    assert error.startswith("PeerLost(")
    assert "rank=1" in error or "rank 1" in error


SCRIPT = """
    import os, sys, time, torch
    import gradwire as gw
    from gradwire.collectives import build
    from gradwire.errors import CollectiveTimeout
    group = gw.init(kind=sys.argv[1], timeout=4)
    host = torch.tensor([os.getpid()])
    group.broadcast(host, src=0)
    if group.rank == 0:
        os.kill(os.getpid(), 19)
        os._exit(0)
    began = time.perf_counter()
    while open(f"/proc/{int(host)}/stat").read().rpartition(")")[2].split()[0] != "T":
        assert time.perf_counter() - began < 60, "rank 0 is not stopped"
        time.sleep(0.01)
    began = time.perf_counter()
    forgotten = group.all_reduce(torch.ones(3), async_op=True)
    while not forgotten.is_completed():  # nobody waits for it
        assert time.perf_counter() - began < 30
        time.sleep(0.05)
    assert isinstance(forgotten.exception(), CollectiveTimeout), forgotten.exception()
    began = time.perf_counter()
    group.close()
    gw.launch.leave()
    assert time.perf_counter() - began < 30
    print("closed")
"""


@pytest.mark.parametrize("kind", ["gloo", "hierarchical"])
def test_a_stopped_store_host_holds_nobody(kind: str, warm_python: WarmPython) -> None:
    free = host_store()  # only to find a port
    port = free.port
    del free
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        warm_python.start(
            textwrap.dedent(SCRIPT),
            kind,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            capture=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[1].communicate(timeout=300)
        state = Path(f"/proc/{ranks[0].pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T", "the fault did not fire"
        assert (ranks[1].returncode, out) == (0, "closed\n"), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
