"""What is wrong with this host, and how to fix it: software, devices, limits, network and settings."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from typing import NamedTuple

import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import UsageError
from gradwire.groups.shared_memory.segment import default_directory
from gradwire.launch.environment import SHM_DIRECTORY, shared_memory_options
from gradwire.launch.world import find_world
from gradwire.observe.rings.runs import runs_directory
from gradwire.observe.units import plural, size
from gradwire.runtime.host import contents, cpu_quota
from gradwire.testing.mpi import missing as missing_mpi

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""Versions of torch that gradwire is tested with."""
_MIB, _GIB = 2**20, 2**30
_LOOPBACK = "lo"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_REQUEST = 256  # at least sizeof(struct ifreq)


class Level(StrEnum):
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


_Findings = Iterator[tuple[str, str] | tuple[str, str, Level, str]]
"""Name and value of findings; of those that may not be OK also their level then, and the fix, empty if they are."""


def examine(environ: Mapping[str, str], *, several_hosts: bool) -> list[HostFinding]:
    """All findings of this host. With `several_hosts` it must be reachable from others."""
    found = {
        "software": _software(),
        "engines": _engines(),
        "devices": _devices(),
        "memory and disks": _space(environ),
        "limits": _limits(),
        "network": _network(environ, several_hosts=several_hosts),
        "settings": _settings(environ, several_hosts=several_hosts),
    }
    return [_finding(area, *one) for area, findings in found.items() for one in findings]


def _finding(area: str, name: str, value: str, level: Level = Level.OK, fix: str = "") -> HostFinding:
    return HostFinding(area, name, value, level if fix else Level.OK, fix)


def versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    python = platform.python_version().rpartition(".")[0]
    return {"gradwire": gradwire.__version__, "torch": torch.__version__, "Python": python}


def _software() -> _Findings:
    yield "gradwire", gradwire.__version__
    yield "Python", platform.python_version()
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    oldest, newest = ".".join(map(str, OLDEST_TORCH)), ".".join(map(str, NEWEST_TORCH))
    if version < OLDEST_TORCH:
        fix = f"gradwire needs torch {oldest} or later: pip install --upgrade torch"
        yield "torch", torch.__version__, Level.PROBLEM, fix
    elif version > NEWEST_TORCH:
        fix = f"gradwire is tested with torch {oldest} to {newest}; should something fail, try one of these"
        yield "torch", torch.__version__, Level.NOTE, fix
    else:
        yield "torch", torch.__version__
    try:
        yield "numba", metadata.version("numba")
    except metadata.PackageNotFoundError:
        fix = "sums in shared memory are not compiled and take longer: pip install 'gradwire[jit]'"
        yield "numba", "not installed", Level.NOTE, fix


def unusable_engines() -> dict[str, str]:
    """By kind of group: why it cannot be used; empty if it can."""
    no_gpu = "" if torch.cuda.device_count() else "there is no GPU"
    return {
        "shared_memory": "" if sys.platform == "linux" else "it needs Linux",
        "gloo": "" if dist.is_gloo_available() else "torch was built without gloo",
        "nccl": no_gpu if dist.is_nccl_available() else "torch was built without NCCL",
        "mpi": missing_mpi() or "",
    }


def _engines() -> _Findings:
    install = "install a torch with gloo, on Linux: gradwire's groups for CPU tensors need it"
    for kind, reason in unusable_engines().items():
        fix = install if kind in ("shared_memory", "gloo") and reason else ""
        yield kind, f"not usable: {reason}" if reason else "usable", Level.PROBLEM, fix


def _devices() -> _Findings:
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if gpus or not os.path.exists("/dev/nvidiactl"):
        yield "GPUs", ", ".join(gpus) or f"none; {built}"
    elif torch.version.cuda:
        fix = "compare the driver's CUDA version in nvidia-smi with torch's; look at CUDA_VISIBLE_DEVICES"
        yield "GPUs", f"one is there, but torch finds none; {built}", Level.PROBLEM, fix
    else:
        fix = "install the build of torch for your driver's CUDA version: see pytorch.org"
        yield "GPUs", f"one is there, but {built}", Level.PROBLEM, fix
    cores, quota, load = len(os.sched_getaffinity(0)), cpu_quota(), os.getloadavg()[0]
    if quota is not None and quota < cores:
        threads = f"{max(1, int(quota))} divided by the ranks of this host"
        fix = f"torch would start too many threads: set OMP_NUM_THREADS to {threads}"
        yield "cores", f"{cores}, of which the container may use the time of {quota:g}", Level.NOTE, fix
    else:
        yield "cores", str(cores)
    if load > cores:
        fix = "ranks will be slow, and their times will vary: end other programs (top lists them), or wait"
        yield "load", f"{load:.1f}: the machine is busy, it has {plural(cores, 'core')}", Level.NOTE, fix
    else:
        yield "load", f"{load:.1f}"


