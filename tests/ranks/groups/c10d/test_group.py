"""`C10dGroup` between processes."""

import subprocess
import sys
import threading
import time

import pytest
import torch

from gradwire.collectives import build
from gradwire.errors import GroupAborted, GroupError, PeerLost
from gradwire.groups import Group
from gradwire.runtime.host import process_start
from gradwire.testing import run_ranks


def test_a_process_is_alive_until_it_is_a_zombie():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start(child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while process_start(child.pid) is not None and time.monotonic() < deadline:
        pass  # not reaped: a zombie, which os.kill(pid, 0) would call alive
    assert process_start(child.pid) is None
    child.communicate()
    assert process_start(child.pid) is None


def _rank_of_subgroup(group: Group) -> list[float]:
    part = group.split(group.rank % 2, key=-group.rank)
    assert part is not None
    t = torch.tensor([float(group.rank)])
    part.all_reduce(t)
    order = torch.empty(part.size)
    part.all_gather_into_tensor(order, torch.tensor([float(group.rank)]))
    part.close()
    return [t.item(), *order.tolist()]


def test_subgroups_have_engines_of_their_own():
    assert run_ranks(_rank_of_subgroup, 4, kind="gloo") == [[2, 2, 0], [4, 3, 1], [2, 2, 0], [4, 3, 1]]


def _abort_and_recover(group: Group, lonely: bool) -> tuple[str, float]:
    """With `lonely`, rank 0 has begun an operation that the others never join: the ranks are out of step."""
    group.barrier()
    if group.rank == 1:
        group.abort("on purpose")
    reason = ""
    try:
        # An engine keeps an operation that was given up until its own time-out, so that is short here.
        if lonely and group.rank == 0:
            group.submit(build.all_reduce(torch.ones(3), label="lonely").within(1.0)).wait()
        else:
            group.submit(build.recv(torch.ones(1), src=1 - min(group.rank, 1)).within(1.0)).wait()
    except GroupAborted as error:
        reason = error.reason
    group.recover()
    t = torch.tensor([float(group.rank)])
    group.all_reduce(t)
    return reason, t.item()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("lonely", [False, True], ids=["in step", "out of step"])
def test_an_aborted_group_recovers(kind, lonely):
    for reason, total in run_ranks(lambda group: _abort_and_recover(group, lonely), 3, kind=kind):
        assert "on purpose" in reason
        assert total == 3


def _lost_is_lost(group: Group) -> str:
    group.fail(PeerLost("rank 9 is lost", rank=9))
    with pytest.raises(PeerLost) as caught:
        group.recover(timeout=1)
    return str(caught.value)


def test_a_lost_peer_cannot_be_recovered():
    assert run_ranks(_lost_is_lost, 2, kind="gloo") == ["rank 9 is lost"] * 2


def _many_messages(group: Group) -> None:
    other = 1 - group.rank
    places = [torch.zeros(1) for _ in range(200)]
    receives = [group.recv(t, src=other, tag=tag, async_op=True) for tag, t in enumerate(places)]
    group.send(torch.ones(1), dst=other, tag=199)
    receives[199].wait(60)
    assert places[199].item() == 1
    assert not receives[0].is_completed()
    group.barrier()
    for tag in range(199):
        group.send(torch.ones(1), dst=other, tag=tag)
    for receive in receives:
        receive.wait(60)
    assert all(place.item() == 1 for place in places)


def test_many_messages_finish_in_any_order() -> None:
    run_ranks(_many_messages, 2, kind="gloo")


def _no_further_thread(group: Group) -> tuple[str, float]:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    other = 1 - group.rank
    group.all_reduce(torch.ones(1))  # the group's other threads run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        work = group.recv(torch.ones(3), src=other, async_op=True)
    with pytest.raises(GroupError) as caught:
        work.wait(20)
    group.recover(30)
    t = torch.ones(2)
    group.all_reduce(t)
    return str(caught.value), t.sum().item()


def test_a_message_for_which_no_thread_can_be_started_fails_the_group() -> None:
    for error, total in run_ranks(_no_further_thread, 2, kind="gloo"):
        assert "can't start new thread" in error
        assert total == 4.0
