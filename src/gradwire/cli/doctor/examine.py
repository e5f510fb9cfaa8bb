"""What is wrong with a host, from its facts alone, and how to fix it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from gradwire.cli.doctor.facts import LOOPBACK, DirectorySpace, Facts, is_loopback
from gradwire.observe.units import size

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""Versions of torch that gradwire is tested with."""
_MIB, _GIB = 2**20, 2**30
_LEAST_SHARED, _GOOD_SHARED = 128 * _MIB, _GIB
"""Bytes for a group of two ranks with a small model, and for ordinary ones."""
_LEAST_FILES = 1024
_LEAST_PROCESSES = 1024
_LEAST_LOCKED = 64 * _MIB
_DEFAULTS = {"jit": "sums in shared memory are not compiled and take longer"}
"""What is missed without an extra that improves what everyone uses."""


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Training works, but perhaps not as well as it could."""
    PROBLEM = "problem"
    """Training fails or hangs, or is far slower than it should be."""


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One fact, judged. Everything but OK has a `fix`."""

    area: str
    name: str
    value: str
    level: Level = Level.OK
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "level": self.level.value}


def examine(facts: Facts, *, several_hosts: bool) -> list[HostFinding]:
    """All findings of one host. With `several_hosts` it must be reachable from others."""
    return [
        *_software(facts),
        *_engines(facts),
        *_devices(facts),
        *_memory(facts),
        *_limits(facts),
        *_network(facts, several_hosts=several_hosts),
        *_settings(facts, several_hosts=several_hosts),
    ]


def _software(facts: Facts) -> Iterator[HostFinding]:
    yield HostFinding("software", "gradwire", facts.gradwire)
    yield HostFinding("software", "Python", facts.python)
    version = tuple(int(number) for number in re.findall(r"\d+", facts.torch)[:2])
    span = ".".join(map(str, OLDEST_TORCH)), ".".join(map(str, NEWEST_TORCH))
    if version < OLDEST_TORCH:
        fix = f"gradwire needs torch {span[0]} or later: pip install --upgrade torch"
        yield HostFinding("software", "torch", facts.torch, Level.PROBLEM, fix)
    elif version > NEWEST_TORCH:
        fix = f"gradwire is tested with torch {span[0]} to {span[1]}; should something fail, try one of these"
        yield HostFinding("software", "torch", facts.torch, Level.NOTE, fix)
    else:
        yield HostFinding("software", "torch", facts.torch)
    for extra, packages in facts.extras.items():
        there = ", ".join(f"{package} {version}" for package, version in packages.items() if version)
        absent = ", ".join(package for package, version in packages.items() if not version)
        value = "; ".join(filter(None, [there, f"{absent} not installed" if absent else ""]))
        if absent and extra in _DEFAULTS:
            fix = f"{_DEFAULTS[extra]}: pip install 'gradwire[{extra}]'"
            yield HostFinding("software", f"[{extra}]", value, Level.NOTE, fix)
        else:
            yield HostFinding("software", f"[{extra}]", value)


def _engines(facts: Facts) -> Iterator[HostFinding]:
    for kind, reason in facts.engines.items():
        if kind in ("shared_memory", "gloo") and reason:
            fix = "install a torch with gloo, on Linux: gradwire's groups for CPU tensors need it"
            yield HostFinding("engines", kind, f"not usable: {reason}", Level.PROBLEM, fix)
        elif kind == "nccl" and not reason and not facts.gpus:
            yield HostFinding("engines", kind, "not usable: there is no GPU")
        else:
            yield HostFinding("engines", kind, f"not usable: {reason}" if reason else "usable")