def _space(environ: Mapping[str, str]) -> _Findings:
    shared = environ.get(SHM_DIRECTORY) or default_directory()
    larger = (
        f"make it larger: docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g {shared}; or choose another "
        "tmpfs with GRADWIRE_SHM_DIRECTORY"
    )
    temporary = "free some space, or set TMPDIR"
    runs = "free some space, or name another directory with gradwire run --run-dir, or set XDG_STATE_HOME"
    for name, path, least, unwritable, fix in (
        ("shared memory", shared, 128 * _MIB, Level.PROBLEM, larger),
        ("runs", str(runs_directory(environ)), 64 * _MIB, Level.NOTE, runs),
        ("temporary files", environ.get("TMPDIR") or "/tmp", 64 * _MIB, Level.PROBLEM, temporary),
    ):
        nearest = os.path.abspath(path)  # or the nearest above it that exists: ours are made when they are needed
        while not os.path.exists(nearest):
            nearest = os.path.dirname(nearest)
        if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
            yield name, f"{nearest} is not a {'writable ' * os.path.isdir(nearest)}directory", unwritable, fix
            continue
        usage = shutil.disk_usage(nearest)
        value = f"{path}: {size(usage.free)} free of {size(usage.total)}"
        yield name, value, Level.PROBLEM if usage.free < least else Level.NOTE, fix if usage.free < _GIB else ""


def _limits() -> _Findings:
    needs = {
        "open files": (resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096", "every connection is an open file"),
        "processes": (resource.RLIMIT_NPROC, 1024, "ulimit -u 8192", "threads count as processes"),
        "file size": (resource.RLIMIT_FSIZE, 64 * _GIB, "ulimit -f unlimited", "shared memory is a large, sparse file"),
        "address space": (resource.RLIMIT_AS, 256 * _GIB, "ulimit -v unlimited", "shared memory reserves addresses"),
    }
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        locked = (resource.RLIMIT_MEMLOCK, 64 * _MIB, "ulimit -l unlimited", "InfiniBand locks its buffers")
        needs["locked memory"] = locked
    for name, (number, least, command, why) in needs.items():
        limit, _ = resource.getrlimit(number)
        counts = name in ("open files", "processes")
        value = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}" if counts else size(limit)
        too_low = limit != resource.RLIM_INFINITY and limit < least
        yield name, value, Level.PROBLEM, f"{command} before training: {why}" if too_low else ""


class Interface(NamedTuple):
    """A network interface. `address` is its IPv4 address, empty without one; `mbit` its nominal speed, 0 if unknown."""

    name: str
    address: str
    is_up: bool = True
    mbit: int = 0


def _interfaces() -> Iterator[Interface]:
    for _, name in socket.if_nameindex():
        speed, state = (contents(f"/sys/class/net/{name}/{fact}").strip() for fact in ("speed", "operstate"))
        yield Interface(name, _address(name), state != "down", int(speed) if speed.isdecimal() else 0)


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack(f"{_REQUEST}s", name.encode()[:15]))
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(reply[20:24])


def _network(environ: Mapping[str, str], *, several_hosts: bool) -> _Findings:
    interfaces = list(_interfaces())
    names = [one.name for one in interfaces]
    outside = [one.name for one in interfaces if one.name != _LOOPBACK and one.is_up and one.address]
    for name, address, is_up, mbit in interfaces:
        speed = f", {mbit:,} Mbit/s" if mbit else ""
        if address:
            yield name, f"{address}{speed}{'' if is_up else ', down'}"
        elif name == _LOOPBACK:
            yield name, "no IPv4 address", Level.PROBLEM, "ip link set lo up: ranks of one host connect through it"
    if several_hosts and not outside:
        fix = "connect this host, and give its interface an IPv4 address"
        yield "other hosts", "no interface leads to them", Level.PROBLEM, fix
    one_of = " or ".join(outside) or "an interface that leads to them"
    host, addresses = socket.gethostname(), _addresses(socket.gethostname())
    value = f"{host}: {', '.join(addresses) or 'not resolved'}"
    fix = ""
    if several_hosts and not environ.get("GLOO_SOCKET_IFNAME") and (not addresses or any(map(_is_loopback, addresses))):
        fix = f"torch's own gloo would listen where other hosts cannot reach it: set GLOO_SOCKET_IFNAME={one_of} "
        fix += "(gradwire's finds its way)"
    yield "host name", value, Level.NOTE, fix
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        fix = ""
        if value and _unknown_interfaces(value, names):
            fix = f"there is no such interface on this host; there are {', '.join(names)}"
        elif several_hosts and value == _LOOPBACK:
            fix = f"other hosts cannot be reached through it: unset it, or name {one_of}"
        if value:
            yield variable, value, Level.PROBLEM, fix


def _addresses(host: str) -> list[str]:
    """What a host's name resolves to; nothing if it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


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


def _settings(environ: Mapping[str, str], *, several_hosts: bool) -> _Findings:
    for read in (find_world, shared_memory_options):
        try:
            read(environ)
        except UsageError as error:
            yield "environment", str(error), Level.PROBLEM, "correct or unset these variables"
    cores, threads = len(os.sched_getaffinity(0)), environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        fix = f"this host has {plural(cores, 'core')}: set at most that, divided by the ranks of this host"
        yield "OMP_NUM_THREADS", threads, Level.PROBLEM, fix
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        fix = "torch checks every collective and is slower: unset it unless you look for an error"
        yield "TORCH_DISTRIBUTED_DEBUG", "DETAIL", Level.NOTE, fix
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        fix = "nothing overlaps on the GPU: unset it unless you look for an error"
        yield "CUDA_LAUNCH_BLOCKING", environ["CUDA_LAUNCH_BLOCKING"], Level.NOTE, fix
    address = environ.get("MASTER_ADDR", "")
    if several_hosts and _is_loopback(address):
        fix = "only processes of this host reach it: give the address of rank 0's host"
        yield "MASTER_ADDR", address, Level.PROBLEM, fix
