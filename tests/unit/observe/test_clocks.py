"""Clocks of several hosts from what their ranks did together."""

import random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gradwire.observe.rings.clocks import align, aligned, fit_line
from gradwire.observe.rings.ring import message_key
from gradwire.recorder.format import RecordKind as K


def collectives(record, rank, times, group="world", op="all_reduce"):
    """`times`: (submitted, finished) of collectives 1, 2, …"""
    return [
        record(K.COLLECTIVE_FINISHED, end, op=op, rank=rank, group=group, ordinal=i, duration=end - begin)
        for i, (begin, end) in enumerate(times, 1)
    ]


def test_ranks_of_one_host_share_a_clock(record, ring):
    rings = [ring(0, *collectives(record, 0, [(0, 10)])), ring(1, *collectives(record, 1, [(50, 60)]))]
    assert {host: (a.offset, a.error) for host, a in align(rings).items()} == {"a": (0, 0)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixtures make records, and keep none
@given(offset=st.integers(-(10**10), 10**10), seed=st.integers(0, 1000), number=st.integers(1, 30))
def test_no_collective_ends_before_all_have_submitted_it(record, ring, offset, seed, number):
    rng, now, times = random.Random(seed), 10**6, ([], [])
    for _ in range(number):
        begins = [now + rng.randrange(1000) for _ in range(2)]
        ends = [max(begins) + rng.randrange(1, 1000) for _ in range(2)]
        for rank in range(2):
            shift = offset * rank
            times[rank].append((begins[rank] - shift, ends[rank] - shift))  # host b's clock is `offset` behind
        now = max(ends)
    rings = [ring(r, *collectives(record, r, times[r]), host="ab"[r]) for r in range(2)]
    aligned = align(rings)["b"]
    assert abs(aligned.offset - offset) <= aligned.error + 1
    for (begin_a, end_a), (begin_b, end_b) in zip(*times, strict=True):
        assert end_a >= begin_b + aligned.offset - 1
        assert end_b + aligned.offset >= begin_a - 1


def test_hosts_are_aligned_over_others(record, ring):
    a = ring(0, *collectives(record, 0, [(0, 10)], group="ab"), host="a")
    b_times = collectives(record, 1, [(100, 110)], group="ab") + collectives(record, 0, [(200, 210)], group="bc")
    b = ring(1, *b_times, host="b")
    c = ring(2, *collectives(record, 1, [(5200, 5210)], group="bc"), host="c")
    aligned = align([a, b, c])
    assert aligned["b"].offset == -100
    assert aligned["c"].offset == -5100


def test_hosts_with_nothing_in_common_go_by_their_wall_clocks(record, ring):
    rings = [ring(0, host="a"), ring(1, host="b")]
    rings[1].header.update(started=1000, started_wall=400)
    assert (align(rings)["b"].offset, align(rings)["b"].error) == (-600, -1)


def test_a_broadcast_gives_no_offset(record, ring):
    rings = [ring(r, *collectives(record, r, [(r, r + 5)], op="broadcast"), host="ab"[r]) for r in range(2)]
    assert align(rings)["b"].error == -1


def test_groups_of_the_same_name_are_not_taken_for_one(record, ring):
    def pair(rank):
        found = collectives(record, 0, [(rank, rank + 5)], group="pair")
        return [one._replace(group_id=7 + rank) for one in found]

    assert align([ring(r, *pair(r), host="ab"[r]) for r in range(2)])["b"].error == -1


def message(record, op, rank, peer, begin, end, number=0):
    fields = {"op": op, "group": "world", "rank": rank, "peer": peer, "message": number, "duration": end - begin}
    return record(K.COLLECTIVE_FINISHED, end, **fields)


def test_no_message_is_received_before_it_was_sent(record, ring):
    """Host b's clock is 3 s ahead. Messages in both directions leave 40 ns of doubt."""
    ahead = 3_000_000_000
    a = ring(0, message(record, "send", 0, 1, 100, 110), message(record, "recv", 0, 1, 100, 240), host="a")
    b_records = [
        message(record, "recv", 1, 0, ahead + 90, ahead + 120),
        message(record, "send", 1, 0, ahead + 220, ahead + 230),
    ]
    aligned = align([a, ring(1, *b_records, host="b")])["b"]
    assert (aligned.offset, aligned.error) == (-ahead, 20)


def test_messages_in_one_direction_correct_the_wall_clock(record, ring):
    rings = [
        ring(0, message(record, "send", 0, 1, 100, 110), host="a"),
        ring(1, message(record, "recv", 1, 0, 20, 50), host="b"),
    ]
    assert align(rings)["b"].offset == 50  # by the wall clock it would be 0, and received before it was sent
    assert align(rings)["b"].error == -1


S = 1_000_000_000
HOUR = 3600 * S


def drifting(record, ring, *, drift, offset, seed, length=HOUR, number=400):
    """Two hosts in `length` nanoseconds: all-reduces, messages both ways, and a few collectives that take seconds. The clock of
    host b runs `drift` fast and is `offset` behind at the beginning."""
    rng, records = random.Random(seed), ([], [])

    def local(time, rank):
        return time if rank == 0 else round(time * (1 + drift)) - offset

    for i in range(number):
        now = i * length // number
        slow = 5 * S if i % 50 == 0 else 300_000
        begins = [now + rng.randrange(slow) for _ in range(2)]
        ends = [max(begins) + rng.randrange(20_000, 200_000) for _ in range(2)]
        facts = {"op": "all_reduce", "group": "world", "ordinal": i + 1}
        for rank in range(2):
            begin, end = local(begins[rank], rank), local(ends[rank], rank)
            records[rank].append(record(K.COLLECTIVE_FINISHED, end, rank=rank, duration=end - begin, **facts))
        sender, at = i % 2, max(ends) + 1000
        sent, received = (at, at + 5000), (at - 500, at + rng.randrange(10_000, 90_000))
        for rank, op, (begin, end) in ((sender, "send", sent), (1 - sender, "recv", received)):
            begin, end = local(begin, rank), local(end, rank)
            records[rank].append(message(record, op, rank, 1 - rank, begin, end, number=i))
    return [ring(rank, *records[rank], host="ab"[rank]) for rank in range(2)]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drift=st.sampled_from([50e-6, -50e-6, 3e-6, 0.0, 4e-4]),
    offset=st.integers(-(10**16), 10**16),
    seed=st.integers(0, 1000),
)
def test_clocks_that_drift_for_an_hour(record, ring, drift, offset, seed):
    rings = drifting(record, ring, drift=drift, offset=offset, seed=seed)
    found = align(rings)["b"]
    assert found.drift == pytest.approx(-drift, abs=2e-7)
    assert found.error < 400_000
    for time in (0, HOUR // 3, HOUR):
        true, shown = time, found.apply(round(time * (1 + drift)) - offset)
        assert abs(shown - true) <= found.error + 1
    a, b = aligned(rings)
    ends, begins = {}, {}
    for host in (a, b):
        for one in host.records:
            key = (one.op, one.ordinal) if one.ordinal else message_key(one)
            if one.op != "recv":
                begins[key] = max(begins.get(key, -(10**18)), one.time - one.duration)
            if one.op != "send":
                ends[key] = min(ends.get(key, 10**18), one.time)
    assert len(ends) == 800
    assert all(ends[key] >= begins[key] for key in ends)  # no receive before its send, no end before a submission


def test_in_a_short_time_no_drift_is_made_up(record, ring):
    rings = drifting(record, ring, drift=0.0, offset=7 * S, seed=1, length=20 * S)
    assert align(rings)["b"].drift == 0.0


def test_drift_adds_up_over_hosts(record, ring):
    """a and b share a group, and b and c: c's clock is known by way of b's."""
    ab = drifting(record, ring, drift=20e-6, offset=5 * S, seed=2)
    bc = drifting(record, ring, drift=30e-6, offset=9 * S, seed=3)
    a, b = ab
    # Host b's own time, on which c is 30 millionths fast: its group with c has another name.
    b2 = [one._replace(group="bc", group_id=9, rank=0, peer=1 if one.peer >= 0 else -1) for one in bc[0].records]
    c = [one._replace(group="bc", group_id=9) for one in bc[1].records]
    rings = [a, ring(1, *b.records, *b2, host="b"), ring(2, *c, host="c")]
    found = align(rings)
    assert found["c"].drift == pytest.approx(-50e-6, abs=4e-7)
    on_b = HOUR // 2
    on_c = round(on_b * (1 + 30e-6)) - 9 * S
    assert abs(found["c"].apply(on_c) - found["b"].apply(on_b)) <= found["c"].error


def test_bounds_that_no_line_keeps(record, ring):
    """As when the clock of a host was set while it ran: the line is as little wrong as possible, and by how much is told."""
    line = fit_line([(0, 10), (100 * S, 10)], [(0, 0), (100 * S, 0)])
    assert (line.offset, round(line.drift * 1e12), line.error) == (5, 0, 5)