def _devices(facts: Facts) -> Iterator[HostFinding]:
    built = f"torch is built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "torch is built without CUDA"
    if facts.gpus:
        yield HostFinding("devices", "GPUs", ", ".join(facts.gpus))
    elif facts.has_nvidia_device and not facts.torch_cuda:
        fix = "install the build of torch for your driver's CUDA version: see pytorch.org"
        yield HostFinding("devices", "GPUs", f"one is there, but {built}", Level.PROBLEM, fix)
    elif facts.has_nvidia_device:
        fix = "compare the driver's CUDA version in nvidia-smi with torch's; look at CUDA_VISIBLE_DEVICES"
        yield HostFinding("devices", "GPUs", f"one is there, but torch finds none; {built}", Level.PROBLEM, fix)
    else:
        yield HostFinding("devices", "GPUs", f"none; {built}")
    quota = facts.cpu_quota
    if quota is not None and quota < facts.cores:
        fix = f"torch would start too many threads: set OMP_NUM_THREADS to {max(1, int(quota))} divided by the ranks of this host"
        yield HostFinding(
            "devices", "cores", f"{facts.cores}, of which the container may use the time of {quota:g}", Level.NOTE, fix
        )
    else:
        yield HostFinding("devices", "cores", str(facts.cores))
    if facts.load > facts.cores:
        fix = "other programs use the cores: ranks wait for each other's turns. Find them with top"
        yield HostFinding("devices", "load", f"{facts.load:.1f}, on {facts.cores} cores", Level.NOTE, fix)
    else:
        yield HostFinding("devices", "load", f"{facts.load:.1f}")


def _memory(facts: Facts) -> Iterator[HostFinding]:
    shared = facts.shared_memory
    larger = (
        f"make it larger: docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g {shared.path}; or choose another "
        "tmpfs with GRADWIRE_SHM_DIRECTORY"
    )
    yield _judge("shared memory", shared, _LEAST_SHARED, _GOOD_SHARED, larger)
    runs = "name another directory with gradwire run --run-dir, or set XDG_STATE_HOME"
    yield _judge("runs", facts.runs, 64 * _MIB, _GIB, f"free some space, or {runs}", if_unwritable=Level.NOTE)
    yield _judge("temporary files", facts.temporary, 64 * _MIB, _GIB, "free some space, or set TMPDIR")


def _judge(
    name: str, place: DirectorySpace, least: int, good: int, fix: str, *, if_unwritable: Level = Level.PROBLEM
) -> HostFinding:
    if place.error:
        return HostFinding("memory and disks", name, place.error, if_unwritable, fix)
    value = f"{place.path}: {size(place.free)} free of {size(place.total)}"
    if place.free >= good:
        return HostFinding("memory and disks", name, value)
    return HostFinding("memory and disks", name, value, Level.PROBLEM if place.free < least else Level.NOTE, fix)


def _limits(facts: Facts) -> Iterator[HostFinding]:
    needs = {
        "open files": (_LEAST_FILES, f"ulimit -n {4 * _LEAST_FILES} before training: every connection is an open file"),
        "processes": (
            _LEAST_PROCESSES,
            f"ulimit -u {8 * _LEAST_PROCESSES} before training: threads count as processes",
        ),
        "file size": (64 * _GIB, "ulimit -f unlimited before training: shared memory is a large, sparse file"),
        "address space": (
            256 * _GIB,
            "ulimit -v unlimited before training: shared memory reserves address space, which costs no memory",
        ),
    }
    if facts.has_infiniband:
        needs["locked memory"] = (_LEAST_LOCKED, "ulimit -l unlimited before training: InfiniBand locks its buffers")
    for name, (least, fix) in needs.items():
        limit = facts.limits.get(name)
        value = "unlimited" if limit is None else f"{limit:,}" if name in ("open files", "processes") else size(limit)
        bad = limit is not None and limit < least
        yield HostFinding("limits", name, value, Level.PROBLEM if bad else Level.OK, fix if bad else "")


def _network(facts: Facts, *, several_hosts: bool) -> Iterator[HostFinding]:
    names = [interface.name for interface in facts.interfaces]
    outside = [one.name for one in facts.interfaces if one.name != LOOPBACK and one.is_up and one.address]
    for interface in facts.interfaces:
        if interface.address or interface.name == LOOPBACK:
            down = interface.name == LOOPBACK and not interface.address
            fix = "ip link set lo up: ranks of one host connect through it" if down else ""
            yield HostFinding("network", interface.name, str(interface), Level.PROBLEM if down else Level.OK, fix)
    if several_hosts and not outside:
        fix = "connect this host, and give its interface an IPv4 address"
        yield HostFinding("network", "other hosts", "no interface leads to them", Level.PROBLEM, fix)
    yield _host_name(facts, outside, several_hosts=several_hosts)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.settings.get(variable, "")
        if not value:
            continue
        unknown = _unknown_interfaces(value, names)
        if unknown:
            fix = f"there is no such interface on this host; there are {', '.join(names)}"
            yield HostFinding("network", variable, value, Level.PROBLEM, fix)
        elif several_hosts and value == LOOPBACK:
            fix = f"other hosts cannot be reached through it: unset it, or name {_one_of(outside)}"
            yield HostFinding("network", variable, value, Level.PROBLEM, fix)
        else:
            yield HostFinding("network", variable, value)


