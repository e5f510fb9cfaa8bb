"""What the doctor finds on a host, with one fact of it changed."""

import os
import resource
from importlib import metadata
from types import SimpleNamespace

import pytest

from gradwire.cli.doctor import host_checks
from gradwire.cli.doctor.host_checks import HostFinding, Interface, Level, examine

MIB, GIB = 2**20, 2**30
LO, ETH = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1", True, 10_000)
P, N = Level.PROBLEM, Level.NOTE
EXISTS = os.path.exists


def disk(free: int):
    return lambda path: SimpleNamespace(free=free, total=16 * GIB)


def limits(**small: int):
    """A `getrlimit` with these soft limits, by the names of their constants; the others are unlimited."""
    soft = {getattr(resource, name): value for name, value in small.items()}
    return lambda number: (soft.get(number, resource.RLIM_INFINITY), resource.RLIM_INFINITY)


def device_exists(path: str) -> bool:
    return path == "/dev/nvidiactl" or EXISTS(path)


def not_installed(package: str):
    raise metadata.PackageNotFoundError(package)


@pytest.fixture
def good(monkeypatch):
    """A host without problems, whatever this one is; returns a function that changes one fact of it."""
    facts = {
        "torch.__version__": "2.13.0+cpu",
        "torch.version.cuda": None,
        "torch.cuda.device_count": lambda: 0,
        "torch.distributed.is_gloo_available": lambda: True,
        "os.sched_getaffinity": lambda pid: set(range(8)),
        "os.getloadavg": lambda: (0.5, 0.5, 0.5),
        "os.access": lambda path, mode: True,
        "shutil.disk_usage": disk(8 * GIB),
        "resource.getrlimit": limits(),
        "importlib.metadata.version": lambda package: "0.68.1",
        "_interfaces": lambda: (LO, ETH),
        "_addresses": lambda host: ["10.0.0.1"],
        "cpu_quota": lambda: None,
    }

    def change(name: str, value: object) -> None:
        monkeypatch.setattr(name if "." in name else f"{host_checks.__name__}.{name}", value)

    for name, value in facts.items():
        change(name, value)
    change("os.path.exists", lambda path: path != "/dev/nvidiactl" and EXISTS(path))
    return change


def wrong(environ: dict[str, str], *, several_hosts: bool) -> list[HostFinding]:
    return [one for one in examine(environ, several_hosts=several_hosts) if one.level is not Level.OK]


@pytest.mark.parametrize("several_hosts", [False, True])
def test_a_good_host_has_no_problem(several_hosts, good):
    assert wrong({}, several_hosts=several_hosts) == []


