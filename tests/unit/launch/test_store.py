"""Where ranks meet: hosting, reaching, arriving, and what is said when somebody does not."""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.failure.store_calls import bounded
from gradwire.groups.store.private_store import PrivateStore, release
from gradwire.groups.store.rendezvous import host_store
from gradwire.launch import Address, Launcher, World
from gradwire.launch.store import arrive, broadcast_text, open_store, say_goodbye


def world(
    rank: int, size: int = 2, *, port: int = 0, host: str = "127.0.0.1", local_size: int | None = 1, **more
) -> World:
    """Two hosts, unless said otherwise."""
    return World(rank, size, Launcher.TORCHRUN, store=Address(host, port), local_size=local_size, **more)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_hosted_store_listens_on_the_loopback_alone():
    store = host_store()
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    lines = Path("/proc/self/net/tcp").read_text().splitlines()
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert f"0100007F:{store.port:04X}" in listening
    store.set("after a visitor who said nothing", "well")


def test_ranks_of_a_hosted_world_meet_and_attempts_are_kept_apart():
    hosted = host_store()
    a, b = (open_store(world(0, port=hosted.port, hosted=True, attempt=attempt), timeout=5) for attempt in "01")
    a.set("key", "first")
    assert not b.check(["key"])


def listening(port: int) -> list[str]:
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


@pytest.fixture
def opened():
    """`open_store`, and what it has opened is closed at the end."""
    stores = []

    def open_one(*args, **named):
        stores.append(open_store(*args, **named))
        return stores[-1]

    yield open_one
    for store in stores:
        release(store)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "0100007F"), ("::1", "00000000000000000000000001000000"), ("localhost", None)]
)
def test_on_one_host_rank_0_hosts_on_the_loopback_alone(host, expected, opened):
    port = free_port()
    first = world(0, port=port, host=host, local_rank=0, local_size=2)
    ours = opened(first, timeout=5)
    assert {address.rpartition(":")[0] for address in listening(port)} <= ({expected} if expected else LOOPBACKS)
    assert listening(port)
    again = opened(first, timeout=5, meeting=1)  # as gw.init() after close() does
    ours.set("key", "value")
    assert not again.check(["key"])
    guest = opened(world(1, port=port, host=host, local_rank=1, local_size=2), timeout=5)
    assert guest.get("key") == b"value"


LOOPBACKS = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.parametrize("local_size", [2, None])
def test_on_one_host_ranks_move_to_a_private_store(local_size, opened):
    hosted = host_store()
    with ThreadPoolExecutor(2) as threads:
        worlds = [world(rank, port=hosted.port, hosted=True, local_size=local_size) for rank in range(2)]
        first, second = threads.map(lambda world: opened(world, timeout=5), worlds)
    assert isinstance(first, PrivateStore)
    assert isinstance(second, PrivateStore)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert not [key for key in hosted.list_keys() if key.endswith("key")]


def test_a_private_store_of_another_job_is_refused(opened):
    hosted, world_0, world_1 = (host_store(), *(world(rank, port=0, hosted=True, local_size=2) for rank in range(2)))
    world_0, world_1 = (replace(each, store=Address("127.0.0.1", hosted.port)) for each in (world_0, world_1))
    other = host_store()
    stranger = opened(replace(world_0, store=Address("127.0.0.1", other.port)), timeout=5)
    hosted.set("gradwire/private/0", stranger.name)
    with pytest.raises(GroupError, match="does not belong to 127.0.0.1:.*It is not used"):
        opened(world_1, timeout=5)


def test_a_private_store_that_is_none_is_refused(opened):
    hosted = host_store()
    hosted.set("gradwire/private/0", "/etc/passwd")
    with pytest.raises(GroupError, match="'/etc/passwd': not a valid name"):
        opened(world(1, port=hosted.port, hosted=True, local_size=2), timeout=5)


def test_the_name_of_a_failed_attempt_is_passed_over(opened):
    hosted = host_store()
    worlds = [world(rank, port=hosted.port, hosted=True, local_size=2) for rank in range(2)]
    open_store(worlds[0], timeout=5).close()
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(opened, worlds[1], timeout=30)
        ours = opened(worlds[0], timeout=5)
        ours.set("key", "value")
        assert late.result().get("key") == b"value"


def test_rank_0_that_does_not_come_is_named(opened):
    hosted = host_store()
    with pytest.raises(CollectiveTimeout, match=r"ranks \[0\] did not arrive within 0.2 s") as caught:
        opened(world(1, port=hosted.port, hosted=True, local_size=2), timeout=0.2)
    assert caught.value.missing == (0,)


def test_a_port_that_somebody_else_has_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        with pytest.raises(GroupError, match="rank 0 cannot host the store"):
            open_store(world(0, port=port, local_rank=0, local_size=2), timeout=5)


def test_rank_0_hosts_where_nobody_else_does():
    port = free_port()
    host = open_store(world(0, port=port), timeout=5)
    guest = open_store(world(1, port=port), timeout=5)
    guest.set("key", "value")
    assert host.get("key") == b"value"
    again = open_store(world(0, port=port), timeout=5)  # as torch.distributed in the same process would
    assert again.get("key") == b"value"


def test_alone_there_is_nobody_to_meet():
    assert isinstance(open_store(World(0, 1, Launcher.NONE), timeout=5), HashStore)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_set():
    with socket.create_server(("", 0)) as taken:
        with pytest.raises(
            GroupError, match=r"rank 0 of 2 \(torchrun\): rank 0 cannot host .*set MASTER_PORT"
        ) as caught:
            open_store(world(0, port=taken.getsockname()[1]), timeout=5)
    assert len(str(caught.value)) < 600  # without the engine's stack
    del caught