def _host_name(facts: Facts, outside: list[str], *, several_hosts: bool) -> HostFinding:
    addresses = facts.addresses
    set_interface = f"set GLOO_SOCKET_IFNAME={_one_of(outside)}" if outside else "set GLOO_SOCKET_IFNAME"
    level = Level.NOTE if several_hosts else Level.OK
    if not addresses:
        fix = (
            f"torch's own gloo would listen on the loopback address: add {facts.host} to /etc/hosts, or {set_interface}"
        )
        return HostFinding("network", "host name", f"{facts.host}: not resolved", level, fix if several_hosts else "")
    value = f"{facts.host}: {', '.join(addresses)}"
    if (
        any(is_loopback(address) for address in addresses)
        and several_hosts
        and "GLOO_SOCKET_IFNAME" not in facts.settings
    ):
        fix = f"torch's own gloo would listen where other hosts cannot reach it: {set_interface} (gradwire's finds its way)"
        return HostFinding("network", "host name", value, level, fix)
    return HostFinding("network", "host name", value)


def _one_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else " or ".join(names) or "an interface that leads to them"


def _unknown_interfaces(value: str, names: list[str]) -> list[str]:
    """Of a list of interfaces, those that do not exist. NCCL accepts prefixes, `=exact` and `^not these`.

    >>> _unknown_interfaces("eth,=ib0", ["lo", "eth1"]), _unknown_interfaces("^docker", ["lo"])
    (['=ib0'], [])
    """
    if value.startswith("^"):
        return []
    return [
        one
        for one in value.split(",")
        if not any(name == one[1:] if one.startswith("=") else name.startswith(one) for name in names)
    ]


def _settings(facts: Facts, *, several_hosts: bool) -> Iterator[HostFinding]:
    for error in facts.wrong_settings:
        yield HostFinding("settings", "environment", error, Level.PROBLEM, "correct or unset these variables")
    seen = facts.settings
    threads = seen.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > facts.cores:
        fix = f"there are {facts.cores} cores: set at most that, divided by the ranks of this host"
        yield HostFinding("settings", "OMP_NUM_THREADS", threads, Level.PROBLEM, fix)
    if seen.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        fix = "torch checks every collective and is slower: unset it unless you look for an error"
        yield HostFinding("settings", "TORCH_DISTRIBUTED_DEBUG", "DETAIL", Level.NOTE, fix)
    if seen.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        fix = "nothing overlaps on the GPU: unset it unless you look for an error"
        yield HostFinding("settings", "CUDA_LAUNCH_BLOCKING", seen["CUDA_LAUNCH_BLOCKING"], Level.NOTE, fix)
    address = seen.get("MASTER_ADDR", "")
    if several_hosts and is_loopback(address):
        fix = "only processes of this host reach it: give the address of rank 0's host"
        yield HostFinding("settings", "MASTER_ADDR", address, Level.PROBLEM, fix)


def compare(hosts: Mapping[str, Facts]) -> Iterator[HostFinding]:
    """What must be the same on all hosts, by name of the host."""
    for name, of in {
        "gradwire": lambda facts: facts.gradwire,
        "torch": lambda facts: facts.torch,
        "Python": lambda facts: facts.python.rpartition(".")[0],
    }.items():
        by_value: dict[str, list[str]] = {}
        for host, facts in hosts.items():
            by_value.setdefault(of(facts), []).append(host)
        if len(by_value) > 1:
            value = "; ".join(f"{value} on {', '.join(where)}" for value, where in by_value.items())
            yield HostFinding("hosts", name, value, Level.PROBLEM, f"install the same {name} on all hosts")
        else:
            yield HostFinding("hosts", name, f"{next(iter(by_value))} on all")
