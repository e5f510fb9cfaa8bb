"""The hub: records that are set once, kept in a file and served to those who know the key."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gradwire.elasticity.hub import Hub, HubClient, Records
from gradwire.elasticity.machine import HubState, Standing, View
from gradwire.elasticity.run_records import RunRecords
from gradwire.errors import GroupError, UsageError

KEY = b"secret"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub(tmp_path / "hub", key=KEY)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gradwire-hub")]


def client(hub: Hub, *, key: bytes = KEY, timeout: float = 30.0) -> HubClient:
    return HubClient(hub.address, key=key, timeout=timeout)


def test_a_record_is_set_once(hub: Hub) -> None:
    a, b = client(hub), client(hub)
    assert a.compare_set("x", "", "1") == "1"
    assert b.compare_set("x", "", "2") == "1"
    assert a.compare_set("x", "", "1") == "1"  # repeated, as after a lost reply
    assert b.compare_set("x", "1", "3") == "3"
    assert a.read("")[1] == {"x": "3"}
    a.close()
    b.close()


def test_one_of_many_proposals_is_recorded(hub: Hub) -> None:
    def propose(number: int) -> View:
        mine = client(hub)
        try:
            return RunRecords(mine).propose(View(1, (f"m{number}",), number))
        finally:
            mine.close()

    with ThreadPoolExecutor(8) as pool:
        (recorded,) = set(pool.map(propose, range(8)))
    assert RunRecords(hub.records).last_view() == recorded


def test_a_read_waits_for_something_new(hub: Hub) -> None:
    mine = client(hub)
    version, _ = mine.read("")
    threading.Timer(0.05, hub.records.compare_set, ("x", "", "1")).start()
    assert mine.read("", version, 30.0) == (version + 1, {"x": "1"})
    assert mine.read("y", version + 1, 0.01) == (version + 1, {})
    hub.records.compare_set("z", "", "2")
    assert mine.read("", version + 1) == (version + 2, {"z": "2"})
    assert mine.read("", version + 3, 30.0) == (version + 2, {"x": "1", "z": "2"})  # such a version is not in the file
    mine.close()


def test_a_reply_that_was_not_waited_for_is_not_that_to_the_next_request(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = client(hub)
    version, _ = mine.read("")

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.read("", version, 30.0)
    assert mine.compare_set("x", "", "1") == "1"
    mine.close()


def test_a_cut_is_noticed_when_it_heals_and_not_as_long_again_as_it_lasted(hub: Hub) -> None:
    mine = client(hub)
    mine.read("")
    assert mine._connection is not None
    for connection in (mine._connection, *hub._connections):
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
    mine.close()


def test_records_outlive_the_hub_and_a_line_that_was_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "hub"
    records = Records(path)
    records.compare_set("gone/a", "", "gone")
    records.compare_set("gone/a", "gone", "")
    records.compare_set("x", "", "a\nb")
    with pytest.raises(UsageError, match="another hub has the file open"):
        Records(path)
    records.close()
    with path.open("ab") as file:
        file.write(b'["y", "not fin')
    again = Records(path)
    assert (again.version, again.values) == (3, {"gone/a": "", "x": "a\nb"})
    again.compare_set("y", "", "2")
    again.close()
    last = Records(path)
    assert last.values["y"] == "2"
    last.close()
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b'["x", "1"]\n[3]\n')
    with pytest.raises(UsageError, match="line 2 is no record"):
        Records(path)


def test_a_full_disk_confirms_nothing_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, write = Records(tmp_path / "hub"), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        with pytest.raises(OSError, match="disk is full"):
            records.compare_set("x", "", "1")
    assert records.read("") == (0, {})
    assert records.compare_set("x", "", "2") == "2"
    records.close()
    again = Hub(tmp_path / "hub", key=KEY)
    assert again.records.values == {"x": "2"}
    mine = client(again)
    mine.read("")
    mine.timeout = 0.2  # once it is connected
    with monkeypatch.context() as patch:
        patch.setattr(again.records, "_append", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(GroupError, match="No space left on device"):
            mine.compare_set("y", "", "1")
    mine.close()
    again.close()


def test_only_those_who_know_the_key_are_served(hub: Hub) -> None:
    stranger = client(hub, key=b"guess")
    with pytest.raises(UsageError, match="the keys differ"):
        stranger.read("")
    mine = client(hub)
    with socket.create_connection(hub.address) as silent, socket.create_connection(hub.address) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert mine.compare_set("x", "", "1") == "1"
        silent.close()
    mine.close()


def test_a_hub_that_has_too_many_open_files_goes_on_when_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(socket.socket):
        refused = 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.refused < 2:
                self.refused += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda address: Full(fileno=create(address).detach()))
    hub = Hub(tmp_path / "hub", key=KEY)
    mine = client(hub)
    assert mine.compare_set("x", "", "1") == "1"
    mine.close()
    hub.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gradwire-hub")]


def test_a_hub_that_has_too_many_threads_goes_on_when_it_has_not(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, Mock(side_effect=[RuntimeError("can't start new thread"), None])

    def try_to_start(thread: threading.Thread) -> None:
        if thread.name == "gradwire-hub-member" and refused.call_count < 1:
            refused()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", try_to_start)
    mine = client(hub)
    assert mine.compare_set("x", "", "1") == "1"
    assert refused.call_count == 1
    mine.close()


def test_a_request_that_makes_no_sense_ends_its_connection_only(hub: Hub) -> None:
    mine, other = client(hub), client(hub)
    other.read("")
    for nonsense in (b"{", b"[]", b'["drop"]', b'["read"]', b'["read", "", 0, "x"]', b'["compare_set", 1, "", "x"]'):
        connection = mine._connect(5.0)
        connection.send_bytes(nonsense)
        with pytest.raises((EOFError, ConnectionError)):
            connection.recv_bytes()
        mine.close()
    assert other.read("") == (0, {})
    other.close()


def test_a_hub_that_is_away_is_named_after_the_deadline_and_found_when_it_is_back(hub: Hub, tmp_path: Path) -> None:
    mine = client(hub)
    mine.compare_set("x", "", "1")
    hub.close()
    mine.timeout = 0.2
    with pytest.raises(GroupError, match=rf"compare_set at the hub 127.0.0.1:{hub.address[1]}: no answer in 0.2 s"):
        mine.compare_set("y", "", "1")
    mine.timeout = 30.0
    back: list[Hub] = []
    later = threading.Timer(0.1, lambda: back.append(Hub(tmp_path / "hub", key=KEY, address=hub.address)))
    later.start()
    assert mine.compare_set("x", "", "2") == "1"
    with pytest.raises(UsageError, match="Choose an address"):
        Hub(tmp_path / "second", key=KEY, address=hub.address)
    mine.close()
    later.join()  # the hub may be heard before it is in the list
    back[0].close()


def test_a_hub_that_is_stopped_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and says nothing
        silent = HubClient(listener.getsockname()[:2], key=KEY, timeout=0.2)
        begun = time.monotonic()
        with pytest.raises(GroupError, match="no answer in 0.2 s"):
            silent.read("")
        assert time.monotonic() - begun < 30


def test_what_members_and_launchers_record(hub: Hub) -> None:
    run = RunRecords(hub.records)
    assert run.last_view() is None
    first = run.propose(View(0, ("a", "b"), 0))
    assert run.propose(View(0, ("a",), 0)) == first == run.last_view()
    run.publish(0, "a", Standing(3, prepared=True))
    run.publish(0, "a", Standing(4, prepared=True))  # its first counts
    run.hold("s", spare=True)
    run.enter_lobby("s")
    run.enter_lobby("c")
    run.enter_lobby("a")  # late: it is in a view
    run.mark("b", gone=True)
    run.mark("c", gone=True)
    run.mark("c", gone=False)
    standings = {"a": Standing(3, prepared=True)}
    version, state = run.look(0)
    assert state == HubState(standings, frozenset("b"), ("c",))
    following = run.propose(View(1, ("a", "c"), 4, ("c",)))
    assert run.look(0, version, 5.0)[1] == HubState(standings, frozenset("b"), (), following)
    assert run.look(1)[1] == HubState({}, frozenset("b"))
    assert RunRecords(hub.records).look(1) == run.look(1)
    assert run.propose(View(2, ("a",), 4)) == run.last_view()
    assert run.facts("c").view == following  # which it has to enter to find that it is out
    assert run.facts("d").view is None
    run.hold("s", spare=False)
    assert run.look(1)[1].lobby == ("s",)
    run.leave("s")
    assert run.facts("s").left > run.facts("a").left


def test_a_look_reads_only_what_is_new(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read, replies = RunRecords(hub.records), hub.records.read, list[dict[str, str]]()

    def counted(*arguments: Any) -> tuple[int, dict[str, str]]:
        version, records = read(*arguments)
        replies.append(records)
        return version, records

    monkeypatch.setattr(hub.records, "read", counted)
    for epoch in range(3):
        run.publish(epoch, "a", Standing(epoch, prepared=False))
        assert list(run.look(epoch)[1].standings) == ["a"]
        run.propose(View(epoch + 1, ("a",), epoch))
    assert [len(reply) for reply in replies] == [1, 2, 2]
