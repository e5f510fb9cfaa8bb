"""`hosts(n)`: several hosts on one machine, as network namespaces that are joined by a bridge.

Each host has its own address, loopback device and host name (by a UTS namespace); a process that runs on it reaches the others only
through its link, whose rate can be limited. Needs Linux, root, and `ip` (and `tc`, for a rate).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gradwire.errors import UsageError

_LIMIT = 20.0
"""Seconds that one command may take."""

INTERFACE = "eth0"
"""The interface name of a host's link on the host, e.g. for gloo's GLOO_SOCKET_IFNAME."""


def why_not(*, mbit: float | None = None) -> str | None:
    """The reason why hosts cannot be made here, or None if they can. Only an attempt shows it, so one is created and removed."""
    if not os.path.isdir("/proc/self/ns"):
        return "network namespaces need Linux with /proc mounted"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for tool in ("ip", "unshare", *(["tc"] if mbit is not None else [])):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is not installed (it is part of iproute2, or of util-linux)"
    name = f"gw-try-{secrets.token_hex(3)}"
    try:
        _do("ip", "netns", "add", name)
        try:
            _do("ip", "link", "add", f"{name[-6:]}-a", "type", "veth", "peer", "name", f"{name[-6:]}-b")
            _do("ip", "link", "del", f"{name[-6:]}-a")
            _do("ip", "netns", "exec", name, "unshare", "--uts", "true")
        finally:
            _do("ip", "netns", "del", name)
    except UsageError as error:
        return f"this machine does not permit it: {error}"
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """One host: start processes on it with `popen` or `run`, reach it from the others at `address`."""

    name: str
    address: str
    interface: str = INTERFACE

    def popen(self, command: Sequence[str], **named: Any) -> subprocess.Popen[Any]:
        """Start `command` on this host, with the arguments of `subprocess.Popen`. End it before the `hosts` block ends."""
        return subprocess.Popen(self.command(command), **named)

    def run(self, command: Sequence[str], *, timeout: float = _LIMIT, **named: Any) -> subprocess.CompletedProcess[Any]:
        """Run `command` on this host until it ends."""
        return subprocess.run(self.command(command), timeout=timeout, check=False, **named)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on this host, by exec."""
        named = f'echo {self.name} > /proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh", *command]


@contextmanager
def hosts(n: int, *, mbit: float | None = None) -> Iterator[list[Host]]:
    """`n` hosts that can reach each other; with `mbit`, each sends at most that many megabits per second.

    ::

        with hosts(2, mbit=100) as (one, two):
            server = one.popen(["python", "serve.py", one.address])
            two.run(["python", "ask.py", one.address])

    Processes that still run on a host when the block ends are killed.
    """
    reason = why_not(mbit=mbit)
    if reason is not None:
        raise UsageError(f"hosts({n}, mbit={mbit}): {reason}. Run it as root on a machine that permits it.")
    if not 1 <= n <= 200 or (mbit is not None and mbit <= 0):
        raise UsageError(f"hosts({n}, mbit={mbit}): choose from 1 to 200 hosts, and a positive rate, or None.")
    key = secrets.token_hex(3)
    with ExitStack() as made:
        switch = f"gw-{key}"  # the bridge has its own namespace, isolated from the machine's network
        _add_namespace(made, switch)
        _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge", "up")
        yield [_add_host(made, switch, f"gw-{key}-{i}", i, mbit) for i in range(n)]


def _add_namespace(made: ExitStack, name: str) -> None:
    _do("ip", "netns", "add", name)
    made.callback(_remove, name)


def _add_host(made: ExitStack, switch: str, name: str, number: int, mbit: float | None) -> Host:
    _add_namespace(made, name)
    address = f"10.231.0.{number + 1}"
    port = f"port{number}"
    _do("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
    _do("ip", "-n", name, "link", "set", INTERFACE, "up")
    _do("ip", "-n", name, "link", "set", "lo", "up")
    if mbit is not None:
        rate = ["rate", f"{mbit}mbit", "burst", str(max(32_000, int(mbit * 1e6 / 8 / 250))), "latency", "400ms"]
        _do("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate)
    return Host(name, address)


def _remove(name: str) -> None:
    """Remove a namespace, after killing its processes: otherwise it would continue to exist without a name."""
    for pid in _do("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    _do("ip", "netns", "del", name)


def _do(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise UsageError(f"{' '.join(command)}: {done.stderr.strip() or f'it ended with {done.returncode}'}")
    return done.stdout
