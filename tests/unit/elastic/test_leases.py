"""Leases of launchers, with a clock of our own, and what the hub records of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.elasticity.hub import Hub, HubClient
from gradwire.elasticity.leases import BEAT, LEASE, Leases
from gradwire.elasticity.machine import View
from gradwire.elasticity.run_records import RunRecords
from helpers.waiting import wait_until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pass_time(leases: Leases, clock: Clock, seconds: float, *launchers: str) -> None:
    """So much time passes, in which these launchers are heard."""
    for _ in range(round(seconds / BEAT)):
        clock.now += BEAT
        for launcher in 2 * launchers:
            leases.beat(launcher)


def test_a_launcher_that_is_not_heard_is_silent_until_it_is_heard_again() -> None:
    leases = Leases(clock=(clock := Clock()))
    pass_time(leases, clock, 1.0, "a", "b")
    pass_time(leases, clock, LEASE, "a")
    assert leases.silent("ab") == {"a": False, "b": False}
    pass_time(leases, clock, BEAT, "a")
    assert leases.silent("ab") == {"a": False, "b": True}
    leases.beat("b")
    assert leases.silent("ab") == {"a": False, "b": True}
    leases.beat("b")
    assert leases.silent("ab") == {"a": False, "b": False}


def test_a_beat_without_the_reply_to_it_is_no_lease() -> None:
    leases = Leases(clock=(clock := Clock()))
    pass_time(leases, clock, 1.0, "a", "b")
    clock.now += BEAT
    leases.beat("b")  # its last one: the link to it has failed
    pass_time(leases, clock, LEASE - BEAT, "a")
    assert leases.silent("ab") == {"a": False, "b": False}
    pass_time(leases, clock, BEAT, "a")
    assert leases.silent("ab") == {"a": False, "b": True}


def test_a_hub_that_hears_nobody_takes_nobody_for_silent_and_gives_new_leases_later() -> None:
    leases = Leases(clock=(clock := Clock()))
    pass_time(leases, clock, 1.0, "a", "b")
    pass_time(leases, clock, 3 * LEASE)
    assert leases.silent("ab") == {}
    pass_time(leases, clock, LEASE, "a")
    assert leases.silent("ab") == {"a": False, "b": False}
    pass_time(leases, clock, 2 * BEAT, "a")
    assert leases.silent("ab") == {"a": False, "b": True}


def test_a_hub_that_was_started_again_gives_everybody_a_lease() -> None:
    leases = Leases(clock=(clock := Clock()))
    assert leases.silent("ab") == {"a": False, "b": False}
    pass_time(leases, clock, LEASE, "a")
    assert leases.silent("ab") == {"a": False, "b": False}
    pass_time(leases, clock, BEAT, "a")
    assert leases.silent("ab") == {"a": False, "b": True}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub(tmp_path / "hub", key=b"secret")
    yield made
    made.close()


def test_ranks_of_a_silent_launcher_are_gone_until_it_is_heard_again(hub: Hub) -> None:
    hub._leases = Leases(clock=(clock := Clock()))
    run, client = RunRecords(hub.records), HubClient(hub.address, key=b"secret")
    for launcher in ("node1-aa", "node2-bb", "node3-cc"):
        client.call("beat", launcher)
    client.call("beat", "node3-cc", "here", "ended")
    view = run.propose(View(0, ("node1-aa-0", "node2-bb-0"), 0))
    run.enter_lobby("node2-bb-1")
    pass_time(hub._leases, clock, 2 * LEASE, "node1-aa")
    wait_until(lambda: run.look(0)[1].gone, "the hub has looked at the leases")
    assert run.look(0)[1].gone == {"node2-bb-0", "node2-bb-1"}
    assert run.facts("node2-bb-1").here == ()
    assert "silent/node3-cc" not in hub.records.values  # it has ended
    run.mark("node1-aa-0", gone=True)
    assert run.facts("node2-bb-1").lost is None  # it may be back
    run.mark("node2-bb-0", gone=True)
    assert run.facts("node2-bb-1").lost == view
    for _ in range(2):
        client.call("beat", "node2-bb")
    wait_until(lambda: run.facts("node2-bb-1").here, "the hub has looked at the leases")
    assert run.look(0)[1].gone == {"node1-aa-0", "node2-bb-0"}
    client.close()
