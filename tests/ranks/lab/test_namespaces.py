"""Hosts as network namespaces: names, addresses, rates, and that nothing is left of them."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from gradwire.errors import UsageError
from gradwire.lab import hosts, namespaces, why_not
from gradwire.runtime import host

WHY_NOT = why_not()
needs_hosts = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def _namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split())


class TestHosts:
    pytestmark = needs_hosts

    def test_a_host_has_a_name_an_address_and_a_loopback_of_its_own(self) -> None:
        with hosts(2) as (one, two):
            assert one.address != two.address
            for each in (one, two):
                done = each.run(
                    ["sh", "-c", "cat /proc/sys/kernel/hostname; ip -br address"], capture_output=True, text=True
                )
                assert done.stdout.startswith(each.name)
                assert f"{each.address}/24" in done.stdout
                assert "127.0.0.1" in done.stdout
        assert socket.gethostname() not in (one.name, two.name)

    def test_host_identity_tells_hosts_apart(self) -> None:
        # By path, without the package around it: importing torch takes longer than all the rest.
        code = f"import runpy; print(runpy.run_path({host.__file__!r})['host_identity']())"
        with hosts(2) as machines:
            outputs = [
                m.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60) for m in machines
            ]
        assert len({done.stdout for done in outputs}) == 2
        assert all(m.name in done.stdout for m, done in zip(machines, outputs, strict=True))

    def test_hosts_reach_each_other(self) -> None:
        listen = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); c, _ = s.accept(); print(c.recv(9))"
        ask = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 5).send(b'hello')"
        with hosts(3) as (one, _, three):
            with one.popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == "up\n"
                assert three.run([sys.executable, "-c", ask, one.address]).returncode == 0
                assert server.stdout.readline() == "b'hello'\n"

    def test_a_rate_is_kept(self) -> None:
        nbytes = 1_500_000
        listen = (
            "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); c, _ = s.accept()\n"
            "while c.recv(1 << 16): pass\nprint('end', flush=True)"
        )
        ask = f"import socket, sys; socket.create_connection((sys.argv[1], 7000), 5).sendall(bytes({nbytes}))"
        with hosts(2, mbit=20) as (one, two):
            with one.popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                server.stdout.readline()
                began = time.perf_counter()
                two.run([sys.executable, "-c", ask, one.address])
                assert server.stdout.readline() == "end\n"
                seconds = time.perf_counter() - began
        assert seconds > nbytes * 8 / 20e6 * 0.9

    def test_nothing_is_left_also_after_a_failure(self) -> None:
        before = _namespaces()
        with pytest.raises(ZeroDivisionError):
            with hosts(2) as (one, _):
                child = one.popen(["sleep", "1000"])
                assert one.name in _namespaces()
                _ = 1 / 0
        assert child.wait(100) == -9
        assert not {name for name in _namespaces() - before if name.startswith(one.name[:-2])}

    @pytest.mark.parametrize(("n", "mbit"), [(0, None), (1000, None), (2, 0.0)])
    def test_what_makes_no_sense_is_refused(self, n: int, mbit: float | None) -> None:
        with pytest.raises(UsageError, match="choose from 1 to 200 hosts, and a positive rate"):
            with hosts(n, mbit=mbit):
                pass


def test_without_root_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "making network namespaces needs root"
    with pytest.raises(
        UsageError, match=r"hosts\(2, mbit=None\): making network namespaces needs root. Run it as root"
    ):
        with hosts(2):
            pass


def test_without_the_tools_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert "'tc' is not installed" in str(why_not(mbit=1))
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert "'ip' is not installed" in str(why_not())


def test_without_permission_the_error_names_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: "/bin/false")

    def refuse(*command: str) -> str:
        raise UsageError(f"{' '.join(command)}: Operation not permitted")

    monkeypatch.setattr(namespaces, "_do", refuse)
    assert "this machine does not permit it: ip netns add" in str(why_not())
