"""Clocks of several hosts from what their ranks did together."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.flight_recorder import RecordKind as K
from gradwire.observe.clocks import align, ambiguous_groups


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


def test_a_broadcast_tells_nothing(record, ring):
    rings = [ring(r, *collectives(record, r, [(r, r + 5)], op="broadcast"), host="ab"[r]) for r in range(2)]
    assert align(rings)["b"].error == -1


def test_groups_of_the_same_name_are_not_taken_for_one(record, ring):
    rings = [ring(r, *collectives(record, 0, [(r, r + 5)], group="pair"), host="ab"[r]) for r in range(2)]
    assert ambiguous_groups(rings) == {"pair"}
    assert align(rings)["b"].error == -1


def test_groups_of_one_name_one_after_the_other_do_not_bound_clocks(record, ring):
    """Their collectives have the same numbers: the submission of one and the end of another would be compared."""

    def finished(rank, time, ordinal):
        fields = {"op": "all_reduce", "group": "world", "rank": rank, "ordinal": ordinal, "duration": 10}
        return record(K.COLLECTIVE_FINISHED, time, **fields)

    times = [(100, 1), (5000, 1), (6000, 2)]
    rings = [
        ring(0, *[finished(0, time, ordinal) for time, ordinal in times], host="a"),
        ring(1, *[finished(1, time + 1000, ordinal) for time, ordinal in times], host="b"),
    ]
    aligned = align(rings)["b"]
    assert (aligned.offset, aligned.error) == (-1000, 10)


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


def test_messages_that_cannot_be_told_apart_bound_nothing(record, ring):
    sends = [message(record, "send", 0, 1, at, at + 1) for at in (100, 900)]
    receives = [message(record, "recv", 1, 0, at, at + 1) for at in (200, 1000)]
    assert align([ring(0, *sends, host="a"), ring(1, *receives, host="b")])["b"].offset == 0
