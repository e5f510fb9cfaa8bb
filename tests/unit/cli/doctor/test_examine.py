"""What the doctor says of a host, from facts that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.cli.doctor.examine import Level, compare, examine
from gradwire.cli.doctor.facts import DirectorySpace, Facts, Interface, collect

GIB = 2**30
PLACE = DirectorySpace("/dev/shm", 16 * GIB, 8 * GIB)
LO, ETH = Interface("lo", "127.0.0.1", True), Interface("eth0", "10.0.0.1", True, 10_000)
GOOD = Facts(
    host="here",
    identity="here 1",
    python="3.11.9",
    gradwire="0.1.0",
    torch="2.13.0+cpu",
    extras={"jit": {"numba": "0.68.1"}, "mpi": {"mpi4py": ""}},
    compiler="numba",
    engines={"shared_memory": "", "gloo": "", "nccl": "torch was built without NCCL", "mpi": "no mpirun"},
    torch_cuda="",
    gpus=(),
    has_nvidia_device=False,
    cores=8,
    cpu_quota=None,
    load=0.5,
    shared_memory=PLACE,
    runs=PLACE,
    temporary=PLACE,
    limits={"open files": 1024, "processes": None, "locked memory": 0, "file size": None, "address space": None},
    has_infiniband=False,
    interfaces=(LO, ETH),
    addresses=("10.0.0.1",),
    settings={},
    wrong_settings=(),
)


@pytest.mark.parametrize("several_hosts", [False, True])
def test_a_good_host_has_no_problem(several_hosts):
    assert {one.level for one in examine(GOOD, several_hosts=several_hosts)} == {Level.OK}


P, N = Level.PROBLEM, Level.NOTE
SMALL = DirectorySpace("/dev/shm", 64 * 2**20, 60 * 2**20)


@pytest.mark.parametrize(
    ("changes", "level", "name", "fix"),
    [
        ({"torch": "2.10.1"}, P, "torch", "pip install --upgrade torch"),
        ({"torch": "2.9.0"}, P, "torch", "2.11 or later"),
        ({"torch": "2.16.0a0+git12"}, N, "torch", "tested with torch 2.11 to 2.15"),
        ({"torch": "3.0.0"}, N, "torch", "tested with"),
        ({"extras": {"jit": {"numba": ""}}}, N, "[jit]", "pip install 'gradwire[jit]'"),
        ({"engines": {"gloo": "torch was built without gloo"}}, P, "gloo", "install a torch with gloo"),
        ({"has_nvidia_device": True}, P, "GPUs", "pytorch.org"),
        ({"has_nvidia_device": True, "torch_cuda": "12.8"}, P, "GPUs", "nvidia-smi"),
        ({"cpu_quota": 2.0}, N, "cores", "OMP_NUM_THREADS to 2 divided by"),
        ({"cpu_quota": 0.5}, N, "cores", "OMP_NUM_THREADS to 1 divided by"),
        ({"load": 9.0}, N, "load", "other programs"),
        ({"shared_memory": SMALL}, P, "shared memory", "--shm-size"),
        ({"shared_memory": replace(SMALL, free=500 * 2**20)}, N, "shared memory", "--shm-size"),
        (
            {"shared_memory": DirectorySpace("/x", error="/x is not writable")},
            P,
            "shared memory",
            "GRADWIRE_SHM_DIRECTORY",
        ),
        ({"runs": DirectorySpace("/x", error="/x is not writable")}, N, "runs", "--run-dir"),
        ({"temporary": replace(SMALL, free=0)}, P, "temporary files", "TMPDIR"),
        ({"limits": {"open files": 256}}, P, "open files", "ulimit -n 4096"),
        ({"limits": {"processes": 100}}, P, "processes", "ulimit -u"),
        ({"limits": {"address space": 8 * GIB}}, P, "address space", "ulimit -v unlimited"),
        ({"limits": {"locked memory": 65536}, "has_infiniband": True}, P, "locked memory", "ulimit -l"),
        ({"interfaces": (Interface("lo", "", False), ETH)}, P, "lo", "ip link set lo up"),
        ({"settings": {"GLOO_SOCKET_IFNAME": "eth7"}}, P, "GLOO_SOCKET_IFNAME", "there are lo, eth0"),
        ({"settings": {"NCCL_SOCKET_IFNAME": "=eth"}}, P, "NCCL_SOCKET_IFNAME", "there are lo, eth0"),
        ({"settings": {"OMP_NUM_THREADS": "64"}}, P, "OMP_NUM_THREADS", "there are 8 cores"),
        ({"settings": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, N, "TORCH_DISTRIBUTED_DEBUG", "slower"),
        ({"settings": {"CUDA_LAUNCH_BLOCKING": "1"}}, N, "CUDA_LAUNCH_BLOCKING", "nothing overlaps"),
        ({"wrong_settings": ("RANK is set, WORLD_SIZE is not.",)}, P, "environment", "correct or unset"),
    ],
)
@pytest.mark.parametrize("several_hosts", [False, True])
def test_what_is_wrong_comes_with_its_fix(changes, level, name, fix, several_hosts):
    [found] = [
        one for one in examine(replace(GOOD, **changes), several_hosts=several_hosts) if one.level is not Level.OK
    ]
    assert (found.level, found.name) == (level, name)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("changes", "level", "name", "fix"),
    [
        ({"interfaces": (LO,)}, P, "other hosts", "connect this host"),
        ({"interfaces": (LO, replace(ETH, is_up=False))}, P, "other hosts", "connect this host"),
        ({"addresses": ()}, N, "host name", "GLOO_SOCKET_IFNAME=eth0"),
        ({"addresses": ("127.0.1.1",)}, N, "host name", "GLOO_SOCKET_IFNAME=eth0"),
        ({"settings": {"GLOO_SOCKET_IFNAME": "lo"}}, P, "GLOO_SOCKET_IFNAME", "name eth0"),
        ({"settings": {"MASTER_ADDR": "127.0.0.1"}}, P, "MASTER_ADDR", "address of rank 0's host"),
    ],
)
def test_what_matters_only_between_hosts(changes, level, name, fix):
    facts = replace(GOOD, **changes)
    assert {one.level for one in examine(facts, several_hosts=False)} == {Level.OK}
    [found] = [one for one in examine(facts, several_hosts=True) if one.level is not Level.OK]
    assert (found.level, found.name) == (level, name)
    assert fix in found.fix


def test_prefixes_of_interfaces_are_accepted_as_by_nccl():
    for value in ("eth", "ib,eth0", "^docker", "=eth0"):
        found = examine(replace(GOOD, settings={"NCCL_SOCKET_IFNAME": value}), several_hosts=True)
        assert {one.level for one in found} == ({Level.OK} if value != "ib,eth0" else {Level.OK, Level.PROBLEM})


def test_hosts_must_agree():
    assert {one.level for one in compare({"a": GOOD, "b": replace(GOOD, host="b", python="3.11.2")})} == {Level.OK}
    others = {"a": GOOD, "b": replace(GOOD, torch="2.12.0"), "c": GOOD}
    [wrong] = [one for one in compare(others) if one.level is not Level.OK]
    assert (wrong.name, wrong.value) == ("torch", "2.13.0+cpu on a, c; 2.12.0 on b")
    assert "same torch" in wrong.fix


def test_facts_of_this_host_survive_the_way_to_another():
    facts = collect({"OMP_NUM_THREADS": "1", "HOME": "/nowhere", "SECRET": "x"})
    assert Facts.from_json(facts.as_json()) == facts
    assert facts.settings == {"OMP_NUM_THREADS": "1"}
    assert facts.cores >= 1
    assert "lo" in {one.name for one in facts.interfaces}
    assert facts.extras["jit"]["numba"]
    assert "dev" not in facts.extras


@pytest.mark.parametrize(
    "environ", [{"RANK": "0", "WORLD_SIZE": "two"}, {"WORLD_SIZE": "2"}, {"GRADWIRE_SHM_ROOM": "a lot"}]
)
def test_settings_that_cannot_be_understood(environ):
    found = [one for one in examine(collect(environ), several_hosts=False) if one.name == "environment"]
    assert [one.level for one in found] == [Level.PROBLEM]
    assert any(name in found[0].value for name in ("RANK", "WORLD_SIZE", "GRADWIRE_SHM_ROOM"))


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    facts = collect({"GRADWIRE_SHM_DIRECTORY": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "new" / "deep")})
    assert "is not a directory" in facts.shared_memory.error
    assert facts.temporary.free > 0  # it would be made