@pytest.mark.parametrize(
    ("fact", "value", "level", "name", "fix"),
    [
        ("torch.__version__", "2.10.1", P, "torch", "pip install --upgrade torch"),
        ("torch.__version__", "2.9.0", P, "torch", "2.11 or later"),
        ("torch.__version__", "2.16.0a0+git12", N, "torch", "tested with torch 2.11 to 2.15"),
        ("torch.__version__", "3.0.0", N, "torch", "tested with"),
        ("importlib.metadata.version", not_installed, N, "numba", "pip install 'gradwire[jit]'"),
        ("torch.distributed.is_gloo_available", lambda: False, P, "gloo", "install a torch with gloo"),
        ("os.path.exists", device_exists, P, "GPUs", "pytorch.org"),
        ("cpu_quota", lambda: 2.0, N, "cores", "OMP_NUM_THREADS to 2 divided by"),
        ("cpu_quota", lambda: 0.5, N, "cores", "OMP_NUM_THREADS to 1 divided by"),
        ("os.getloadavg", lambda: (9.0, 0, 0), N, "load", "their times will vary"),
        ("resource.getrlimit", limits(RLIMIT_NOFILE=256), P, "open files", "ulimit -n 4096"),
        ("resource.getrlimit", limits(RLIMIT_NPROC=100), P, "processes", "ulimit -u"),
        ("resource.getrlimit", limits(RLIMIT_AS=8 * GIB), P, "address space", "ulimit -v unlimited"),
        ("_interfaces", lambda: (Interface("lo", "", False), ETH), P, "lo", "ip link set lo up"),
        ("GLOO_SOCKET_IFNAME", "eth7", P, "GLOO_SOCKET_IFNAME", "there are lo, eth0"),
        ("NCCL_SOCKET_IFNAME", "=eth", P, "NCCL_SOCKET_IFNAME", "there are lo, eth0"),
        ("NCCL_SOCKET_IFNAME", "ib,eth0", P, "NCCL_SOCKET_IFNAME", "there are lo, eth0"),
        ("OMP_NUM_THREADS", "64", P, "OMP_NUM_THREADS", "this host has 8 cores"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", N, "TORCH_DISTRIBUTED_DEBUG", "slower"),
        ("CUDA_LAUNCH_BLOCKING", "1", N, "CUDA_LAUNCH_BLOCKING", "nothing overlaps"),
        ("WORLD_SIZE", "2", P, "environment", "correct or unset"),
        ("GRADWIRE_SHM_ROOM", "a lot", P, "environment", "correct or unset"),
        ("GRADWIRE_SHM_DIRECTORY", __file__, P, "shared memory", "GRADWIRE_SHM_DIRECTORY"),
    ],
)
@pytest.mark.parametrize("several_hosts", [False, True])
def test_what_is_wrong_comes_with_its_fix(fact, value, level, name, fix, several_hosts, good):
    environ = {fact: value} if fact.isupper() else {}
    if not environ:
        good(fact, value)
    [found] = wrong(environ, several_hosts=several_hosts)
    assert (found.level, found.name) == (level, name)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("fact", "value", "level", "name", "fix"),
    [
        ("_interfaces", lambda: (LO,), P, "other hosts", "connect this host"),
        ("_interfaces", lambda: (LO, ETH._replace(is_up=False)), P, "other hosts", "connect this host"),
        ("_addresses", lambda host: [], N, "host name", "GLOO_SOCKET_IFNAME=eth0"),
        ("_addresses", lambda host: ["127.0.1.1"], N, "host name", "GLOO_SOCKET_IFNAME=eth0"),
        ("GLOO_SOCKET_IFNAME", "lo", P, "GLOO_SOCKET_IFNAME", "name eth0"),
        ("MASTER_ADDR", "127.0.0.1", P, "MASTER_ADDR", "address of rank 0's host"),
    ],
)
def test_what_matters_only_between_hosts(fact, value, level, name, fix, good):
    environ = {fact: value} if fact.isupper() else {}
    if not environ:
        good(fact, value)
    assert wrong(environ, several_hosts=False) == []
    [found] = wrong(environ, several_hosts=True)
    assert (found.level, found.name) == (level, name)
    assert fix in found.fix


@pytest.mark.parametrize(("free", "level"), [(0, P), (100 * MIB, N), (GIB, Level.OK)])
def test_directories_that_are_too_small(free, level, good):
    good("shutil.disk_usage", disk(free))
    found = {one.name: one for one in examine({}, several_hosts=False)}
    assert found["temporary files"].level is level
    assert found["shared memory"].level is (P if free < 128 * MIB else level)


def test_a_driver_whose_devices_torch_does_not_find(good):
    good("os.path.exists", device_exists)
    good("torch.version.cuda", "12.8")
    [found] = wrong({}, several_hosts=False)
    assert (found.level, found.name) == (P, "GPUs")
    assert "nvidia-smi" in found.fix


@pytest.mark.parametrize("value", ["eth", "^docker", "=eth0"])
def test_prefixes_of_interfaces_are_accepted_as_by_nccl(value, good):
    assert wrong({"NCCL_SOCKET_IFNAME": value}, several_hosts=True) == []


def test_this_host(tmp_path):
    found = {one.name: one for one in examine({"TMPDIR": str(tmp_path / "new" / "deep")}, several_hosts=False)}
    assert "127.0.0.1" in found["lo"].value
    assert "numba" in found
    assert " free of " in found["temporary files"].value  # it would be made
