"""Messages: more than there are slots for, tags in any order, from anybody, what does not fit, and what was withdrawn."""

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.collectives import build
from gradwire.collectives.reference import store
from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, GroupError
from gradwire.groups.shared_memory import p2p
from gradwire.groups.shared_memory.board import SLOTS
from gradwire.groups.shared_memory.sync import _THREAD_SPINS, _YIELDS
from helpers.waiting import wait_until


def number(value: float, n: int = 3) -> torch.Tensor:
    return torch.full((n,), float(value))


@pytest.mark.parametrize("receiver_first", [False, True])
def test_more_messages_than_slots_arrive_in_order(world: Any, everywhere: Any, receiver_first: bool) -> None:
    groups = world(2)
    many, first_is_through = 5 * SLOTS + 3, threading.Event()

    def use(group: Any) -> list[float]:
        if group.rank == 0:
            if receiver_first:
                assert first_is_through.wait(60)
            sends = [group.send(number(i, 100 * (i % 7)), dst=1, async_op=True) for i in range(many)]
            first_is_through.set()
            for send in sends:
                send.wait()
            return []
        places = [torch.empty(100 * (i % 7)) for i in range(many)]
        if not receiver_first:
            assert first_is_through.wait(60)
        works = [group.recv(t, src=0, async_op=True) for t in places]
        first_is_through.set()
        for work in works:
            work.wait()
        return [t[0].item() if t.numel() else i for i, t in enumerate(places)]

    results = everywhere(groups, use)
    assert results[1] == list(range(many))