def test_a_store_that_is_not_there_is_a_timeout_with_its_address(capfd):
    port, began = free_port(), time.monotonic()
    with pytest.raises(
        CollectiveTimeout, match=rf"store at 127.0.0.1:{port} could not be reached within 0.3 s: .*refused"
    ):
        open_store(world(1, port=port), timeout=0.3)
    assert time.monotonic() - began < 60
    assert capfd.readouterr().err == ""


def test_an_address_that_is_not_rank_0s_is_a_timeout_without_a_stack(capfd):
    port = free_port()
    with pytest.raises(
        CollectiveTimeout, match=r"no-such-host\.invalid:\d+.* must be one of this host: set MASTER_ADDR"
    ):
        open_store(world(0, port=port, host="no-such-host.invalid"), timeout=0.5)
    assert not listening(port)
    assert capfd.readouterr().err == ""


def test_a_store_that_ends_while_ranks_wait_is_an_error_of_ours():
    hosted = host_store()
    guest = TCPStore("127.0.0.1", hosted.port, is_master=False, timeout=timedelta(seconds=5))
    calls = bounded(guest, 5, "meeting")
    assert not calls.check(["key"])
    del hosted
    with pytest.raises(GroupError, match="^meeting: the connection to the rendezvous store has failed.*often rank 0"):
        calls.check(["key"])


def test_arriving_names_who_is_missing(capfd):
    store = host_store()
    began = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"ranks \[0, 2\] did not arrive within 0.2 s") as caught:
        arrive(store, world(1, 3), timeout=0.2)
    assert time.monotonic() - began >= 0.2
    assert (caught.value.joined, caught.value.missing) == ((1,), (0, 2))
    assert capfd.readouterr().err == ""


def test_a_rank_that_timed_out_may_come_again():
    store = PrefixStore("x", HashStore())
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match=r"ranks \[0\] did not arrive"):
            arrive(store, world(1), timeout=0.05)
    arrive(store, world(0), timeout=10)
    arrive(store, world(1), timeout=10)


def test_two_processes_as_one_rank_are_refused(monkeypatch):
    store = PrefixStore("x", HashStore())
    with pytest.raises(CollectiveTimeout):
        arrive(store, world(1), timeout=0.05)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(UsageError, match="another process is already rank 1.*unset them"):
        arrive(store, world(1), timeout=0.05)


def test_the_host_of_the_store_waits_for_the_others_a_while():
    store, began = HashStore(), time.monotonic()
    say_goodbye(store, world(0), patience=0.2)
    assert time.monotonic() - began >= 0.2
    say_goodbye(store, world(1), patience=90)
    say_goodbye(store, world(0), patience=90)
    say_goodbye(store, world(0, hosted=True), patience=90)
    assert time.monotonic() - began < 60


def test_a_host_that_is_gone_is_no_reason_to_complain(capfd):
    port = free_port()
    host = open_store(world(0, port=port), timeout=5)
    guest = open_store(world(1, port=port), timeout=5)
    del host
    say_goodbye(guest, world(1), patience=1)
    with pytest.raises(RuntimeError):  # the host is gone, and a rank that still uses the store is told
        guest.add("left", 0)


class Comm:
    """A communicator of a fake MPI, whose broadcast delivers `message` or never ends."""

    def __init__(self, rank: int, size: int, message: bytes | None = None) -> None:
        self.rank, self.size, self.message = rank, size, message

    def Ibcast(self, buffer: bytearray, root: int) -> SimpleNamespace:
        if self.message is not None:
            buffer[:] = self.message.ljust(len(buffer))
        return SimpleNamespace(Test=lambda: self.message is not None)


def fake_mpi(monkeypatch, comm: Comm) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=comm)))


MPI = World(1, 2, Launcher.MPIRUN, store=Address("", 0), local_size=1)


def test_mpi_tells_where_the_store_is(monkeypatch):
    store = host_store()
    fake_mpi(monkeypatch, Comm(1, 2, f"127.0.0.1:{store.port}".encode()))
    open_store(MPI, timeout=5).set("key", "")
    assert store.check(["key"])


def test_on_one_host_mpi_tells_the_name_of_a_private_store(monkeypatch, opened):
    with PrivateStore.create() as store:
        fake_mpi(monkeypatch, Comm(1, 2, store.name.encode()))
        opened(replace(MPI, local_size=2), timeout=5).set("key", "")
        assert store.check(["key"])


def test_without_mpi4py_a_meeting_place_is_demanded(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"mpi4py cannot be imported: .*set MASTER_ADDR and MASTER_PORT"):
        open_store(MPI, timeout=5)


def test_an_mpi4py_of_another_mpi_is_found_out(monkeypatch):
    fake_mpi(monkeypatch, Comm(0, 1))
    with pytest.raises(UsageError, match="in mpi4py this is rank 0 of 1. It was built for another MPI"):
        broadcast_text("", MPI, timeout=5)


def test_a_broadcast_that_never_comes_is_a_timeout(monkeypatch):
    fake_mpi(monkeypatch, Comm(1, 2))
    with pytest.raises(CollectiveTimeout, match="rank 0 has not sent the store.s address over MPI within 0.05 s"):
        broadcast_text("", MPI, timeout=0.05)
