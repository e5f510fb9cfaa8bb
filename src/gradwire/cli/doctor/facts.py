"""What a host is: software, devices, limits, network, settings. Collected once, judged in `examine`, sent to others as it is."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import UsageError
from gradwire.groups.shared_memory.segment import default_directory
from gradwire.launch.environment import SHM_DIRECTORY, SharedMemory
from gradwire.launch.world import find_world
from gradwire.observe.rings.runs import runs_directory
from gradwire.runtime.host import cpu_quota, host_identity
from gradwire.runtime.jit import compiler
from gradwire.testing.mpi import missing as missing_mpi

_SETTINGS = re.compile(r"(GRADWIRE|GLOO|NCCL|OMP|MASTER|TORCH|CUDA|TP)_|(RANK|WORLD_SIZE|LOCAL_RANK)$")
"""Environment variables that training depends on."""


_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_REQUEST = 256  # at least sizeof(struct ifreq)
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `address` is its IPv4 address, empty without one; `mbit` its nominal speed, 0 if unknown."""

    name: str
    address: str
    is_up: bool
    mbit: int = 0

    def __str__(self) -> str:
        speed = f", {self.mbit:,} Mbit/s" if self.mbit > 0 else ""
        return f"{self.address or 'no IPv4 address'}{speed}{'' if self.is_up else ', down'}"


@dataclass(frozen=True, slots=True)
class DirectorySpace:
    """A directory that must be writable. `error` is the reason why it is not."""

    path: str
    total: int = 0
    free: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """One host, as a process of it sees it."""

    host: str
    identity: str
    python: str
    gradwire: str
    torch: str
    extras: Mapping[str, Mapping[str, str]]
    """By extra of gradwire: the installed versions of its packages, empty for those that are missing."""
    compiler: str
    """Of shared memory's loops; empty without one."""
    engines: Mapping[str, str]
    """By kind of group: why it cannot be used; empty if it can."""
    torch_cuda: str
    """The CUDA version that torch was built for; empty for a build without CUDA."""
    gpus: tuple[str, ...]
    has_nvidia_device: bool
    cores: int
    """That this process may use."""
    cpu_quota: float | None
    """Of the container; None without a limit."""
    load: float
    shared_memory: DirectorySpace
    runs: DirectorySpace
    temporary: DirectorySpace
    limits: Mapping[str, int | None]
    """Soft limits of the process; None: unlimited."""
    has_infiniband: bool
    interfaces: tuple[Interface, ...]
    addresses: tuple[str, ...]
    """What the host's name resolves to."""
    settings: Mapping[str, str]
    wrong_settings: tuple[str, ...]
    """What cannot be understood in the environment variables of launchers and of gradwire."""

    def as_json(self) -> str:
        """For another host: see `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """What `as_json` made."""
        data = json.loads(text)
        places = {name: DirectorySpace(**data[name]) for name in ("shared_memory", "runs", "temporary")}
        tuples = {name: tuple(data[name]) for name in ("gpus", "addresses", "wrong_settings")}
        return cls(**{**data, **places, **tuples, "interfaces": tuple(Interface(**one) for one in data["interfaces"])})


def collect(environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts of this host."""
    return Facts(
        host=socket.gethostname(),
        identity=host_identity(),
        python=platform.python_version(),
        gradwire=gradwire.__version__,
        torch=torch.__version__,
        extras=_extras(),
        compiler=compiler() or "",
        engines=_engines(),
        torch_cuda=torch.version.cuda or "",
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        has_nvidia_device=os.path.exists("/dev/nvidiactl"),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        load=os.getloadavg()[0],
        shared_memory=_place(_shared_memory_directory(environ)),
        runs=_place(str(runs_directory(environ))),
        temporary=_place(environ.get("TMPDIR") or "/tmp"),
        limits={name: _limit(number) for name, number in _LIMITS.items()},
        has_infiniband=os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        interfaces=tuple(interfaces()),
        addresses=host_addresses(socket.gethostname()),
        settings={name: value for name, value in sorted(environ.items()) if _SETTINGS.match(name)},
        wrong_settings=tuple(_wrong(environ)),
    )


_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "file size": resource.RLIMIT_FSIZE,
    "address space": resource.RLIMIT_AS,
}


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


_FOR_DEVELOPERS = ("dev", "docs")
_REQUIREMENT = re.compile(r"""(?P<package>[\w.-]+)[^;]*;\s*extra\s*==\s*['"](?P<extra>[\w-]+)['"]""")


def _extras() -> dict[str, dict[str, str]]:
    """From gradwire's own metadata, so that there is no second list of extras."""
    found: dict[str, dict[str, str]] = {}
    try:
        requirements = metadata.requires("gradwire") or []
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return found
    for match in filter(None, map(_REQUIREMENT.match, requirements)):
        if match["extra"] not in _FOR_DEVELOPERS:
            found.setdefault(match["extra"], {})[match["package"]] = _version(match["package"])
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _engines() -> dict[str, str]:
    shared = "" if sys.platform == "linux" else "it needs Linux"
    return {
        "shared_memory": shared,
        "gloo": "" if dist.is_gloo_available() else "torch was built without gloo",
        "nccl": "" if dist.is_nccl_available() else "torch was built without NCCL",
        "mpi": missing_mpi() or "",
    }


def _shared_memory_directory(environ: Mapping[str, str]) -> str:
    return environ.get(SHM_DIRECTORY) or default_directory()


def _place(path: str) -> DirectorySpace:
    """Space and permissions of a directory, or of the nearest one above it that exists: ours are made when they are needed."""
    nearest = os.path.abspath(path)
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        return DirectorySpace(path, error=f"{nearest} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return DirectorySpace(path, error=f"{nearest} is not writable")
    usage = shutil.disk_usage(nearest)
    return DirectorySpace(path, usage.total, usage.free)


def _wrong(environ: Mapping[str, str]) -> Iterator[str]:
    for read in (find_world, SharedMemory.read):
        try:
            read(environ)
        except UsageError as error:
            yield str(error)


# -- the network ----------------------------------------------------------------------------------------------------------------


def interfaces() -> Iterator[Interface]:
    """All of this host's, as this process sees them."""
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        speed = _read(folder / "speed")  # -1, or an error, where the device has none
        state = _read(folder / "operstate")
        yield Interface(name, _address(name), state != "down", max(0, int(speed)) if _is_number(speed) else 0)


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack(f"{_REQUEST}s", name.encode()[:15])
        try:
            reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(reply[20:24])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def host_addresses(name: str) -> tuple[str, ...]:
    """What a host's name resolves to, without duplicates; nothing if it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether other hosts cannot reach it."""
    return address == "::1" or address.startswith("127.")