@pytest.mark.parametrize(("many", "nbytes"), [(5 * SLOTS + 3, 12), (1, 1 << 20)], ids=["many", "large"])
@pytest.mark.parametrize("shares", [True, False], ids=["ranks of one process", "ranks of several"])
def test_who_waits_for_many_or_large_messages_sleeps_soon(world: Any, shares: bool, many: int, nbytes: int) -> None:
    """At once where it would keep the interpreter lock from the sender; else after as many looks at messages as at one message."""
    group = world(2)[0]
    engine, looks, slept, rounds = group._engine, [0], threading.Event(), []
    assert not engine.patience.yields
    if not shares:
        engine.patience.yields, engine.patience.thread_spins = _YIELDS, _THREAD_SPINS
    advance, sleep = engine._advance, engine.board.wait_queue.sleep

    def counting() -> bool:
        moved = advance()
        looks[0] = 0 if moved else looks[0] + 1
        return moved

    def sleeping(*args: Any) -> None:
        if len(engine._messages) == many:
            rounds.append(looks[0])
            slept.set()
        sleep(*args)

    engine._advance, engine.board.wait_queue.sleep = counting, sleeping
    works = [group.recv(torch.empty(nbytes // 4), src=1, async_op=True) for _ in range(many)]
    assert slept.wait(100)
    group.abort("enough")
    for work in works:
        with pytest.raises(GroupAborted):
            work.wait()
    checks = many if nbytes < p2p._BYTES_PER_CHECK else nbytes // p2p._BYTES_PER_CHECK
    assert rounds[0] <= (1 if shares else 1 + (_THREAD_SPINS + _YIELDS) // checks)


def test_messages_of_one_tag_are_taken_in_the_order_they_were_sent_while_others_wait(
    world: Any, everywhere: Any
) -> None:
    """Slots are taken out of order, so their places say nothing about the order of the messages."""
    groups = world(2)

    def use(group: Any) -> list[float]:
        if group.rank == 0:
            for work in [group.send(number(i), dst=1, tag=i % 3, async_op=True) for i in range(200)]:
                work.wait()
            return []
        seen: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for i in random.Random(2).sample(range(200), 200):
            t = torch.empty(3)
            group.recv(t, src=0, tag=i % 3)
            seen[i % 3].append(t[0].item())
        assert all(values == sorted(values) for values in seen.values())
        return sorted(value for values in seen.values() for value in values)

    groups[0]._engine.mailbox._free[1].reverse()
    assert everywhere(groups, use)[1] == [float(i) for i in range(200)]


def test_from_anybody_serves_everybody_and_keeps_each_ones_order(world: Any, everywhere: Any) -> None:
    groups = world(4)
    each = 40

    def use(group: Any) -> list[tuple[int, float]]:
        if group.rank != 1:
            for work in [group.send(number(i), dst=1, async_op=True) for i in range(each)]:
                work.wait()
            return []
        # Once all slots are taken it is the receiver that chooses.
        senders = [other for other in groups if other.rank != 1]
        wait_until(lambda: not any(other._engine.mailbox._free[1] for other in senders), "all slots are taken")
        found = []
        for _ in range(3 * each):
            t = torch.empty(3)
            work = group.recv(t)
            found.append((work.source_rank(), t[0].item()))
        return found

    found = everywhere(groups, use)[1]
    for rank in (0, 2, 3):
        assert [value for source, value in found if source == rank] == [float(i) for i in range(each)]
    assert {source for source, _ in found[:3]} == {0, 2, 3}, (
        "a rank with many messages does not keep the others waiting"
    )
    assert all({s for s, _ in found[i : i + 3]} == {0, 2, 3} for i in range(0, 60, 3))


def test_receives_are_served_in_the_order_of_submission(world: Any, everywhere: Any) -> None:
    """One from anybody stands before one from rank 0: the first message is its."""
    groups = world(3)
    first, second, other = torch.empty(3), torch.empty(3), torch.empty(3)
    works = [
        groups[2].recv(first, async_op=True),
        groups[2].recv(second, src=0, async_op=True),
        groups[2].recv(other, src=1, tag=5, async_op=True),
    ]
    wait_until(lambda: len(groups[2]._engine._messages) == 3, "the receives are under way")
    sends = [groups[0].send(number(1), dst=2, async_op=True), groups[1].send(number(9), dst=2, tag=5, async_op=True)]
    for work in [*sends, works[0], works[2]]:
        work.wait()
    assert (first[0].item(), other[0].item()) == (1.0, 9.0)
    assert not works[1].is_completed()
    groups[0].send(number(2), dst=2)
    works[1].wait()
    assert second[0].item() == 2.0
    assert [work.source_rank() for work in works] == [0, 0, 1]


@pytest.mark.parametrize("wrong", [torch.empty(4), torch.empty(3, dtype=torch.int32), torch.empty(0)])
def test_what_does_not_fit_is_reported_on_both_sides(world: Any, everywhere: Any, wrong: torch.Tensor) -> None:
    groups = world(2)

    def use(group: Any) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            if group.rank == 0:
                group.send(number(1), dst=1, label="sent")
            else:
                group.recv(wrong, src=0, label="received")
        return str(caught.value)

    sent, received = everywhere(groups, use)
    assert "label='sent'" in sent
    assert "rank 1 receives another dtype or number of elements" in sent
    assert "label='received'" in received
    assert "rank 0 sends 3 elements" in received
    t = torch.empty(3)
    work = groups[1].recv(t, src=0, async_op=True)
    groups[0].send(number(7), dst=1)
    work.wait()
    assert t.eq(7).all()


def test_a_place_that_cannot_be_written_fails_both_sides_and_nothing_else(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = world(2)
    unaffected = groups[1].recv(torch.empty(3), src=0, tag=1, async_op=True)
    place = torch.empty(3)

    def no_memory(output: torch.Tensor, value: torch.Tensor) -> None:
        if output.data_ptr() == place.data_ptr():
            raise MemoryError("no memory on rank 1")
        store(output, value)

    monkeypatch.setattr(p2p, "store", no_memory)
    receiving = groups[1].recv(place, src=0, async_op=True)
    with pytest.raises(GroupError, match="rank 1 receives another dtype or number of elements, or see its error"):
        groups[0].send(number(1), dst=1)
    with pytest.raises(MemoryError, match="no memory on rank 1"):
        receiving.wait()
    groups[0].send(number(1), dst=1, tag=1)
    unaffected.wait()


def test_messages_that_were_given_up_are_withdrawn_and_their_slots_used_again(world: Any) -> None:
    groups = world(2)
    mailbox = groups[0]._engine.mailbox
    for round_ in range(2):
        given_up = [groups[0].submit(build.send(number(-1), dst=1, tag=9).within(0.05)) for _ in range(SLOTS)]
        for send in given_up:
            with pytest.raises(CollectiveTimeout):
                send.wait()
        wait_until(lambda: not mailbox._free[1] and len(mailbox._withdrawn) == SLOTS, "all messages are withdrawn")
        # All slots hold messages that were withdrawn. The next is put when the receiver has looked at its slots.
        sending = groups[0].send(number(round_), dst=1, tag=9, async_op=True)
        assert not sending.is_completed()
        t = torch.empty(3)
        groups[1].recv(t, src=0, tag=9)
        sending.wait()
        assert t.eq(round_).all(), "a message that was withdrawn was delivered"
    assert len(mailbox._free[1]) + len(mailbox._withdrawn) == SLOTS


def test_a_slot_that_is_used_again_is_not_taken_for_withdrawn(world: Any) -> None:
    groups = world(2)
    mailbox = groups[0]._engine.mailbox
    send = groups[0].submit(build.send(number(-1), dst=1))
    wait_until(lambda: mailbox._sent, "the message is in a slot")
    send.ledger.expire(send)
    with pytest.raises(CollectiveTimeout):
        send.wait()
    wait_until(lambda: mailbox._withdrawn, "the message is withdrawn")  # until then it can be received
    for i in range(3 * SLOTS):
        t = torch.empty(3)
        work = groups[1].recv(t, src=0, async_op=True)
        groups[0].send(number(i), dst=1)
        work.wait()
        assert t.eq(i).all()
    assert len(mailbox._free[1]) >= SLOTS - 1


def test_a_send_that_ran_out_of_time_before_it_had_a_slot(world: Any) -> None:
    groups = world(2)
    first = [groups[0].send(number(i), dst=1, async_op=True) for i in range(SLOTS)]
    late = groups[0].submit(build.send(number(99), dst=1).within(0.1))
    with pytest.raises(CollectiveTimeout):
        late.wait()
    for i, send in enumerate(first):
        t = torch.empty(3)
        groups[1].recv(t, src=0)
        send.wait()
        assert t.eq(i).all()
    open_end = groups[1].submit(build.recv(torch.empty(3), src=0).within(0.2))
    with pytest.raises(CollectiveTimeout):
        open_end.wait()


def test_heap_and_ordinary_memory_strided_and_empty(world: Any, everywhere: Any) -> None:
    groups = world(2)

    def use(group: Any) -> bool:
        heap = group.allocate(50_000)
        heap.copy_(torch.arange(50_000.0))
        sent = [
            heap,
            heap[1:],
            torch.arange(50_000.0),
            heap.view(50, 1000).t(),
            torch.arange(10.0)[::2],
            torch.empty(0),
        ]
        for tag, t in enumerate(sent):
            if group.rank == 0:
                group.send(t, dst=1, tag=tag)
            else:
                for place in (torch.empty(t.shape), group.allocate(t.numel()).view(t.shape))[tag % 2 :][:1]:
                    group.recv(place, src=0, tag=tag)
                    assert torch.equal(place, t)
        return True

    assert everywhere(groups, use) == [True, True]
    reserved = groups[0]._heap.reserved
    for _ in range(100):
        t = torch.empty(50_000)
        work = groups[1].recv(t, src=0, async_op=True)
        groups[0].send(torch.ones(50_000), dst=1)
        work.wait()
    assert groups[0]._heap.reserved == reserved, "copies of what was sent go back to the heap"


def test_a_large_message_in_the_background_does_not_make_the_rest_sleep() -> None:
    """A rank that also waits for something small checks for it as often as without."""
    small, large = SimpleNamespace(checks=1), SimpleNamespace(checks=257)
    for messages, alone, checks in [
        ([], True, 1),
        ([small], True, 1),
        ([large], True, 257),
        ([large, large], True, 514),
        ([large, small], True, 2),
        ([large], False, 1),
    ]:
        assert p2p.checks_per_round(messages, alone=alone) == checks  # type: ignore[arg-type]
